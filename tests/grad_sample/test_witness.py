"""The witness of a step finds rows that were used otherwise than they are alone, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from mixing_cases import CASES, SOUND, Between, loss, table, unseen
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.core.clip import FlatClip, NoClip
from sparsedp.core.geometry import Standardized
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample import ENGINES, Query, make_engine
from sparsedp.grad_sample.alone import RowsAlone
from sparsedp.grad_sample.witness import LOOKED_AT, WatchedEngine, Witness
from sparsedp.parameters import Support
from sparsedp.randomness import Chance, StepSecret

MIXING = sorted(CASES.keys() - {"tensor hook", "custom backward", "backward hook minus the mean"})


def watched(model: nn.Module, kind: str = "bookkeeping", seed: int = 0, loss=loss) -> WatchedEngine:
    return WatchedEngine(
        make_engine(model, loss, kind), RowsAlone(model, loss), random.Random(seed).randrange
    )


def ask(engine: WatchedEngine, rows, units: Tensor | None = None, ratio: float = 1.0, **query) -> Tensor:
    d = engine.layout.dimension
    support = Support.from_mask(torch.arange(d) % 100 < 100 * ratio)
    if query.pop("standardized", False):
        query["geometry"] = Standardized(torch.full((support.size,), 0.01), torch.full((support.size,), 2.0))
    query.setdefault("clip", FlatClip(0.1))
    chance = Chance(StepSecret(bytes(32)), torch.arange(len(rows[0])))
    return engine.clipped_sum([MicroBatch(rows, units, chance)], Query(support, **query))


@pytest.mark.parametrize("name", [x for x in MIXING if "single" not in x and "probability" not in x])
def test_rows_that_reach_each_other_stop_the_step(name):
    case = CASES[name]
    model, rows = case.model(), case.rows()
    stopped = 0
    for seed in range(20):
        engine = watched(model, seed=seed)
        try:
            ask(engine, rows)
            stopped += engine._engine.falls_back  # row by row, and so computed right
        except PrivacyError as error:
            stopped += "another gradient in their batch than alone" in str(error)
    assert stopped >= (5 if name in ("expert capacity", "rows sorted by length") else 20)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", [x for x in SOUND if x != "dropout"])
def test_a_sound_model_goes_on_and_its_sum_is_the_same(name, kind):
    model, rows = SOUND[name](), table(count=40)
    d = make_engine(model, loss).layout.dimension
    query = Query(Support.full(d), FlatClip(0.1))
    expected = make_engine(model, loss, kind).clipped_sum([MicroBatch(rows)], query)
    for seed in range(5):
        engine = watched(model, kind, seed)
        assert torch.equal(engine.clipped_sum([MicroBatch(rows)], query), expected)
        assert engine.agreed


SETTINGS = {
    "plain": {},
    "part of the coordinates": {"ratio": 0.3},
    "standardized": {"standardized": True, "ratio": 0.5},
    "the largest of each": {"per_sample_top": 0.3},
    "no clip": {"clip": NoClip()},
    "units of several rows": {"units": torch.arange(20).repeat_interleave(2)},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ENGINES)
def test_every_kind_of_query_is_watched(setting, kind):
    rows = table(count=40)
    model = Between(lambda m, h: h.tanh())
    ask(watched(model, kind), rows, **SETTINGS[setting])
    mixing = Between(lambda m, h: unseen(h) if len(h) > 3 else h)
    if kind == "bookkeeping":
        with pytest.raises(PrivacyError):
            ask(watched(mixing, kind), rows, **SETTINGS[setting])


def test_every_chunk_and_every_row_is_as_likely_as_another_to_be_looked_at():
    model, asked = Between(lambda m, h: h), [0] * 12
    query = Query(Support.full(53), FlatClip(0.1))
    for seed in range(400):
        witness = Witness(RowsAlone(model, loss), query, random.Random(seed).randrange)
        for chunk in range(4):
            x = torch.arange(3.0).reshape(3, 1) + 3 * chunk
            witness.see(MicroBatch(x), lambda place: torch.zeros(53), None)
        for row in witness._kept.rows[:LOOKED_AT]:
            asked[int(row.rows)] += 1
    assert min(asked) > 35  # two of twelve, 400 times: 67 on average, and four standard deviations below
    assert max(asked) < 100


@pytest.mark.parametrize("kind", ENGINES)
def test_a_row_has_its_own_random_numbers_alone_too(kind):
    model = SOUND["dropout"]()
    for seed in range(5):
        engine = watched(model, kind, seed)
        ask(engine, table(count=20))
        assert engine.agreed


def test_mixing_behind_dropout_is_seen():
    def between(m: nn.Module, h: Tensor) -> Tensor:
        h = nn.functional.dropout(h, 0.5)
        return unseen(h) if len(h) > 3 else h

    with pytest.raises(PrivacyError):
        ask(watched(Between(between)), table(count=20))


def knows_the_model(model: nn.Module, rows) -> Tensor:
    """Does something else with anything but the model itself, as losses that look at its class do."""
    return loss(model if isinstance(model, Between) else lambda x: -9 * model(x), rows)


def test_a_loss_that_looks_at_the_models_class_does_not_blind_the_witness():
    mixing = Between(lambda m, h: unseen(h) if len(h) > 3 else h)
    with pytest.raises(PrivacyError):
        ask(watched(mixing, loss=knows_the_model), table(count=20))


@pytest.mark.parametrize("kind", ENGINES)
def test_every_engine_gives_the_loss_the_model_itself(kind):
    model, rows = Between(lambda m, h: h.tanh()), table(count=20)
    expected = make_engine(model, loss, kind)
    engine = watched(model, kind, loss=knows_the_model)
    query = Query(Support.full(expected.layout.dimension), FlatClip(0.1))
    found = engine.clipped_sum([MicroBatch(rows)], query)
    assert torch.equal(found, expected.clipped_sum([MicroBatch(rows)], query))
    assert engine.agreed


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_that_were_moved_to_see_what_rounding_does_are_put_back_to_the_bit(fails):
    moved = []

    def between(m: nn.Module, h: Tensor) -> Tensor:
        moved.append(not torch.equal(m.body.weight, before[0]))
        if fails and moved[-1]:
            raise RuntimeError("as a model may")
        return h.tanh()

    model = Between(between)
    before = [p.detach().clone() for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    found = RowsAlone(model, loss).jittered(MicroBatch(table(count=1)))
    assert any(moved)
    assert len(found) == (0 if fails else 3)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    assert versions == [p._version for p in model.parameters()]


def test_a_wrong_norm_is_seen(monkeypatch):
    """The formula of a linear layer's norm against the row's gradient."""
    from sparsedp.grad_sample.linear import Outer

    original = Outer.squared_norms
    monkeypatch.setattr(Outer, "squared_norms", lambda self, metric: 0.9 * original(self, metric))
    with pytest.raises(PrivacyError):
        ask(watched(Between(lambda m, h: h.tanh())), table(count=20))


def test_rows_that_are_not_finite_are_no_reason_to_stop():
    x, y = table(count=20)
    x[::2] = torch.nan
    for seed in range(5):
        ask(watched(Between(lambda m, h: h.tanh()), seed=seed), (x, y))


def test_the_witness_leaves_the_generators_alone():
    engine = watched(Between(lambda m, h: h.tanh()))
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    ask(engine, table(count=20))
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_empty_batch_and_an_empty_support_have_nothing_to_see():
    engine = watched(Between(lambda m, h: h.tanh()))
    ask(engine, table(count=0))
    ask(engine, table(count=4), ratio=0.0)
    assert engine.agreed
