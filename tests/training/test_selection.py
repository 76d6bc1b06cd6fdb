"""FEST: the count of touched rows, its sensitivity, its charge, and the rows that are trained after it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from oracles.fest import best_rows, histogram
from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import FlatClip
from sparsedp.errors import DataError, ModelError, SparseDPError
from sparsedp.grad_sample.isolation import same_draws
from sparsedp.grad_sample.selection import EmbeddingRowCounter
from sparsedp.loading import DataConfig
from sparsedp.methods import MethodOptions, PlanConfig, build_plan, get_method
from sparsedp.privacy import mechanism
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.mechanism import Grid
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.queries import RowCountSum
from sparsedp.randomness import SeededRandomness
from sparsedp.training.fit import fit
from sparsedp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("checked_once")

WORDS, WIDTH, LENGTH, ROWS = 30, 4, 6, 90
LOSS = nn.CrossEntropyLoss(reduction="none")


class Bag(nn.Module):
    """The mean of a text's word vectors, and a head."""

    def __init__(self, batch_first: bool = True, turn: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.out = nn.Linear(WIDTH, 2)
        self.batch_first, self.turn = batch_first, turn

    def forward(self, tokens: Tensor) -> Tensor:
        if self.batch_first:
            return self.out(self.words(tokens.roll(self.turn, 0)).mean(1))
        return self.out(self.words(tokens.t()).mean(0))


def texts(seed: int, count: int = ROWS) -> TensorDataset:
    """Zipf's law: row 1 in nearly every text; some padding, some words several times."""
    rng = np.random.default_rng(seed)
    law = 1 / np.arange(1, WORDS)
    tokens = 1 + rng.choice(WORDS - 1, size=(count, LENGTH), p=law / law.sum())
    tokens[rng.random((count, LENGTH)) < 0.2] = 0
    return TensorDataset(torch.from_numpy(tokens), torch.from_numpy(rng.integers(0, 2, count)))


def counted(model: nn.Module, tokens: Tensor, units: Tensor | None = None) -> Tensor:
    look = EmbeddingRowCounter(model, from_criterion(LOSS), ["words.weight"])
    batch = MicroBatch((tokens, torch.zeros(len(tokens), dtype=torch.int64)), units)
    return torch.stack(list(RowCountSum([batch], look, WORDS, FlatClip(1.0)).partial_sums(1.0))).sum(0)


def test_the_count_is_the_papers_with_repeated_words_padding_and_units():
    tokens = texts(0).tensors[0]
    single = histogram(tokens.tolist(), list(range(ROWS)), WORDS, padding=0)
    np.testing.assert_allclose(counted(Bag(), tokens), single / 1.001, rtol=2e-5)
    units = torch.arange(ROWS) // 3
    by_unit = histogram(tokens.tolist(), units.tolist(), WORDS, padding=0)
    np.testing.assert_allclose(counted(Bag(), tokens, units), by_unit / 1.001, rtol=2e-5)
    assert not np.allclose(single, by_unit)


@pytest.mark.parametrize("seed", range(20))
def test_a_whole_unit_moves_the_count_by_at_most_one(seed):
    """Texts of one word many times, of padding alone, of all words; units of one to five texts."""
    rng = np.random.default_rng(seed)
    tokens = texts(seed, 12).tensors[0]
    tokens[0], tokens[1], tokens[2] = 0, 5, torch.arange(7, 7 + LENGTH)
    size = int(rng.integers(1, 6))
    units = torch.cat([torch.zeros(size, dtype=torch.int64), torch.arange(1, 13 - size)])
    moved = counted(Bag(), tokens, units) - counted(Bag(), tokens[size:], units[size:] - 1)
    assert float(moved.norm()) <= 1.0
    assert float(moved.norm()) > 0.99 or not bool((tokens[:size] != 0).any())
    assert moved[0] == 0


class Mixing(Bag):
    """What a text looks up follows from the batch: on the wrong axis, of another text, or once a word is rare."""

    def __init__(self, how: str) -> None:
        super().__init__(batch_first=how != "turned", turn=int(how == "rolled"))
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        if self.how == "rare":
            tokens = torch.where((tokens == WORDS - 1).any(), tokens.clamp(max=19) + 5, tokens)
        return super().forward(tokens)


@pytest.mark.parametrize("how", ["turned", "rolled", "rare"])
def test_a_text_is_counted_alone_whatever_the_model_does_to_a_batch(how):
    tokens = texts(1).tensors[0][: LENGTH + 1].clamp(max=WORDS - 2)
    tokens[3, 0] = WORDS - 1
    everybody = counted(Mixing(how), tokens)
    for gone in range(len(tokens)):
        kept = torch.arange(len(tokens)) != gone
        assert float((everybody - counted(Mixing(how), tokens[kept])).norm()) <= 1.0


class Forgetful(Bag):
    """Drops words at random while it trains."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(torch.where(torch.rand(tokens.shape) < 0.5, 0, tokens))


def test_words_dropped_at_random_move_the_count_by_at_most_one():
    tokens = texts(3).tensors[0]
    with same_draws():
        everybody = counted(Forgetful(), tokens)
        assert not torch.equal(everybody, counted(Bag(), tokens))
        for gone in range(0, ROWS, 9):
            moved = everybody - counted(Forgetful(), tokens[torch.arange(ROWS) != gone])
            assert float(moved.norm()) <= 1.0


def test_a_table_that_is_used_unseen_is_refused_by_name():
    class Functional(Bag):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(nn.functional.embedding(tokens, self.words.weight).mean(1))

    look = EmbeddingRowCounter(Functional(), from_criterion(LOSS), ["words.weight"])
    with pytest.raises(ModelError, match=r"words\.weight cannot be counted"):
        look.check(texts(1).tensors)


class Remapped(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward((ids + 1) % self.num_embeddings)


def test_a_layer_that_looks_up_other_rows_than_it_is_given_is_refused():
    model = Bag()
    model.words = Remapped(WORDS, WIDTH)
    with pytest.raises(
        ModelError, match=r"words\.weight cannot be counted: Remapped has a forward pass of its own"
    ):
        EmbeddingRowCounter(model, from_criterion(LOSS), ["words.weight"])
    patched = Bag()
    patched.words.forward = lambda ids: nn.functional.embedding(ids.flip(0), patched.words.weight)
    with pytest.raises(ModelError, match="Embedding has a forward pass of its own"):
        EmbeddingRowCounter(patched, from_criterion(LOSS), ["words.weight"])


@pytest.mark.parametrize("bad", [WORDS, -1])
def test_a_row_that_the_table_does_not_have_is_told_without_naming_it(bad):
    tokens = texts(4).tensors[0]
    tokens[7, 0] = bad
    with pytest.raises(DataError, match=rf"words\.weight: 0 to {WORDS - 1}"):
        counted(Bag(), tokens)


def test_all_texts_of_a_unit_are_counted_however_few_train(monkeypatch):
    seen = []
    honest = EmbeddingRowCounter.__call__

    def watch(self, batch):
        seen.append((batch.example_count, int(batch.units[-1]) + 1))
        return honest(self, batch)

    monkeypatch.setattr(EmbeddingRowCounter, "__call__", watch)
    fit(
        Bag(), texts(5), LOSS, method=get_method("fest", active_ratio=0.3), unit_ids=torch.arange(ROWS) // 9,
        epsilon=8.0, delta=1e-3, epochs=1, batch_size=5, accountant="rdp", progress=False, seed=0,
    )  # fmt: skip
    assert seen == [(ROWS, 10)]


def a_plan(**more) -> Plan:
    asked = {"batch_size": 30, "epochs": 2, "epsilon": 4.0, "delta": 1e-3, "accountant": "rdp", **more}
    return build_plan("fest", MethodOptions(active_ratio=0.3), units=ROWS, **asked)


def noise_of(plan: Plan, seed: int) -> np.ndarray:
    """The noise that a seeded run's selection draws."""
    grid = Grid.for_mechanism(1.0, plan.phases[0].noise_multiplier, WORDS)
    return SeededRandomness(seed).rounded_gaussian(grid.noise_bits, WORDS, key=(0,)).numpy() * grid.step


def test_the_selection_is_a_phase_with_its_share_of_the_budget():
    plan = a_plan()
    select, train = plan.phases
    assert (select.name, select.steps, select.sampling_rate, select.clip_norm) == ("select", 1, 1.0, 1.0)
    assert (train.name, select.trains, train.trains) == ("train", False, True)
    alone = plan_epsilon(Plan("x", (select,), units=ROWS, steps_per_epoch=1, delta=1e-3), "rdp")
    assert 0.995 * 0.4 <= alone <= 0.4
    assert 0.995 * 4 <= plan_epsilon(plan) <= 4
    dense = build_plan(
        "dp-sgd", units=ROWS, batch_size=30, epochs=2, epsilon=4.0, delta=1e-3, accountant="rdp"
    )
    assert 1 < train.noise_multiplier / dense.phases[0].noise_multiplier < 1.02
    assert a_plan(selection_budget=0.5).phases[0].noise_multiplier < select.noise_multiplier
    with pytest.raises(SparseDPError, match="selection_budget"):
        a_plan(selection_budget=1.0)


def test_the_rows_trained_are_the_best_of_the_noisy_count_and_the_rest_never_moves(tmp_path):
    data, plan, model = texts(2), a_plan(), Bag()
    before = model.words.weight.detach().clone()
    trainer = Trainer(
        model, data, LOSS, plan=plan, seed=3, run_dir=tmp_path / "run",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )  # fmt: skip
    for batch in trainer:
        trainer.step(batch)
    result = trainer.finish()
    noisy = histogram(data.tensors[0].tolist(), list(range(ROWS)), WORDS, padding=0) + noise_of(plan, 3)
    kept = best_rows(noisy, 9)  # 0.3 of 30 rows
    words = result.support.mask()[: WORDS * WIDTH].reshape(WORDS, WIDTH)
    assert words.all(1).nonzero().flatten().tolist() == kept
    assert result.support.mask()[WORDS * WIDTH :].all()
    moved = (model.words.weight.detach() != before).any(1).nonzero().flatten().tolist()
    assert set(moved) <= set(kept)
    assert moved
    lines = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    blocks = [line for line in lines if line["kind"] == "block"]
    charged = [
        (b["phase"], b["sampling_rate"], b["noise_multiplier"]) for b in blocks for _ in range(b["steps"])
    ]
    planned = [(p.name, p.sampling_rate, p.noise_multiplier) for p in plan.phases for _ in range(p.steps)]
    assert charged == planned


def test_a_resumed_run_keeps_its_selection(tmp_path):
    def stop(event):
        if getattr(event, "step", None) == 3 and hasattr(event, "released"):
            raise KeyboardInterrupt

    def run(out, **more):
        torch.manual_seed(0)
        return fit(
            Bag(), texts(2), LOSS, method=get_method("fest", active_ratio=0.3), epsilon=4.0, delta=1e-3, epochs=2,
            batch_size=30, accountant="rdp", lr=0.5, seed=3, run_dir=out, progress=False, **more,
        )  # fmt: skip

    straight = run(tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", callbacks=[stop])
    resumed = run(tmp_path / "stopped", resume=True)
    assert resumed.support == straight.support
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_users_texts_count_once(tmp_path):
    data = texts(4)
    plan = PlanConfig.asked(
        "fest",
        units=ROWS // 3,
        unit_name="user",
        batch_size=10,
        epochs=1,
        epsilon=4.0,
        delta=1e-3,
        accountant="rdp",
    ).plan()
    trainer = Trainer(
        Bag(), data, LOSS, plan=plan, seed=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=DataConfig(unit_ids=torch.arange(ROWS) // 3, rows_per_unit=3),
    )  # fmt: skip
    with trainer:
        for batch in trainer:
            trainer.step(batch)
    units = [row // 3 for row in range(ROWS)]
    noisy = histogram(data.tensors[0].tolist(), units, WORDS, padding=0) + noise_of(plan, 1)
    words = trainer.support.mask()[: WORDS * WIDTH].reshape(WORDS, WIDTH)
    assert words.all(1).nonzero().flatten().tolist() == best_rows(noisy, 3)


def test_what_is_no_table_cannot_be_counted():
    plan = build_plan("fest", MethodOptions(always=()), units=ROWS, accountant="rdp", delta=1e-3)
    with pytest.raises(SparseDPError, match=r"out.weight.*are none"):
        Trainer(Bag(), texts(0), LOSS, plan=plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def test_what_is_selected_depends_on_the_released_count_alone(monkeypatch):
    """With the mechanism's output swapped for fixed numbers, two data sets give the same supports and weights."""
    real = mechanism.GaussianMechanism.noisy_sum

    def fixed(self, query, charge, **how):
        total, std = real(self, query, charge, **how)
        numbers = torch.randn(total.numel(), generator=torch.Generator().manual_seed(charge.step))
        return 3.0 * numbers.to(total), std

    monkeypatch.setattr(mechanism.GaussianMechanism, "noisy_sum", fixed)
    found = []
    for seed in (1, 2):
        torch.manual_seed(0)
        trainer = Trainer(
            Bag(), texts(seed), LOSS, plan=a_plan(), optimizer=lambda p: torch.optim.SGD(p, lr=0.5)
        )
        for batch in trainer:
            trainer.step(batch)
        found.append(trainer.finish())
    assert found[0].support == found[1].support
    assert 0 < found[0].k < found[0].d
    for one, other in zip(found[0].model.parameters(), found[1].model.parameters(), strict=True):
        assert torch.equal(one, other)
