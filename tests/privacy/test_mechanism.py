"""`GaussianMechanism`: pays first, averages by the expected size, moves by at most the clip norm, and restores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import Clip, FlatClip, Identity, NoClip, Standardized
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample import ENGINES, BookkeepingEngine, Query
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.ledger import Charge, MemoryLedger
from sparsedp.privacy.mechanism import GaussianMechanism, Grid, Release
from sparsedp.privacy.queries import ClippedVectorSum, GradientSum
from sparsedp.randomness import SeededRandomness, SystemRandomness


@dataclass
class Spy:
    """Stands in for engine, ledger and randomness at once, and remembers who was asked, in order."""

    dimension: int = 3
    sum_of_part: float = 8.0
    refuses: bool = False
    asked: list[str] = field(default_factory=list)
    for_release: bool = False

    @property
    def layout(self) -> Layout:
        return Layout.of(nn.Linear(self.dimension, 1, bias=False))

    def charge(self, charge: Charge) -> None:
        self.asked.append("ledger")
        if self.refuses:
            raise PrivacyError("the budget is spent")

    def clipped_sum(self, batches: Iterable[MicroBatch], query: Query) -> Tensor:
        self.asked.append("engine")
        for _ in batches:
            self.asked.append("batch")
        return torch.full((query.support.size,), self.sum_of_part, dtype=torch.float64)

    def rounded_gaussian(self, bits: int, size: int, key: tuple[int, ...]) -> Tensor:
        noise = torch.zeros(size, dtype=torch.int64)
        self.add_rounded_gaussian(bits, noise, key)
        return noise

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: tuple[int, ...]) -> None:
        self.asked.append(f"noise for step {key[0]}")
        sums += 2**bits


def release(
    spy: Spy, batches: Iterable[MicroBatch] = (), clip: Clip | None = None, **changes: object
) -> Release:
    clip = clip or FlatClip(0.5)
    settings = {
        "noise_multiplier": 2.0,
        "expected_batch_size": 4.0,
        "geometry": Identity(),
        "absolute_noise_std": 0.0,
    }
    settings |= changes
    return GaussianMechanism(spy, spy).release(
        GradientSum(spy, batches, Query(Support([0, 2], spy.dimension), clip, settings["geometry"])),
        Charge("train", 7, 0.1, settings["noise_multiplier"]),
        expected_batch_size=settings["expected_batch_size"],
        noise_std=settings["absolute_noise_std"],
    )


def test_the_ledger_is_charged_before_anything_is_computed_or_drawn():
    spy = Spy()
    release(spy, [MicroBatch(torch.zeros(1, 3))])
    assert spy.asked == ["ledger", "engine", "batch", "noise for step 7"]


class TwoProcesses:
    """A group of which this process is the main one, or the other; notes what passes through it."""

    def __init__(self, main: bool) -> None:
        self.main, self.sent, self.handed_out = main, [], []

    def is_main_process(self) -> bool:
        return self.main

    def reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sent.append(values.clone())
        return values + values

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        self.handed_out.append(values.clone())
        return values


def test_ranks_get_the_release_and_never_the_sum():
    query, charge = ClippedVectorSum(torch.ones(1, 3), FlatClip(4.0)), Charge("train", 0, 0.1, 2.0)
    group = TwoProcesses(main=True)
    total, _ = GaussianMechanism(MemoryLedger(), SystemRandomness(), group).noisy_sum(query, charge)
    grid = Grid.for_mechanism(4.0, 2.0, 3)
    (handed_out,), (sent,) = group.handed_out, group.sent
    assert (handed_out != 2 * sent).any()  # equal by chance: once in 2^60
    assert torch.equal(grid.dequantize(handed_out), total)


def test_a_rank_that_is_not_the_main_process_draws_no_noise():
    group, spy = TwoProcesses(main=False), Spy()
    query = ClippedVectorSum(torch.ones(1, 3), FlatClip(4.0))
    GaussianMechanism(MemoryLedger(), spy, group).noisy_sum(query, Charge("train", 0, 0.1, 2.0))
    assert spy.asked == []
    assert torch.equal(group.handed_out[0], 2 * group.sent[0])


def test_a_ledger_that_refuses_prevents_the_release():
    spy = Spy(refuses=True)
    stream = (MicroBatch(torch.zeros(1, 3)) for _ in range(2))
    with pytest.raises(PrivacyError, match="budget"):
        release(spy, stream)
    assert spy.asked == ["ledger"]
    assert len(list(stream)) == 2


def test_the_charge_names_the_rate_and_noise_that_ran():
    ledger = MemoryLedger()
    charge = Charge("warm-up", 3, 0.25, 1.5)
    query = ClippedVectorSum(torch.zeros(2, 2), FlatClip(1.0))
    GaussianMechanism(ledger, SeededRandomness(0)).noisy_sum(query, charge)
    assert ledger.charges == [charge]


def test_the_noisy_sum_is_divided_by_the_expected_batch_size_whatever_the_real_one():
    sizes = [[], [MicroBatch(torch.zeros(1, 3))], [MicroBatch(torch.zeros(50, 3))]]
    for batches in sizes:
        released = release(Spy(), batches)
        # (sum 8 + multiplier 2 * clip 0.5 * noise 1) / expected 4
        assert released.mean.tolist() == [2.25, 2.25]
        assert released.noise_scale.tolist() == [0.25, 0.25]


def test_standardizing_is_undone_after_the_noise():
    geometry = Standardized(torch.tensor([1.0, -1.0]), torch.tensor([10.0, 0.1]))
    released = release(Spy(), geometry=geometry)
    torch.testing.assert_close(
        released.mean, torch.tensor([2.25 * 10 + 1, 2.25 * 0.1 - 1], dtype=torch.float64)
    )
    torch.testing.assert_close(released.noise_scale, torch.tensor([2.5, 0.025], dtype=torch.float64))


def test_the_release_says_what_it_is():
    released = release(Spy())
    assert (released.phase, released.step, released.support) == ("train", 7, Support([0, 2], 3))
    assert released.private
    assert not released.for_release
    assert not release(Spy(), noise_multiplier=0.0).private
    assert not release(Spy(), clip=NoClip(), noise_multiplier=0.0, absolute_noise_std=1.0).private


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"expected_batch_size": 0.0}, "expected_batch_size"),
        ({"expected_batch_size": -1.0}, "expected_batch_size"),
        ({"expected_batch_size": math.nan}, "expected_batch_size"),
        ({"expected_batch_size": math.inf}, "expected_batch_size"),
        ({"noise_multiplier": -1.0}, "expected numbers >= 0"),
        ({"noise_multiplier": math.nan}, "expected numbers >= 0"),
        ({"noise_multiplier": math.inf}, "expected numbers >= 0"),
        ({"absolute_noise_std": 1.0}, "not both"),
        ({"absolute_noise_std": 1.0, "noise_multiplier": 0.0}, "with a clip, give a noise multiplier"),
        ({"clip": NoClip()}, "sensitivity is infinite"),
    ],
)
def test_noise_that_would_not_mean_what_it_says_is_refused_before_the_ledger_is_asked(changes, complaint):
    spy = Spy()
    with pytest.raises(PrivacyError, match=complaint):
        release(spy, **changes)
    assert spy.asked == []


def test_the_ablation_without_clipping_adds_absolute_noise():
    released = release(Spy(), clip=NoClip(), noise_multiplier=0.0, absolute_noise_std=3.0)
    assert released.mean.tolist() == [2.75, 2.75]
    assert released.noise_scale.tolist() == [0.75, 0.75]


def squares(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return (model(rows[0]) - rows[1]).square().sum(1)


def real_release(
    model: nn.Module, batches: list[MicroBatch], query: Query, kind: str, **changes: float
) -> Release:
    return GaussianMechanism(MemoryLedger(), SystemRandomness()).release(
        GradientSum(ENGINES[kind](model, squares), batches, query),
        Charge("train", 0, 0.1, changes.get("noise_multiplier", 0.0)),
        expected_batch_size=changes.get("expected_batch_size", 5.0),
    )


@pytest.mark.parametrize("kind", ENGINES)
def test_no_noise_and_a_huge_clip_and_every_coordinate_is_the_sgd_gradient(kind):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    rows = (torch.randn(5, 4), torch.randn(5, 2))
    query = Query(Support.full(44), FlatClip(1e6))
    released = real_release(model, [MicroBatch(rows)], query, kind)
    squares(model, rows).mean().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
    torch.testing.assert_close(released.dense(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [0, 3], ids=["empty", "nothing finite"])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_batch_that_contributes_nothing_releases_noise_alone(kind, rows):
    nothing = MicroBatch((torch.full((rows, 4), torch.nan), torch.zeros(rows, 2)))
    for batches in ([nothing], []):
        query = Query(Support.full(10), FlatClip(1.0))
        silent = real_release(nn.Linear(4, 2), batches, query, kind)
        noisy = real_release(nn.Linear(4, 2), batches, query, kind, noise_multiplier=1.0)
        assert torch.equal(silent.mean, torch.zeros(10, dtype=torch.float64))
        assert bool(noisy.mean.isfinite().all())
        assert bool((noisy.mean != 0).all())


@pytest.mark.parametrize("kind", ENGINES)
def test_an_empty_support_releases_nothing_and_is_charged_all_the_same(kind):
    ledger = MemoryLedger()
    released = GaussianMechanism(ledger, SystemRandomness()).release(
        GradientSum(
            ENGINES[kind](nn.Linear(4, 2), squares),
            [MicroBatch((torch.randn(3, 4), torch.randn(3, 2)))],
            Query(Support.empty(10), FlatClip(1.0)),
        ),
        Charge("train", 0, 0.1, 1.0),
        expected_batch_size=3.0,
    )
    assert released.mean.shape == (0,)
    assert torch.equal(released.dense(), torch.zeros(10, dtype=torch.float64))
    assert len(ledger.charges) == 1


def test_the_model_is_as_it_was_after_a_release():
    model = nn.Linear(4, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = (torch.randn(3, 4), torch.randn(3, 2))
    real_release(model, [MicroBatch(rows)], Query(Support.full(10), FlatClip(1.0)), "bookkeeping")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_rows_of_numbers_are_clipped_and_summed_too():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [torch.nan, 0.0], [torch.inf, 1.0], [0.0, 0.0]])
    query = ClippedVectorSum(rows, FlatClip(1.0))
    assert query.sensitivity == 1.0
    expected = torch.tensor([0.6, 0.8], dtype=torch.float64) / 1.001 + torch.tensor([0.3, 0.4])
    (total,) = query.partial_sums(1.0)
    torch.testing.assert_close(total, expected.double(), rtol=1e-7, atol=0)


def test_no_rows_of_numbers_sum_to_nothing():
    (total,) = ClippedVectorSum(torch.zeros(0, 2), FlatClip(1.0)).partial_sums(1.0)
    assert torch.equal(total, torch.zeros(2, dtype=torch.float64))


def test_a_seeded_step_replays_and_steps_differ():
    engine = BookkeepingEngine(nn.Linear(4, 2), squares)

    def step(number: int, seed: int) -> Tensor:
        return (
            GaussianMechanism(MemoryLedger(), SeededRandomness(seed))
            .release(
                GradientSum(engine, [], Query(Support.full(10), FlatClip(1.0))),
                Charge("train", number, 0.1, 1.0),
                expected_batch_size=3.0,
            )
            .mean
        )

    assert torch.equal(step(0, 1), step(0, 1))
    assert not torch.equal(step(0, 1), step(1, 1))
    assert not torch.equal(step(0, 1), step(0, 2))
