"""Votes: what a unit votes for, its sensitivity, its charge, and what is trained after it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from sparsedp.core.batch import MicroBatch, supervised
from sparsedp.core.clip import FlatClip
from sparsedp.core.errors import SparseDPError
from sparsedp.core.layout import Layout
from sparsedp.core.randomness import SeededRandomness
from sparsedp.grad_sample.votes import GradientVotes
from sparsedp.methods import Granularity, MethodOptions, Votes, build_plan
from sparsedp.methods.order import TableRows
from sparsedp.privacy.accountants import plan_epsilon
from sparsedp.privacy.grid import Grid
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.touched import TouchedSum
from sparsedp.sampling.loading import Loading
from sparsedp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("checked_once")

INPUTS, HIDDEN, CLASSES, ROWS = 4, 6, 3, 60  # two classes would have gradients that tie
GROUPS = 2 * HIDDEN + 2 * CLASSES  # rows of two weights, entries of two biases
BELOW = INPUTS * HIDDEN + HIDDEN
ALL = BELOW + HIDDEN * CLASSES + CLASSES
LOSS = nn.CrossEntropyLoss(reduction="none")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def data(seed: int = 0, rows: int = ROWS) -> TensorDataset:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, INPUTS)).astype("float32")
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(x[:, :CLASSES].argmax(1)))


def gradients(rows: TensorDataset) -> np.ndarray:
    """One backward pass for each row."""
    model, found = network(), []
    for x, y in rows:
        loss = LOSS(model(x[None]), y[None]).sum()
        found.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(found).double().numpy()


def widths(granularity: Granularity) -> list[int]:
    rows = [INPUTS] * HIDDEN + [1] * HIDDEN + [HIDDEN] * CLASSES + [1] * CLASSES
    return rows if granularity is Granularity.ROWS else [INPUTS * HIDDEN, HIDDEN, CLASSES * HIDDEN, CLASSES]


def expected_votes(rows: TensorDataset, units: list[int], most: int, granularity: Granularity) -> np.ndarray:
    """Told again in NumPy: energies of each unit's mean gradient by group, its best groups, norm one."""
    all_gradients, sizes = gradients(rows), widths(granularity)
    total = np.zeros(len(sizes))
    for unit in sorted(set(units)):
        mean = np.mean([g for g, owner in zip(all_gradients, units, strict=True) if owner == unit], axis=0)
        energy = [float((part**2).sum()) for part in np.split(mean, np.cumsum(sizes)[:-1])]
        best = sorted(range(len(sizes)), key=lambda i: (-energy[i], i))[:most]
        chosen = [i for i in best if energy[i] > 0]
        if chosen:
            total[chosen] += 1 / np.sqrt(len(chosen))
    return total


def voted(rows: TensorDataset, units: torch.Tensor | None, most: int, granularity=Granularity.ROWS):
    model = network()
    layout = Layout.of(model)
    groups = TableRows(layout.slots, whole=granularity is Granularity.TENSORS)
    look = GradientVotes(model, supervised(LOSS), groups.of_coordinates(layout.dimension), most)
    batch = MicroBatch(rows.tensors, units)
    return torch.stack(list(TouchedSum([batch], look, groups.total, FlatClip(1.0)).parts(1.0))).sum(0)


@pytest.mark.parametrize("granularity", [Granularity.ROWS, Granularity.TENSORS])
@pytest.mark.parametrize("most", [1, 3])
def test_a_unit_votes_for_what_carries_most_of_its_gradient(granularity, most):
    alone = expected_votes(data(), list(range(ROWS)), most, granularity)
    np.testing.assert_allclose(voted(data(), None, most, granularity), alone / 1.001, rtol=2e-5)
    units = [row // 4 for row in range(ROWS)]
    together = expected_votes(data(), units, most, granularity)
    np.testing.assert_allclose(
        voted(data(), torch.tensor(units), most, granularity), together / 1.001, rtol=2e-5
    )
    assert not np.allclose(alone, together)


@pytest.mark.parametrize("seed", range(8))
def test_a_whole_unit_moves_the_vote_by_at_most_one(seed):
    rows, size = data(seed, 12), 1 + seed % 4
    rows.tensors[0][0] = float("nan") if seed % 2 else 0.0
    units = torch.cat([torch.zeros(size, dtype=torch.int64), torch.arange(1, 13 - size)])
    rest = TensorDataset(*(tensor[size:] for tensor in rows.tensors))
    moved = voted(rows, units, 5) - voted(rest, units[size:] - 1, 5)
    assert float(moved.norm()) <= 1.0
    assert bool(torch.isfinite(moved).all())
    assert float(moved.norm()) > 0.99 or seed % 2


@pytest.mark.parametrize("hidden", [5, 64, 300])
def test_no_company_moves_a_vote_even_where_two_groups_tie(hidden):
    """Both rows of a two-class head have gradients of one size, so a last bit would decide between them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    layout = Layout.of(model)
    groups = TableRows(layout.slots, whole=False).of_coordinates(layout.dimension)
    look = GradientVotes(model, supervised(LOSS), groups, 1)
    x, y = torch.randn(97, INPUTS), torch.arange(97) % 2

    def choices(first: int, last: int) -> list[int]:
        owners, voted = look(MicroBatch((x[first:last], y[first:last])))
        assert owners.tolist() == list(range(last - first))
        return voted.tolist()

    whole = choices(0, 97)
    assert choices(1, 97) == whole[1:]
    assert choices(0, 50) + choices(50, 97) == whole
    assert [choice for row in range(97) for choice in choices(row, row + 1)] == whole


def a_plan(**options) -> Plan:
    asked = {"batch_size": 20, "epochs": 2, "epsilon": 4.0, "delta": 1e-3, "accountant": "rdp"}
    chosen = MethodOptions(**{"active_ratio": 0.4, "ranking": Votes(most=2), **options})
    return build_plan("votes", chosen, units=ROWS, **asked)


def test_the_vote_is_charged_and_its_winners_and_the_head_are_trained():
    plan, model = a_plan(always=("head",)), network()
    select, train = plan.phases
    assert (select.name, select.steps, select.sampling_rate, select.clip_norm) == ("select", 1, 1.0, 1.0)
    assert 0.995 * 4 <= plan_epsilon(plan) <= 4
    alone = Plan("x", (select,), units=ROWS, steps_per_epoch=1, delta=1e-3)
    assert 0.995 * 0.4 <= plan_epsilon(alone, "rdp") <= 0.4
    made = Trainer(model, data(), LOSS, plan=plan, seed=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for batch in made:
        made.step(batch)
    made.finish()
    assert train.trains
    total = 2 * HIDDEN
    grid = Grid.of(1.0, select.noise_multiplier, total)
    noise = SeededRandomness(3).rounded_gaussian(grid.noise_bits, total, key=(0,)).numpy() * grid.step
    counts = winners(noise)
    count = int(0.4 * BELOW)
    starts = np.cumsum([0, *widths(Granularity.ROWS)])
    wanted: list[int] = []
    for row in sorted(range(total), key=lambda row: (-counts[row], row)):
        wanted += range(starts[row], starts[row + 1])
    assert made.support.indices.tolist() == sorted([*wanted[:count], *range(BELOW, ALL)])


def test_the_ledger_holds_what_the_plan_says(tmp_path):
    """The vote first, then every step of training, each with its own rate and noise, and nothing else."""
    plan = a_plan(always=("head",))
    how = {"seed": 3, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "out": tmp_path / "run"}
    made = Trainer(network(), data(), LOSS, plan=plan, **how)
    for batch in made:
        made.step(batch)
    made.finish()
    lines = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    charged = [
        (b["phase"], b["sampling_rate"], b["noise_multiplier"])
        for b in lines if b["kind"] == "block" for _ in range(b["steps"])
    ]  # fmt: skip
    assert charged == [
        (p.name, p.sampling_rate, p.noise_multiplier) for p in plan.phases for _ in range(p.steps)
    ]
    assert [s.noise_multiplier for s in plan.spends()] == [p.noise_multiplier for p in plan.phases]
    assert len({p.noise_multiplier for p in plan.phases}) == 2


def winners(noise: np.ndarray) -> np.ndarray:
    """The noisy votes for rows of the first layer alone, each unit having two."""
    total = np.zeros(2 * HIDDEN)
    for g in gradients(data()):
        parts = np.split(g[:BELOW], np.cumsum(widths(Granularity.ROWS)[: 2 * HIDDEN])[:-1])
        energy = [float((part**2).sum()) for part in parts]
        best = [i for i in sorted(range(2 * HIDDEN), key=lambda i: (-energy[i], i))[:2] if energy[i] > 0]
        total[best] += 1 / np.sqrt(max(1, len(best)))
    return total + noise


def test_a_users_rows_vote_once():
    plan = build_plan(
        "votes", MethodOptions(ranking=Votes(most=2), active_ratio=0.4), units=ROWS // 3, unit="user", batch_size=10,
        epochs=1, epsilon=4.0, delta=1e-3, accountant="rdp",
    )  # fmt: skip
    units = torch.arange(ROWS) // 3
    made = Trainer(
        network(), data(), LOSS, plan=plan, seed=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loading=Loading(units=units, rows_per_unit=3),
    )  # fmt: skip
    with made:
        for batch in made:
            made.step(batch)
    grid = Grid.of(1.0, plan.phases[0].noise_multiplier, GROUPS)
    noise = SeededRandomness(1).rounded_gaussian(grid.noise_bits, GROUPS, key=(0,)).numpy() * grid.step
    counts = expected_votes(data(), units.tolist(), 2, Granularity.ROWS) + noise
    starts = np.cumsum([0, *widths(Granularity.ROWS)])
    wanted: list[int] = []
    for row in sorted(range(GROUPS), key=lambda row: (-counts[row], row)):
        wanted += range(starts[row], starts[row + 1])
    assert made.support.indices.tolist() == sorted(wanted[: int(0.4 * ALL)])


def test_votes_of_single_coordinates_and_of_nobody_are_refused():
    with pytest.raises(SparseDPError, match="of rows"):
        a_plan(granularity=Granularity.COORDINATES)
    with pytest.raises(SparseDPError, match="most is 0"):
        Votes(most=0)
