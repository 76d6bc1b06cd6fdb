"""`GaussianMechanism`: pays first, averages by the expected size, moves by at most the clip norm, and restores."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp import distributed
from sparsedp.batch import MicroBatch
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip, Identity
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample import ENGINES, ClippedSumQuery
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.mechanism import MARGIN_BITS, GaussianMechanism, Grid, Release
from sparsedp.privacy.queries import BoundedSum, ClippedVectorSum, GradientSum
from sparsedp.randomness import SystemRandomness
from sparsedp.sampling import split_microbatches


@dataclass
class Spy:
    """Stands in for engine, ledger and randomness at once, and remembers who was asked, in order."""

    dimension: int = 3
    sum_of_part: float = 8.0
    refuses: bool = False
    asked: list[str] = field(default_factory=list)
    publishable: bool = False

    @property
    def layout(self) -> ParameterLayout:
        return ParameterLayout.of(nn.Linear(self.dimension, 1, bias=False))

    def charge(self, charge: Charge) -> None:
        self.asked.append("ledger")
        if self.refuses:
            raise PrivacyError("the budget is spent")

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        self.asked.append("engine")
        for _ in batches:
            self.asked.append("batch")
        return torch.full((query.support.size,), self.sum_of_part, dtype=torch.float64)

    def add_rounded_gaussian(self, bits: int, sums: Tensor, key: tuple[int, ...]) -> None:
        self.asked.append(f"noise for step {key[0]}")
        sums += 2**bits


def release(
    spy: Spy, batches: Iterable[MicroBatch] = (), clip: FlatClip | None = None, **changes: object
) -> Release:
    clip = clip or FlatClip(0.5)
    settings = {"noise_multiplier": 2.0, "expected_batch_size": 4.0, "geometry": Identity(), **changes}
    return GaussianMechanism(spy, spy).release(
        GradientSum(
            spy, batches, ClippedSumQuery(Support([0, 2], spy.dimension), clip, settings["geometry"])
        ),
        Charge("train", 7, 0.1, settings["noise_multiplier"]),
        expected_batch_size=settings["expected_batch_size"],
    )


def test_the_ledger_is_charged_before_anything_is_computed_or_drawn():
    spy = Spy()
    release(spy, [MicroBatch(torch.zeros(1, 3))])
    assert spy.asked == ["ledger", "engine", "batch", "noise for step 7"]


class TwoProcesses:
    """Of two ranks this is the main process, or the other; notes what passes between them."""

    def __init__(self, monkeypatch, main: bool) -> None:
        self.sent, self.handed_out = [], []
        monkeypatch.setattr(distributed, "is_main_process", lambda: main)
        monkeypatch.setattr(distributed, "world_size", lambda: 2)
        monkeypatch.setattr(distributed, "reduce_sum", self.reduce_sum)
        monkeypatch.setattr(distributed, "broadcast", self.broadcast)

    def reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sent.append(values.clone())
        return values + values

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        self.handed_out.append(values.clone())
        return values


def test_ranks_get_the_release_and_never_the_sum(monkeypatch):
    query, charge = ClippedVectorSum(torch.ones(1, 3), FlatClip(4.0)), Charge("train", 0, 0.1, 2.0)
    ranks = TwoProcesses(monkeypatch, main=True)
    released = GaussianMechanism(ChargeLog(), SystemRandomness()).release(query, charge)
    grid = Grid.for_mechanism(4.0, 2.0, 3)
    (handed_out,), (sent,) = ranks.handed_out, ranks.sent
    assert (handed_out != 2 * sent).any()  # equal by chance: once in 2^60
    assert torch.equal(grid.dequantize(handed_out), released.mean)


def test_a_rank_that_is_not_the_main_process_draws_no_noise(monkeypatch):
    ranks, spy = TwoProcesses(monkeypatch, main=False), Spy()
    query = ClippedVectorSum(torch.ones(1, 3), FlatClip(4.0))
    GaussianMechanism(ChargeLog(), spy).release(query, Charge("train", 0, 0.1, 2.0))
    assert spy.asked == []
    assert torch.equal(ranks.handed_out[0], 2 * ranks.sent[0])


def test_a_ledger_that_refuses_prevents_the_release():
    spy = Spy(refuses=True)
    stream = (MicroBatch(torch.zeros(1, 3)) for _ in range(2))
    with pytest.raises(PrivacyError, match="budget"):
        release(spy, stream)
    assert spy.asked == ["ledger"]
    assert len(list(stream)) == 2


def test_the_noisy_sum_is_divided_by_the_expected_batch_size_whatever_the_real_one():
    sizes = [[], [MicroBatch(torch.zeros(1, 3))], [MicroBatch(torch.zeros(50, 3))]]
    for batches in sizes:
        released = release(Spy(), batches)
        # (sum 8 + multiplier 2 * clip 0.5 * noise 1) / expected 4
        assert released.mean.tolist() == [2.25, 2.25]
        assert released.noise_scale.tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("expected_batch_size", "expected_batch_size"), ("noise_multiplier", "expected finite numbers > 0")],
)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_noise_that_would_not_mean_what_it_says_is_refused_before_the_ledger_is_asked(name, complaint, value):
    spy = Spy()
    with pytest.raises(PrivacyError, match=complaint):
        release(spy, **{name: value})
    assert spy.asked == []


def squares(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return (model(rows[0]) - rows[1]).square().sum(1)


def real_release(
    model: nn.Module, batches: list[MicroBatch], query: ClippedSumQuery, kind: str, *, silent: bool = True
) -> Release:
    return GaussianMechanism(ChargeLog(), Silent() if silent else SystemRandomness()).release(
        GradientSum(ENGINES[kind](model, squares), batches, query),
        Charge("train", 0, 0.1, 1.0),
        expected_batch_size=5.0,
    )


class Silent:
    """Draws zeros."""

    publishable = False

    def add_rounded_gaussian(self, *_: object, **__: object) -> None:
        pass


@pytest.mark.parametrize("rows", [0, 3], ids=["empty", "nothing finite"])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_batch_that_contributes_nothing_releases_noise_alone(kind, rows):
    nothing = MicroBatch((torch.full((rows, 4), torch.nan), torch.zeros(rows, 2)))
    for batches in ([nothing], []):
        query = ClippedSumQuery(Support.full(10), FlatClip(1.0))
        silent = real_release(nn.Linear(4, 2), batches, query, kind)
        noisy = real_release(nn.Linear(4, 2), batches, query, kind, silent=False)
        assert torch.equal(silent.mean, torch.zeros(10, dtype=torch.float64))
        assert bool(noisy.mean.isfinite().all())
        assert bool((noisy.mean != 0).all())


@pytest.mark.parametrize("kind", ENGINES)
def test_an_empty_support_releases_nothing_and_is_charged_all_the_same(kind):
    ledger, batch = ChargeLog(), MicroBatch((torch.randn(3, 4), torch.randn(3, 2)))
    query = ClippedSumQuery(Support.empty(10), FlatClip(1.0))
    released = GaussianMechanism(ledger, SystemRandomness()).release(
        GradientSum(ENGINES[kind](nn.Linear(4, 2), squares), [batch], query), Charge("train", 0, 0.1, 1.0)
    )
    assert released.mean.shape == (0,)
    assert torch.equal(released.dense(), torch.zeros(10, dtype=torch.float64))
    assert len(ledger.charges) == 1


FIELDS = {"support", "mean", "noise_scale", "phase", "step", "publishable"}


def a_release() -> Release:
    query = ClippedSumQuery(Support([0, 5, 7], 10), FlatClip(1.0))
    batch = MicroBatch((torch.ones(4, 4), torch.zeros(4, 2)))
    return real_release(nn.Linear(4, 2), [batch], query, "bookkeeping", silent=False)


@pytest.mark.parametrize("seal", [None, object(), True])
def test_it_cannot_be_built_without_the_seal(seal):
    values = {"support": Support([0], 1), "mean": torch.ones(1), "noise_scale": torch.ones(1)}
    with pytest.raises(PrivacyError, match=r"GaussianMechanism\.release"):
        Release(**values, phase="train", step=0, publishable=True, seal=seal)


def test_it_is_read_only_and_holds_what_is_public_and_nothing_else():
    released = a_release()
    assert {name.lstrip("_") for name in Release.__slots__} == FIELDS
    assert not hasattr(released, "__dict__")
    for name in (*FIELDS, "_mean", "_noise_scale", "note"):
        with pytest.raises(PrivacyError, match="read-only"):
            setattr(released, name, torch.zeros(3))
    for name in ("mean", "noise_scale"):
        before = getattr(released, name).clone()
        getattr(released, name).zero_()
        released.dense().zero_()
        assert torch.equal(getattr(released, name), before)
        assert bool((before != 0).all())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_it_cannot_be_copied_past_the_seal(duplicate):
    with pytest.raises(PrivacyError, match="read-only"):
        duplicate(a_release())


CLIPS, NOISES, SIZES = [1e-6, 1.0, 1e6], [0.3, 1.0, 33.3, 1000.0], [1, 26_010, 550_570, 10**7]


def moved(grid: Grid, before: list[Tensor], after: list[Tensor]) -> Fraction:
    """The squared move of the sum, in squared_outputs of noise standard deviations: exact."""
    steps = (
        grid.round_and_sum(map(torch.clone, after)) - grid.round_and_sum(map(torch.clone, before))
    ).tolist()
    return Fraction(sum(step * step for step in steps), 4**grid.noise_bits)


def allowed(noise_multiplier: float) -> Fraction:
    """What the accountant is told: the sensitivity is one over the noise multiplier, squared."""
    return 1 / Fraction(noise_multiplier) ** 2


@pytest.mark.parametrize(("clip", "noise", "size"), itertools.product(CLIPS, NOISES, SIZES))
def test_the_noise_is_a_power_of_two_of_steps_and_all_extremes_have_a_grid(clip, noise, size):
    grid = Grid.for_mechanism(clip, noise, size)
    assert Fraction(grid.step) * 2**grid.noise_bits == Fraction(noise * clip)
    assert 1.5 * math.sqrt(size) * grid.step <= 2.0 ** -(MARGIN_BITS + 1) * clip
    assert grid.step * math.sqrt(size) * 1.5 > 2.0 ** -(MARGIN_BITS + 2) * clip * 0.999
    million = grid.round_and_sum([torch.tensor([1e6 * clip, -1e6 * clip], dtype=torch.float64)])
    assert million.tolist() == [round(1e6 * clip / grid.step), -round(1e6 * clip / grid.step)]
    assert million[0] + 40 * 2**grid.noise_bits < 2**61
    back = grid.dequantize(million)
    torch.testing.assert_close(
        back, torch.tensor([1e6, -1e6], dtype=torch.float64) * clip, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("clip", "noise"), [(1.0, 1.0), (0.3, 1.7), (1e-6, 1000.0), (1e6, 0.3)])
@pytest.mark.parametrize("others", [0.0, 0.77, 1e3])
def test_the_worst_roundings_stay_within_what_the_accountant_is_told(size, clip, noise, others):
    """In every coordinate one part just below a half step becomes two just above it, and the unit moves its most."""
    grid = Grid.for_mechanism(clip, noise, size)
    base, unit = round(others * clip / grid.step), grid.bound / math.sqrt(size) / grid.step
    whole, left, right = base + 0.499, base + 0.501, math.floor(unit - 0.51) + 0.501
    before, *after = (
        torch.full((size,), part * grid.step, dtype=torch.float64) for part in (whole, left, right)
    )
    assert float(torch.linalg.vector_norm(sum(after) - before)) <= grid.bound
    assert moved(grid, [before], after) <= allowed(noise)
    assert (grid.round_and_sum(after) - grid.round_and_sum([before])).tolist() == [
        math.floor(unit - 0.51) + 2
    ] * size


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 7]), st.sampled_from([0.3, 1.0, 21.0]))
@settings(max_examples=150)
def test_a_unit_added_moves_a_sum_of_cut_parts_by_at_most_the_clip(seed, most, noise):
    rng = np.random.default_rng(seed)
    size, clip = int(rng.integers(1, 6)), float(10 ** rng.uniform(-6, 6))
    grid = Grid.for_mechanism(clip, noise, size)
    units = np.flatnonzero(rng.random(32) < 0.4)
    rows = rng.standard_normal((32, size))
    rows *= grid.bound / np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.where(rng.random((32, 1)) < 0.5, rows, (rng.integers(-9, 9, (32, size)) + 0.5) * grid.step)
    newcomer = int(rng.integers(32))

    def parts(members: np.ndarray) -> list[Tensor]:
        zero = torch.zeros(size, dtype=torch.float64)
        return [
            zero,
            *(torch.from_numpy(rows[members[run]].sum(axis=0)) for run in split_microbatches(members, most)),
        ]

    without = units[units != newcomer]
    assert moved(grid, parts(without), parts(np.union1d(without, [newcomer]))) <= allowed(noise)


def test_without_the_margin_the_worst_rounding_would_pass_the_clip():
    grid = Grid.for_mechanism(1.0, 1.0, 4)
    unit = torch.full((4,), (math.ceil(0.5 / grid.step) + 0.5001) * grid.step, dtype=torch.float64)
    assert moved(grid, [torch.zeros(4)], [unit]) > allowed(1.0)
    assert float(unit.norm()) > grid.bound


def test_any_order_and_any_number_of_ranks_give_the_same_bits():
    grid = Grid.for_mechanism(1.0, 1.1, 50)
    generator = torch.Generator().manual_seed(0)
    parts = [100 * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(12)]
    expected = grid.round_and_sum(map(torch.clone, parts))
    for ranks in (1, 2, 3):
        shares = [grid.round_and_sum(map(torch.clone, parts[rank::ranks][::-1])) for rank in range(ranks)]
        assert torch.equal(sum(shares), expected)
    assert expected.dtype == torch.int64


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_off_the_grid_stops_the_step_before_any_noise(bad):
    class Broken(BoundedSum):
        size, clip = 2, FlatClip(1.0)

        def partial_sums(self, bound: float) -> Iterator[Tensor]:
            yield torch.tensor([0.0, bad], dtype=torch.float64)

    spy = Spy()
    with pytest.raises(PrivacyError, match="nothing was released"):
        GaussianMechanism(spy, spy).release(Broken(), Charge("train", 0, 0.1, 1.0))
    assert spy.asked == ["ledger"]


def test_integers_that_would_overflow_stop_it_too():
    grid = Grid.for_mechanism(1.0, 1.0, 1)
    large = torch.tensor([2.0**60 * grid.step], dtype=torch.float64)
    assert grid.round_and_sum([large.clone()]) == 2**60
    with pytest.raises(PrivacyError, match="too many units"):
        grid.round_and_sum([large.clone(), large])
    with pytest.raises(PrivacyError, match="without parts"):
        grid.round_and_sum([])


@pytest.mark.parametrize(("clip", "noise", "size"), [(1.0, 1e9, 10**7), (1e-306, 1.0, 10), (1e300, 1e300, 1)])
def test_numbers_no_grid_holds_are_refused_before_the_ledger_is_charged(clip, noise, size):
    ledger = ChargeLog()
    with pytest.raises(PrivacyError):
        GaussianMechanism(ledger, SystemRandomness()).release(
            SimpleNamespace(size=size, sensitivity=clip), Charge("t", 0, 0.1, noise)
        )
    assert ledger.charges == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rows", [0, 40])
def test_every_released_value_is_on_the_grid_whatever_the_data(engine, rows):
    torch.manual_seed(rows)
    query = ClippedSumQuery(Support([0, 3, 4, 9], 10), FlatClip(0.37))
    batches = [MicroBatch((torch.randn(part, 4), torch.randn(part, 2))) for part in (rows, rows // 2)]
    released = real_release(nn.Linear(4, 2), batches, query, engine, silent=False)
    grid = Grid.for_mechanism(0.37, 1.0, 4)
    steps = (released.mean * 5.0 / grid.step).round().to(torch.int64)
    assert torch.equal(grid.dequantize(steps).div_(5.0), released.mean)
    assert released.noise_scale.tolist() == [0.37 / 5.0] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_plan_ledger_and_mechanism_agree_after_the_margin(engine):
    """A unit far over the clip moves the release by just below what the charge says, and by no more."""
    clip, model = 0.5, nn.Linear(4, 2)
    query = ClippedSumQuery(Support.full(10), FlatClip(clip))
    row = MicroBatch((torch.full((1, 4), 50.0), torch.zeros(1, 2)))
    others = MicroBatch((torch.randn(9, 4), torch.randn(9, 2)))
    two = [real_release(model, batches, query, engine).mean for batches in ([others, row], [others])]
    change = 5.0 * float((two[0] - two[1]).norm())
    grid = Grid.for_mechanism(clip, 1.0, 10)
    assert grid.bound / (1 + 1.1 * ROUNDING_MARGIN) - 4 * grid.step < change <= clip
    assert clip == grid.step * 2**grid.noise_bits
