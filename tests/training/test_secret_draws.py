"""What a run draws (noise, batches, masks, augmentation) is secret, belongs to the row, and replays under a seed."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from runs import FEATURES, ROWS, a_trainer, advance, loss_fn, network, rows, weights
from sparsedp.errors import PrivacyError
from sparsedp.loading import DataConfig
from sparsedp.methods import build_plan
from sparsedp.randomness import PublicRandomness, SeededRandomness
from sparsedp.sampling import PoissonSampler
from sparsedp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture
def same_public_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unseeded runs then write down the same; all that may still differ is secret."""
    monkeypatch.setattr(PublicRandomness, "fresh", classmethod(lambda cls: cls(5)))


class Flips(Dataset):
    """Random flips, noise and shifts in the items, from each of the three global generators."""

    def __init__(self, count: int = ROWS) -> None:
        self.inputs, self.targets = rows(1, count).tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.inputs[index]
        if random.random() < 0.5:
            row = row.flip(0)
        row = row + 0.1 * torch.randn(FEATURES) + float(np.random.uniform())  # noqa: NPY002
        return row, self.targets[index]


class FlipsGathered(Flips):
    """The same, many rows at once."""

    def rows_at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[indices] * (torch.rand(len(indices), FEATURES) < 0.5)
        return inputs + random.random(), self.targets[indices]


def loaded(dataset: Dataset, names: list[int], **more: object) -> dict[int, Tensor]:
    """Rows by name, of a batch of exactly these units."""

    class Chosen(SeededRandomness):
        def bernoulli(self, probability, size, key):
            return np.isin(np.arange(size), names)

    sampler = PoissonSampler(dataset, sampling_rate=1.0, randomness=Chosen(3), loading=DataConfig(**more))
    batch = next(sampler.batches(0, 1))
    return dict(zip(names, torch.cat([micro.rows[0] for micro in batch]), strict=True))


@pytest.mark.parametrize("kind", [Flips, FlipsGathered])
@pytest.mark.parametrize("more", [{}, {"max_physical_batch": 4}, {"num_workers": 2, "max_physical_batch": 5}])
def test_what_a_row_draws_does_not_depend_on_its_company(kind, more):
    whole = loaded(kind(), list(range(ROWS)))
    found = loaded(kind(), [3, 5, 17, 30, 31, 59], **more)
    for name, row in found.items():
        assert torch.equal(row, whole[name])
    assert len({tuple(row.tolist()) for row in whole.values()}) == ROWS


def trained(dataset, steps=None, *, out=None, resume=False, **loading):
    how = {"model": network(dropout=0.3), "out": out, "resume": resume, "data": DataConfig(**loading)}
    return advance(a_trainer("dp-sgd", draw=lambda *_: dataset, evaluate=None, **how), steps)


@pytest.mark.parametrize("kind", [Flips, FlipsGathered])
def test_a_seeded_run_gives_the_same_bits_with_workers_and_resumed(kind, tmp_path):
    whole = weights(trained(kind()).model)
    assert torch.equal(weights(trained(kind(), num_workers=2).model), whole)
    trained(kind(), 7, out=tmp_path / "run").close()
    resumed = trained(kind(), out=tmp_path / "run", resume=True, max_physical_batch=64)
    assert torch.equal(weights(resumed.model), whole)


class Remembers(Flips):
    """Items that depend on what was asked before: by a generator of their own, or by the last row."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.generator, self.last = how, np.random.default_rng(0), torch.zeros(FEATURES)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, last = self.inputs[index], self.last
        self.last = row
        by = row * float(self.generator.uniform()) if self.how == "generator" else row + 0.3 * last
        return by, self.targets[index]


@pytest.mark.parametrize("how", ["generator", "last row"])
def test_items_that_depend_on_what_was_asked_before_are_refused(how):
    with pytest.raises(PrivacyError, match="a generator of its own, or remembers"):
        trained(Remembers(how))


def test_a_collate_that_draws_only_in_later_batches_is_refused():
    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])
        return (inputs[torch.randperm(len(inputs))] if len(inputs) > 8 else inputs), targets

    with pytest.raises(PrivacyError, match="collate draws random numbers"):
        trained(rows(1), collate_fn=collate)


@pytest.mark.usefixtures("same_public_seed")
def test_unseeded_runs_draw_other_masks_and_never_those_of_the_public_seed(tmp_path):
    secrets = []
    for number in range(2):
        trainer = a_trainer(seed=None, model=network(dropout=0.4), out=tmp_path / str(number))
        for batch in trainer:
            secrets.append(batch.secret.key)
            trainer.step(batch)
        trainer.finish()
    assert len(set(secrets)) == 2 * 15
    written = b"".join(path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file())
    assert not any(key in written or key.hex().encode() in written for key in secrets)


def releases_and_batches(first_number):
    """The releases of an unseeded run, and the rows of its batches; a row's second number tells which it is."""
    first, second = torch.full((ROWS,), first_number), torch.arange(ROWS) / ROWS
    data = TensorDataset(torch.stack([first, second, *torch.zeros(3, ROWS)], 1), torch.zeros(ROWS).long())
    releases, batches = [], []
    trainer = a_trainer("dp-sgd", seed=None, draw=lambda *_: data, evaluate=None)
    for batch in trainer:
        parts = batch.load_ahead()
        batches.append(torch.cat([torch.empty(0), *(part.rows[0][:, 1] for part in parts)]))
        releases.append(trainer.step(batch).released.mean)
    return releases, batches


@pytest.mark.usefixtures("same_public_seed")
def test_the_noise_of_an_unseeded_run_cannot_be_made_again_from_its_record():
    """No row is finite, so that releases are noise alone; on a grid two numbers may meet, once in a million."""
    (one, _), (other, _) = releases_and_batches(math.nan), releases_and_batches(math.nan)
    assert len(one) == len(other) == 15
    assert max(float((a == b).double().mean()) for a, b in zip(one, other, strict=True)) < 0.2


@pytest.mark.usefixtures("same_public_seed")
def test_the_batches_of_an_unseeded_run_cannot_be_made_again_from_its_record():
    """Of 20 rows of 60: twice the same once in 10^13."""
    (_, one), (_, other) = releases_and_batches(0.0), releases_and_batches(0.0)
    assert sum(torch.equal(a, b) for a, b in zip(one, other, strict=True)) <= 1


TRIALS, COUNT, WIDTH, CLIP = 100, 1000, 40, 1.0


def replayed_sum(public_seed: int, data: TensorDataset, model: nn.Module) -> Tensor:
    """What the attacker computes: the clipped sum under masks from the recorded public seed, by position."""
    inputs, targets = data.tensors
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(PublicRandomness(public_seed).torch_seed((0, 0)))
        dropped = nn.functional.dropout(inputs, 0.5)
    gradients = (torch.softmax(model[1](dropped), 1) - nn.functional.one_hot(targets, 2)).detach()
    per_row = torch.cat([(gradients[:, :, None] * dropped[:, None, :]).flatten(1), gradients], dim=1)
    return (per_row * (CLIP / per_row.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


@pytest.mark.nightly
def test_an_attacker_with_the_run_folder_guesses_membership_no_better_than_epsilon_allows(tmp_path):
    """Dropout and a linear layer, full batches, epsilon 0.5: almost always right when masks came from the record.

    At epsilon 0.5 nobody is right more often than e^0.5 / (1 + e^0.5) = 0.62 of the time: 62 of 100, and 4 standard
    deviations are 20 more.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = 3 * torch.randn(COUNT, WIDTH, generator=generator)
    everyone = TensorDataset(inputs, torch.randint(0, 2, (COUNT,), generator=generator))
    others = TensorDataset(*(part[1:] for part in everyone.tensors))
    how = {"epochs": 1, "epsilon": 0.5, "delta": 1e-5, "max_grad_norm": CLIP, "accountant": "rdp"}
    right = 0
    for trial in range(TRIALS):
        dataset = everyone if (member := trial % 2 == 0) else others
        size, out = len(dataset), tmp_path / str(trial)
        plan = build_plan("dp-sgd", units=size, batch_size=size, **how)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 2))
        still = lambda p: torch.optim.SGD(p, lr=0.0)  # noqa: E731
        trainer = Trainer(model, dataset, loss_fn, plan=plan, optimizer=still, run_dir=out)
        observed = size * trainer.step(next(iter(trainer))).released.dense()
        trainer.finish()
        public_seed = json.loads((out / "record.json").read_text())["public_seed"]
        near, far = (
            float((observed - replayed_sum(public_seed, data, model)).norm()) for data in (everyone, others)
        )
        right += (near < far) == member
    assert right <= 62 + 20
