"""What a run draws (noise, batches, masks, augmentation) is secret, belongs to the row, and replays under a seed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from runs import FEATURES, ROWS, a_plan, a_trainer, advance, loss_fn, network, rows, sgd, weights
from sparsedp.errors import PrivacyError
from sparsedp.loading import DataConfig
from sparsedp.methods import build_plan, get_method
from sparsedp.randomness import PublicRandomness, SeededRandomness
from sparsedp.results import Event, StepReport
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


def test_a_data_set_that_draws_for_some_rows_only_is_noticed_when_it_does():
    class Rarely(Flips):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return super().__getitem__(index) if index == 40 else (self.inputs[index], self.targets[index])

    alone, whole = loaded(Rarely(), [40]), loaded(Rarely(), list(range(ROWS)))
    assert torch.equal(alone[40], whole[40])


def trained(
    dataset: Dataset, *, out: Path | None = None, resume: bool = False, steps: int | None = None, **more
):
    row = get_method("dp-sgd")
    trainer = Trainer(
        network(dropout=0.3),
        dataset,
        loss_fn,
        plan=a_plan(row),
        optimizer=sgd,
        seed=0,
        run_dir=out,
        resume=resume,
        data=DataConfig(**more),
    )
    return advance(trainer, steps)


@pytest.mark.parametrize("kind", [Flips, FlipsGathered])
def test_a_seeded_run_gives_the_same_bits_with_workers_and_resumed(kind, tmp_path):
    whole = weights(trained(kind()).model)
    assert torch.equal(weights(trained(kind(), num_workers=2).model), whole)
    trained(kind(), out=tmp_path / "run", steps=7).close()
    resumed = trained(kind(), out=tmp_path / "run", resume=True, max_physical_batch=64)
    assert torch.equal(weights(resumed.model), whole)


class OwnGenerator(Flips):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] * float(self.generator.uniform()), self.targets[index]


class Remembers(Flips):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(FEATURES)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        mixed, self.last = self.inputs[index] + 0.3 * self.last, self.inputs[index]
        return mixed, self.targets[index]


@pytest.mark.parametrize("kind", [OwnGenerator, Remembers])
def test_items_that_depend_on_what_was_asked_before_are_refused(kind):
    with pytest.raises(PrivacyError, match="a generator of its own, or remembers"):
        trained(kind())


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


def releases_and_batches(first_number: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The releases of an unseeded run, and the rows of its batches; a row's second number tells which it is."""
    inputs = torch.stack(
        [torch.full((ROWS,), first_number), torch.arange(ROWS) / ROWS, *torch.zeros(3, ROWS)], 1
    )
    releases, batches = [], []

    def watch(event: Event) -> None:
        if isinstance(event, StepReport):
            releases.append(event.released.mean)

    trainer = Trainer(
        network(),
        TensorDataset(inputs, torch.zeros(ROWS, dtype=torch.int64)),
        loss_fn,
        plan=a_plan(get_method("dp-sgd")),
        optimizer=sgd,
        callbacks=[watch],
    )
    for batch in trainer:
        parts = list(batch.micro_batches)
        batches.append(torch.cat([torch.empty(0), *(part.rows[0][:, 1] for part in parts)]))
        object.__setattr__(batch, "micro_batches", iter(parts))
        trainer.step(batch)
    return releases, batches


@pytest.mark.usefixtures("same_public_seed")
def test_the_noise_of_an_unseeded_run_cannot_be_made_again_from_its_record():
    """No row is finite, so that releases are noise alone."""
    (one, _), (other, _) = releases_and_batches(math.nan), releases_and_batches(math.nan)
    assert len(one) == len(other) == 15
    same = [float((a == b).double().mean()) for a, b in zip(one, other, strict=True)]
    assert max(same) < 0.2  # on a grid two numbers may meet, once in a million


@pytest.mark.usefixtures("same_public_seed")
def test_the_batches_of_an_unseeded_run_cannot_be_made_again_from_its_record():
    (_, one), (_, other) = releases_and_batches(0.0), releases_and_batches(0.0)
    assert (
        sum(torch.equal(a, b) for a, b in zip(one, other, strict=True)) <= 1
    )  # of 20 rows of 60: once in 10^13


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
    everyone = TensorDataset(
        3 * torch.randn(COUNT, WIDTH, generator=generator), torch.randint(0, 2, (COUNT,), generator=generator)
    )
    method = get_method("dp-sgd")
    how = {"epochs": 1, "epsilon": 0.5, "delta": 1e-5, "max_grad_norm": CLIP, "accountant": "rdp"}
    plans = {n: build_plan(method, units=n, batch_size=n, **how) for n in (COUNT - 1, COUNT)}
    right = 0
    for trial in range(TRIALS):
        member = trial % 2 == 0
        size = COUNT if member else COUNT - 1
        dataset = TensorDataset(*(part[COUNT - size :] for part in everyone.tensors))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 2))
        out = tmp_path / str(trial)
        trainer = Trainer(
            model,
            dataset,
            loss_fn,
            plan=plans[size],
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            run_dir=out if trial < 20 else None,
        )
        observed = size * trainer.step(next(iter(trainer))).released.dense()
        trainer.finish()
        public_seed = trainer._public.seed
        if trial < 20:
            assert json.loads((out / "record.json").read_text())["public_seed"] == public_seed
        distances = [
            float((observed - replayed_sum(public_seed, data, model)).norm())
            for data in (everyone, TensorDataset(*(part[1:] for part in everyone.tensors)))
        ]
        right += (distances[0] < distances[1]) == member
    assert right <= 62 + 20
