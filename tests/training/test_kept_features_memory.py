"""Below kept features: a part that remembers records is refused and put back, a loss that looks at inputs refused."""

from __future__ import annotations

import functools
import json
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.core.batch import PerExampleLoss
from sparsedp.core.errors import ModelError, PrivacyError
from sparsedp.runs.history import EpochReport
from sparsedp.training import feature_file
from sparsedp.training.fixed_part import describe_below, split_at_lowest_trained
from sparsedp.training.kept_features import keep_features


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    """A cache that does not exist yet."""
    monkeypatch.setenv("SPARSEDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def records(rows=600, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.rand(rows, 16, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    )


def behind(first, *, head=None):
    torch.manual_seed(7)
    return nn.Sequential(first, nn.Linear(16, 8).requires_grad_(False), head or nn.Linear(8, 3))


def run(model, out=None, *, data=None, loss=None, **settings):
    return sparsedp.fit(
        model,
        data or records(),
        loss or nn.CrossEntropyLoss(reduction="none"),
        **{
            "method": "dp-sgd", "epsilon": 4.0, "delta": 1e-3, "accountant": "rdp", "epochs": 2, "batch_size": 128,
            "seed": 3, "out": out, "progress": False, **settings,
        },
    )  # fmt: skip


class Keeping(nn.Module):
    """A part that gives what it gets, and keeps something while it does."""

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.seen, self.first, self.masks = [], None, {}
        self.hidden = torch.zeros(16)
        self.register_buffer("top", torch.zeros(()))
        self.register_buffer("wide", torch.zeros(1).expand(4))

    def forward(self, x):
        self.keep(self, x)
        return x


def largest_in_a_buffer(part, x):
    part.top.copy_(torch.maximum(part.top, x.max()))


def another_buffer(part, x):
    part.top = torch.maximum(part.top, x.max())


def behind_the_counter(part, x):
    part.top.data += x.sum()


def while_training(part, x):
    if part.training:
        part.top += x.sum()


def last_input(part, x):
    part.last = x


def first_input(part, x):
    part.first = x if part.first is None else part.first


def in_a_list(part, x):
    part.seen.append(x.sum())


def in_a_tensor(part, x):
    part.hidden += x.sum(0)


def the_number_of_rows(part, x):
    part.rows = len(x)


def of_whole_blocks_only(part, x):
    if len(x) == feature_file.BLOCK:
        part.first = x


LEAKS = {
    largest_in_a_buffer: "0.top",
    another_buffer: "0.top",
    behind_the_counter: "0.top",
    while_training: "0.top",
    last_input: "0.last",
    first_input: "0.first",
    in_a_list: "0.seen",
    in_a_tensor: "0.hidden",
    the_number_of_rows: "0.rows",
    of_whole_blocks_only: "0.first",
}


def held(model):
    part = model[0]
    return [
        part.top.tolist(), part.hidden.tolist(), part.first, list(part.seen),
        sorted(vars(part)), sorted(part._buffers),
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["auto", "folder"])
@pytest.mark.parametrize("keep", LEAKS, ids=lambda keep: keep.__name__)
def test_what_a_frozen_part_keeps_of_records_is_refused_by_name_and_put_back(tmp_path, keep, where):
    model = behind(Keeping(keep))
    before, weights = held(model), [p.clone() for p in model.parameters()]
    with pytest.raises(PrivacyError, match=f"{LEAKS[keep]}.* of the model changed"):
        run(model, tmp_path / "run", cache_features="auto" if where == "auto" else tmp_path / "features")
    assert held(model) == before
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not (tmp_path / "run").exists()


def a_frozen_weight(part, x):
    with torch.no_grad():
        part.weight.add_(x.mean())


def test_a_frozen_weight_that_moves_is_refused(tmp_path):
    part = Keeping(a_frozen_weight)
    part.weight = nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(PrivacyError, match=r"0\.weight"):
        run(behind(part), cache_features=tmp_path)


def test_nothing_stays_of_records_when_a_pass_is_broken_off(tmp_path):
    class Broken(Keeping):
        def forward(self, x):
            if len(x) == feature_file.BLOCK:
                self.last = x
                raise KeyboardInterrupt
            return x

    part = Broken(None)
    with pytest.raises(KeyboardInterrupt):
        keep_features(part, records(), None, tmp_path, "")
    assert not hasattr(part, "last")


def a_mask_by_shape(part, x):
    if x.shape[1] not in part.masks:
        part.masks[x.shape[1]] = torch.ones(x.shape[1], x.shape[1]).tril()


def positions_made_once(part, x):
    part.first = torch.arange(x.shape[1]) if part.first is None else part.first


@pytest.mark.parametrize("keep", [a_mask_by_shape, positions_made_once])
def test_public_things_may_be_kept(tmp_path, keep):
    run(behind(Keeping(keep)), cache_features=tmp_path)
    part = Keeping(keep)
    keep_features(part, records(), None, tmp_path, "")
    assert part.masks or part.first is not None, "it stays"


def a_public_number(part, x):
    part.width = x.shape[1]


def test_the_record_names_the_frozen_part_as_it_was_before_it_saw_a_record(tmp_path):
    model = behind(Keeping(a_public_number))
    name = describe_below(split_at_lowest_trained(model)[0])
    run(model, tmp_path / "run", cache_features=tmp_path / "features")
    assert model[0].width == 16
    assert json.loads((tmp_path / "run" / "record.json").read_text())["schema"]["frozen_part"] == name


def stop(event):
    if isinstance(event, EpochReport):
        raise KeyboardInterrupt


@pytest.mark.parametrize("features", ["features", None])
def test_a_run_with_kept_features_goes_on_with_kept_features_alone(tmp_path, features):
    kept = None if features is None else tmp_path / features
    with pytest.raises(KeyboardInterrupt):
        run(behind(nn.Identity()), tmp_path / "run", callbacks=[stop], cache_features=kept)
    if kept is not None:
        with pytest.raises(ModelError, match=r"begun with kept features.*give cache_features"):
            run(behind(nn.Identity()), tmp_path / "run", resume=True)
    assert run(behind(nn.Identity()), tmp_path / "run", resume=True, cache_features=kept).complete


def of_flipped_inputs(model, rows):
    return F.cross_entropy(model(rows[0].flip(-1)), rows[1], reduction="none")


def of_flipped_inputs_while_training(model, rows):
    return F.cross_entropy(model(rows[0].flip(-1) if model.training else rows[0]), rows[1], reduction="none")


def of_noisy_inputs(model, rows):
    return F.cross_entropy(model(rows[0] + torch.randn_like(rows[0])), rows[1], reduction="none")


def with_an_input_beside(model, rows):
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none") + rows[0][:, 12]


def of_a_layer_by_number(model, rows):
    return F.cross_entropy(model[2](model[1](rows[0])), rows[1], reduction="none")


def usual(model, rows):
    inputs, targets = rows
    return F.cross_entropy(model(inputs), targets, reduction="none")


LOOKING = [
    of_flipped_inputs, of_flipped_inputs_while_training, of_noisy_inputs, with_an_input_beside, of_a_layer_by_number,
]  # fmt: skip


def zero_head():
    head = nn.Linear(8, 3)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@pytest.mark.parametrize("loss", LOOKING, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("head", [functools.partial(nn.Linear, 8, 3), zero_head], ids=["drawn", "zero"])
def test_a_loss_that_looks_at_inputs_is_refused_with_kept_features(tmp_path, loss, head):
    model = behind(nn.Identity(), head=head())
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(ModelError, match="the loss is another on kept features"):
        run(model, loss=PerExampleLoss(loss), cache_features=tmp_path / "features")
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not (tmp_path / "features").exists()


def test_auto_keeps_no_features_for_a_loss_that_looks_at_inputs(tmp_path, private_cache, caplog):
    plain, auto = behind(nn.Identity()), behind(nn.Identity())
    run(plain, loss=PerExampleLoss(of_flipped_inputs))
    with caplog.at_level(logging.INFO, "sparsedp"):
        run(auto, loss=PerExampleLoss(of_flipped_inputs), cache_features="auto")
    assert "features are not kept: cache_features: the loss is another" in caplog.text
    assert not (private_cache / "features").exists()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), auto.parameters(), strict=True))


class FirstKept(nn.Linear):
    first = None

    def forward(self, x):
        self.first = x if self.first is None else self.first
        return super().forward(x)


@pytest.mark.parametrize("head", [nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5))])
def test_a_loss_that_only_calls_the_model_is_trained_with_as_without(tmp_path, head):
    state = [p.detach().clone() for p in head.parameters()]
    found = []
    for settings in ({}, {"cache_features": tmp_path / "features"}):
        for parameter, value in zip(head.parameters(), state, strict=True):
            parameter.detach().copy_(value)
        model = behind(nn.Identity(), head=head).train()
        run(model, loss=PerExampleLoss(usual), **settings)
        found.append([p.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_the_trained_part_keeps_while_the_loss_is_tried_is_not_taken_for_its_own(tmp_path):
    model = behind(nn.Identity(), head=FirstKept(8, 3))
    with pytest.raises(PrivacyError, match=r"2\.first"):
        run(model, loss=PerExampleLoss(usual), cache_features=tmp_path)


def test_an_optimizer_of_the_whole_model_trains_the_part_above_kept_features(tmp_path):
    found = []
    for settings in ({}, {"cache_features": tmp_path}):
        model = behind(nn.Identity())
        run(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), **settings)
        found.append([p.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_missing_values_are_no_augmentation(tmp_path):
    x = records().tensors[0].clone()
    x[3, 5] = torch.nan
    found = keep_features(nn.Flatten(), TensorDataset(x, records().tensors[1]), None, tmp_path, "")
    assert torch.equal(found.features.nan_to_num(9.0), x.nan_to_num(9.0))


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_is_drawn_where_it_is_asked_for(tmp_path, monkeypatch, progress):
    drawn = []

    def track(starts, title, *, console, disable):
        drawn.append(not disable)
        return starts

    class Terminal:
        is_terminal = True

        def __init__(self, stderr):
            pass

    monkeypatch.setattr(feature_file, "track", track)
    monkeypatch.setattr(feature_file, "Console", Terminal)
    run(behind(nn.Identity()), cache_features=tmp_path, progress=progress, eval_dataset=records(50, seed=1))
    assert drawn == [progress] * 2


def test_no_log_names_the_digest_of_the_records(tmp_path, caplog):
    keep_features(nn.Flatten(), records(), None, tmp_path, "")
    (folder,) = tmp_path.iterdir()
    for content in (b"", b"garbage"):
        (folder / "features.npy").write_bytes(content)
        keep_features(nn.Flatten(), records(), None, tmp_path, "")
    (folder / "blocks.jsonl").write_text('"other"\n')
    keep_features(nn.Flatten(), records(), None, tmp_path, "")
    assert caplog.text.count("made again") == 3
    assert folder.name not in caplog.text
