"""Kept features: the same run with the cache as without it, computed once, gone on with after a kill, never stale."""

from __future__ import annotations

import copy
import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import sparsedp
from sparsedp import PrivateNormalisation
from sparsedp.core.errors import DataError, ModelError, PrivacyError, SparseDPError
from sparsedp.runs.history import EpochReport
from sparsedp.training import kept_features
from sparsedp.training.held_settings import describe_held
from sparsedp.training.kept_features import keep_below, keep_features
from sparsedp_experiments.models.efficientnet import Pictures

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    """A cache that does not exist yet."""
    monkeypatch.setenv("SPARSEDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def network():
    torch.manual_seed(7)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
    return nn.Sequential(body.requires_grad_(False), nn.Linear(64, 3))


def records(rows=700, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.rand(rows, 1, 8, 8, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    )


def run(model, out, **settings):
    return sparsedp.fit(
        model,
        records(),
        nn.CrossEntropyLoss(reduction="none"),
        method="tp-topk",
        epsilon=4.0,
        delta=1e-3,
        accountant="rdp",
        epochs=2,
        batch_size=128,
        lr=0.5,
        seed=3,
        eval_dataset=records(100, seed=1),
        out=out,
        progress=False,
        **settings,
    )


def test_training_with_kept_features_gives_the_bits_of_training_without(tmp_path):
    plain, cached = network(), network()
    without = run(plain, tmp_path / "plain")
    kept = run(cached, tmp_path / "cached", cache_features=tmp_path / "features")
    assert kept.model is cached
    for (name, expected), found in zip(plain.state_dict().items(), cached.state_dict().values(), strict=True):
        assert torch.equal(expected, found), name
    assert kept.metrics == without.metrics
    assert torch.equal(kept.support.indices, without.support.indices)


def test_a_run_with_kept_features_loads_into_the_whole_model_and_names_its_frozen_part(tmp_path):
    result = run(network(), tmp_path / "run", cache_features=tmp_path / "features")
    again = network()
    sparsedp.load_weights(tmp_path / "run", again)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), result.model.parameters(), strict=True))
    schema = json.loads((tmp_path / "run" / "record.json").read_text())["schema"]
    assert len(schema["frozen_part"]) == 64


CALLS = []


def called_with(count):
    CALLS.append(count)
    if count == kept_features.BLOCK and CALLS.count(count) == 2:
        raise KeyboardInterrupt


class Counted(nn.Flatten):
    """Counts where no guard looks: what a model itself holds of its batches is refused."""

    def forward(self, x):
        called_with(len(x))
        return super().forward(x)


def test_features_are_computed_once_and_gone_on_with_after_a_kill(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(globals(), "CALLS", calls)

    def whole_blocks(rows):
        return [count for count in rows if count > kept_features.PROBE_ROWS]

    body = Counted()
    with pytest.raises(KeyboardInterrupt):
        keep_features(body, records(), None, tmp_path, "")
    done = len(calls)
    found = keep_features(body, records(), None, tmp_path, "")
    assert torch.equal(found.features, records().tensors[0].flatten(1))
    assert whole_blocks(calls[:done]) == [256, 256], "one whole block, one that was killed"
    assert whole_blocks(calls[done:]) == [256, 188]
    done = len(calls)
    assert torch.equal(keep_features(body, records(), None, tmp_path, "").features, found.features)
    assert whole_blocks(calls[done:]) == [], "nothing but a few records was asked again"


def test_a_damaged_block_is_made_again(tmp_path):
    body = nn.Flatten()
    keep_features(body, records(), None, tmp_path, "")
    (file,) = tmp_path.glob("*/features.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert torch.equal(
        keep_features(body, records(), None, tmp_path, "").features, records().tensors[0].flatten(1)
    )


def test_other_weights_and_other_records_are_other_features(tmp_path):
    body = network()[0]
    first = keep_features(body, records(), None, tmp_path, "").features.clone()
    moved = copy.deepcopy(body)
    with torch.no_grad():
        moved[0].bias.add_(1.0)
    assert not torch.equal(keep_features(moved, records(), None, tmp_path, "").features, first)
    assert not torch.equal(keep_features(body, records(seed=5), None, tmp_path, "").features, first)
    assert len(list(tmp_path.iterdir())) == 3


class Flipped(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.arange(4.0) + index
        return (x.flip(0) if torch.rand(()) < 0.5 else x), torch.tensor(0)


def test_augmented_records_have_no_features_to_keep(tmp_path):
    with pytest.raises(SparseDPError, match="augmentation"):
        keep_features(nn.Identity(), Flipped(), None, tmp_path, "")
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_frozen_first_part_is_told_or_trained_as_it_is(tmp_path):
    trained = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(ModelError, match="freeze them"):
        run(trained, tmp_path / "a", cache_features=tmp_path / "features")
    with pytest.raises(ModelError, match=r"expected an nn.Sequential"):
        run(nn.Bilinear(2, 2, 3), tmp_path / "b", cache_features=tmp_path / "features")
    assert run(trained, tmp_path / "c", cache_features="auto").model is trained


class Centred(nn.Flatten):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Later(nn.Flatten):
    """Mixes from the second block on."""

    def forward(self, x):
        flat = super().forward(x)
        return flat - flat.mean(0) if len(x) > 1 and float(x.sum()) > 1e6 else flat


def with_body(body):
    torch.manual_seed(7)
    return nn.Sequential(body, nn.Linear(64, 3))


def frozen(*layers):
    return nn.Sequential(nn.Conv2d(1, 1, 1), *layers).requires_grad_(False)


@pytest.mark.parametrize("where", ["auto", "folder"])
@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (frozen(Centred()), "other features of a record when other records"),
        (frozen(nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten()), "statistics of the whole batch"),
        (frozen(nn.BatchNorm2d(1), nn.Flatten()), "statistics of the whole batch"),
        (frozen(nn.Flatten(), nn.Dropout(0.5)), r"call \.eval\(\) on that part"),
    ],
    ids=["centred", "batch norm without statistics", "live batch norm", "dropout"],
)
def test_a_frozen_part_that_is_no_function_of_a_record_is_refused_with_the_cache_too(
    tmp_path, private_cache, body, complaint, where
):
    with pytest.raises(ModelError, match=complaint):
        run(
            with_body(body),
            tmp_path / "run",
            cache_features="auto" if where == "auto" else tmp_path / "features",
        )
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "features").exists()
    assert not (private_cache / "features").exists()


def test_a_part_in_evaluation_mode_is_kept_as_it_is_trained_on_without(tmp_path):
    body = frozen(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(0.5)).eval()
    without = run(with_body(copy.deepcopy(body)), tmp_path / "plain")
    kept = run(with_body(body), tmp_path / "cached", cache_features=tmp_path / "features")
    assert kept.metrics == without.metrics


def test_mixing_that_sets_in_later_is_found_before_anything_is_trained(tmp_path):
    x = torch.rand(700, 1, 8, 8)
    x[300:] *= 1e4
    data = TensorDataset(x, torch.zeros(700, dtype=torch.int64))
    with pytest.raises(ModelError, match="other features of a record when other records"):
        keep_features(Later(), data, None, tmp_path, "")


def test_a_collate_that_mixes_is_refused_with_the_cache_too(tmp_path):
    def centred(items):
        inputs = torch.stack([x for x, _ in items])
        return inputs - inputs.mean(0), torch.stack([y for _, y in items])

    with pytest.raises(PrivacyError, match="other rows are in the batch"):
        run(network(), tmp_path / "run", cache_features=tmp_path / "features", collate=centred)
    assert not (tmp_path / "features").exists()


class Scale(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return self.by * x.flatten(1)


def test_another_setting_of_a_module_is_another_function(tmp_path):
    for by in (1.0, 5.0):
        found = keep_features(Scale(by), records(), None, tmp_path, "")
        assert torch.equal(found.features, by * records().tensors[0].flatten(1))


class Bag:
    def __init__(self, held):
        self.held = held


class Holding(Scale):
    """Holds its number in something that is no number."""

    def __init__(self, by, wrap):
        super().__init__(0.0)
        self.wrapped = wrap(by)
        self.read = lambda: by

    def forward(self, x):
        return self.read() * x.flatten(1)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda by: [by],
        lambda by: {"by": {"it": by}},
        lambda by: {by, "others"},
        lambda by: torch.full((3,), by),
        lambda by: np.full(3, by),
        Bag,
        lambda by: Bag([Bag(by)]),
        lambda by: [nn.Linear(1, 1).requires_grad_(False), Scale(by)],
        lambda by: partial(max, by),
        lambda by: Scale(by).forward,
        lambda by: lambda x=by: x,
    ],
    ids=[
        "list",
        "mapping",
        "set",
        "tensor",
        "array",
        "object",
        "objects",
        "modules",
        "partial",
        "method",
        "default",
    ],
)
def test_what_a_module_holds_in_a_container_an_object_or_a_function_tells_features_apart(wrap):
    torch.manual_seed(0)
    one = Holding(1.0, wrap)
    del one.read
    torch.manual_seed(0)
    other = Holding(5.0, wrap)
    del other.read
    assert describe_held(one) != describe_held(other)
    assert describe_held(one) == describe_held(copy.deepcopy(one))


def test_a_hook_in_the_fixed_part_and_what_it_closes_over_tell_features_apart():
    found = []
    for by in (None, 1.0, 5.0):
        body = nn.Sequential(nn.Flatten(), nn.Tanh())
        if by is not None:
            body[1].register_forward_hook(lambda _module, _args, output, by=by: by * output)
        found.append(describe_held(body))
    assert len(set(found)) == 3
    assert found[0] == ""


def test_common_layers_hold_nothing_else_so_their_features_keep_their_names():
    layers = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.GELU(), nn.Flatten(), nn.LSTM(2, 2), nn.Upsample(2)
    )
    assert describe_held(layers) == ""


def test_what_is_held_is_told_without_addresses_and_the_order_of_sets():
    assert list({0, 8}) != list({8, 0})
    one, other = Holding(1.0, lambda _: None), Holding(1.0, lambda _: None)
    one.wrapped, other.wrapped = (
        [told, object(), print, lambda x: x, each] for told, each in (({0, 8}, one), ({8, 0}, other))
    )
    assert describe_held(one) == describe_held(other)


FROM = {"by": 1.0, "first": 0}


class Secret(nn.Flatten):
    """A function that nothing of the module tells apart, and that differs for late records alone."""

    def forward(self, x):
        late = x[:, 0, 0, :1] >= FROM["first"]
        return torch.where(late, FROM["by"], 1.0) * super().forward(x)


def test_features_of_another_function_under_the_same_name_are_made_again(tmp_path, caplog, monkeypatch):
    numbered = torch.arange(700.0).reshape(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
    data = TensorDataset(numbered, torch.zeros(700, dtype=torch.int64))
    monkeypatch.setitem(FROM, "first", 600)
    for by in (1.0, 5.0):
        monkeypatch.setitem(FROM, "by", by)
        found = keep_features(Secret(), data, None, tmp_path, "")
        assert torch.equal(found.features, Secret()(numbered))
    assert "not those of this network" in caplog.text


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_kept_features_are_recognised_whatever_their_number(tmp_path, rows, caplog):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 2)).requires_grad_(False)
    first, again = (keep_features(body, records(rows), None, tmp_path, "") for _ in range(2))
    assert torch.equal(first.features, again.features)
    assert not caplog.text


class Threshold(Scale):
    def forward(self, x):
        return torch.where(x.flatten(1) > self.by[0], 10.0, 1.0) * x.flatten(1)


def test_a_threshold_in_a_list_is_another_function_though_no_record_looked_at_shows_it(tmp_path):
    pixels = torch.rand(700, 1, 8, 8) * 0.5
    pixels[101] = 0.9
    data = TensorDataset(pixels, torch.zeros(700, dtype=torch.int64))
    for by in (1.0, 0.8):
        found = keep_features(Threshold([by]), data, None, tmp_path, "")
        assert torch.equal(found.features, Threshold([by])(pixels))


def test_pictures_of_another_size_are_other_features(tmp_path):
    pictures = TensorDataset(torch.rand(4, 3, 16, 16), torch.zeros(4, dtype=torch.int64))
    for size in (16, 32):
        body = nn.Sequential(Pictures(size), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        found = keep_features(body, pictures, None, tmp_path, "")
        torch.testing.assert_close(found.features, body(pictures.tensors[0]))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_module_that_stands_in_the_row_twice_stays_there_twice(tmp_path):
    def shared(*, head_only):
        torch.manual_seed(3)
        tanh = nn.Tanh()
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8)).requires_grad_(False)
        middle = nn.Linear(8, 8).requires_grad_(not head_only)
        return nn.Sequential(body, tanh, middle, tanh, nn.Linear(8, 3))

    for head_only in (False, True):
        plain, cached = shared(head_only=head_only), shared(head_only=head_only)
        run(plain, tmp_path / f"plain{head_only}")
        run(cached, tmp_path / f"cached{head_only}", cache_features=tmp_path / "features")
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), cached.parameters(), strict=True))


def test_a_row_with_a_forward_of_its_own_is_no_row(tmp_path):
    class Own(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ModelError, match=r"got a Own, expected an nn\.Sequential"):
        run(Own(*network()), tmp_path / "run", cache_features=tmp_path / "features")


def brighter_first(model):
    model.register_forward_pre_hook(lambda _module, args: (10 * args[0] + 3,))


def louder(model):
    model.register_forward_hook(lambda _module, _args, output: 20 * output)


def looked_at_backwards(model):
    model.register_full_backward_hook(lambda *_: None)


def a_forward_of_its_own(model):
    usual = model.forward
    model.forward = lambda x: usual(10 * x + 3)


AROUND = {
    brighter_first: "forward pre hooks",
    louder: "forward hooks",
    looked_at_backwards: "backward hooks",
    a_forward_of_its_own: "a forward pass of its own",
}


@pytest.mark.parametrize("change", AROUND, ids=lambda change: change.__name__)
def test_what_acts_on_the_whole_row_is_refused_or_no_features_are_kept(tmp_path, change, caplog):
    model = network()
    change(model)
    with pytest.raises(ModelError, match=f"the model itself has {AROUND[change]}"):
        keep_below(model, records(), None, None, tmp_path / "features")
    with caplog.at_level("INFO", "sparsedp"):
        assert keep_below(model, records(), None, None, "auto") is None
    assert "features are not kept: cache_features: the model itself has" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_model_with_a_hook_is_trained_with_auto_as_without(tmp_path):
    plain, auto = network(), network()
    for model, settings in ((plain, {}), (auto, {"cache_features": "auto"})):
        brighter_first(model)
        run(model, None, **settings)
    assert torch.equal(plain[1].weight, auto[1].weight)


def test_a_row_that_is_called_in_a_way_of_its_own_is_no_row(tmp_path):
    class Called(nn.Sequential):
        def __call__(self, x):
            return 2 * super().__call__(x)

    with pytest.raises(ModelError, match="a forward pass of its own"):
        run(Called(*network()), tmp_path / "run", cache_features=tmp_path / "features")


class RarelyFlipped(Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, index):
        x = torch.arange(4.0) + index
        return (x.flip(0) if index >= 32 and torch.rand(()) < 0.5 else x), torch.tensor(0)


def test_augmentation_beyond_the_first_records_is_found(tmp_path):
    with pytest.raises(SparseDPError, match="augmentation"):
        keep_features(nn.Identity(), RarelyFlipped(), None, tmp_path, "")


def test_constants_in_the_middle_of_the_model_are_refused(tmp_path):
    with pytest.raises(SparseDPError, match="cache_features and normalise"):
        run(network(), tmp_path / "run", cache_features="auto", normalise=PrivateNormalisation())
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_the_network_it_was_begun_with_alone(tmp_path):
    def stop(event):
        if isinstance(event, EpochReport):
            raise KeyboardInterrupt

    other = network()
    with torch.no_grad():
        other[0][0].bias.add_(0.5)
    settings = {"cache_features": tmp_path / "features"}
    with pytest.raises(KeyboardInterrupt):
        run(network(), tmp_path / "run", callbacks=[stop], **settings)
    with pytest.raises(ModelError, match="frozen part of the model is not the one"):
        run(other, tmp_path / "run", resume=True, **settings)
    whole = run(network(), tmp_path / "whole", **settings)
    again = run(network(), tmp_path / "run", resume=True, **settings)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_features_keep_their_type(tmp_path, dtype):
    body = nn.Sequential(nn.Flatten(), Scale(torch.tensor(3.0, dtype=dtype)))
    data = TensorDataset(records().tensors[0].to(dtype), records().tensors[1])
    found = keep_features(body, data, None, tmp_path, "")
    assert torch.equal(found.rows_at(torch.arange(700))[0], 3 * data.tensors[0].flatten(1))


def test_what_cannot_be_kept_is_told(tmp_path):
    class Pair(nn.Flatten):
        def forward(self, x):
            return super().forward(x), x

    with pytest.raises(ModelError, match="gives a tuple, expected one tensor"):
        keep_features(Pair(), records(), None, tmp_path, "")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="expected a folder to keep features in"):
        keep_features(nn.Flatten(), records(), None, tmp_path / "file", "")


def test_an_empty_file_is_made_again(tmp_path):
    keep_features(nn.Flatten(), records(), None, tmp_path, "")
    (file,) = tmp_path.glob("*/features.npy")
    file.write_bytes(b"")
    found = keep_features(nn.Flatten(), records(), None, tmp_path, "")
    assert torch.equal(found.features, records().tensors[0].flatten(1))


def test_features_in_the_users_cache_are_for_the_owner_alone(tmp_path, private_cache):
    run(network(), tmp_path / "run", cache_features=True)
    folder = private_cache / "features"
    assert [oct(each.stat().st_mode & 0o777) for each in (folder, *folder.iterdir())] == ["0o700"] * 3


def test_a_record_names_the_public_weights_of_parts_of_the_model(tmp_path):
    model = network()
    model[0].public_weights = "some weights, sha256 abc"
    run(model, tmp_path / "run", cache_features=tmp_path / "features")
    schema = json.loads((tmp_path / "run" / "record.json").read_text())["schema"]
    assert schema["public_weights"] == ["some weights, sha256 abc"]
