"""FEST, AdaFEST and given scores: counts, their sensitivity and charge, and the rows trained after them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from oracles import selection
from oracles.selection import best_rows, histogram
from runs import LENGTH, ROWS, SETUPS, WIDTH, WORDS, Bag, a_plan, a_trainer, loss_fn, noise_of, placed, texts
from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import FlatClip
from sparsedp.errors import DataError, ModelError, PrivacyError, SparseDPError
from sparsedp.grad_sample.isolation import same_draws
from sparsedp.grad_sample.selection import EmbeddingRowCounter
from sparsedp.loading import DataConfig
from sparsedp.methods import Granularity, Method, PublicScores, build_plan, get_method
from sparsedp.methods.scores import Contributions
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy import mechanism
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.charge import Charge, ChargeLog, SplitCharge
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.queries import RowCountSum
from sparsedp.randomness import SeededRandomness
from sparsedp.results import Result
from sparsedp.runs.run import Run
from sparsedp.training.fit import fit

pytestmark = pytest.mark.usefixtures("checked_once")


BATCH = 20

FEST = get_method("fest", active_ratio=0.3)

QUICK = {
    "epsilon": 8.0, "delta": 1e-3, "epochs": 1, "batch_size": BATCH, "accountant": "rdp", "lr": 0.1, "seed": 3,
    "progress": False,
}  # fmt: skip


def adafest_of(threshold: float = 1.0) -> Method:
    return get_method("adafest", ranking=Contributions(threshold=threshold, share=0.3))


def counted(model: nn.Module, tokens: Tensor, units: Tensor | None = None) -> Tensor:
    counter = EmbeddingRowCounter(model, from_criterion(loss_fn), ["words.weight"])
    batch = MicroBatch((tokens, torch.zeros(len(tokens), dtype=torch.int64)), units)
    return torch.stack(list(RowCountSum([batch], counter, WORDS, FlatClip(1.0)).partial_sums(1.0))).sum(0)


def table_rows(support):
    """Of the table, which rows have an active entry."""
    return support.mask()[: WORDS * WIDTH].reshape(WORDS, WIDTH).any(1)


@pytest.mark.parametrize("rows_of_a_unit", [1, 3])
def test_row_count_is_the_papers_with_repeated_words_padding_and_units(rows_of_a_unit):
    tokens, units = texts(0).tensors[0], torch.arange(ROWS) // rows_of_a_unit
    wanted = histogram(tokens.tolist(), units.tolist(), WORDS, padding=0)
    found = counted(Bag(), tokens, None if rows_of_a_unit == 1 else units)
    np.testing.assert_allclose(found, wanted / 1.001, rtol=2e-5)


@pytest.mark.parametrize("seed", range(20))
def test_row_count_without_a_unit_moves_by_at_most_one(seed):
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


class Asking(Bag):
    """Asks its table in one way or another, from the whole batch where it can."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how = how
        if how == "offsets":
            self.words = nn.EmbeddingBag(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.how == "functional":
            return self.out(nn.functional.embedding(tokens, self.words.weight).mean(1))
        if self.how == "offsets":
            return self.out(self.words(tokens.reshape(-1), torch.arange(len(tokens)) * LENGTH))
        if self.how == "flattened":
            return self.out(self.words(tokens.reshape(-1)).view(*tokens.shape, WIDTH).mean(1))
        if self.how == "on the wrong axis":
            return self.out(self.words(tokens.t()).mean(0))
        if self.how == "another text's":
            tokens = tokens.roll(1, 0)
        if self.how == "once a word is rare":
            tokens = torch.where((tokens == WORDS - 1).any(), tokens.clamp(max=WORDS - 6) + 5, tokens)
        if self.how == "at random":
            tokens = torch.where(torch.rand(tokens.shape) < 0.5, 0, tokens)
        return super().forward(tokens)


@pytest.mark.parametrize("how", ["on the wrong axis", "another text's", "once a word is rare", "at random"])
def test_row_count_of_a_model_that_mixes_texts_moves_by_at_most_one(how):
    tokens = texts(1).tensors[0][: 3 * LENGTH].clamp(max=WORDS - 2)
    tokens[3, 0] = WORDS - 1
    with same_draws():
        everybody = counted(Asking(how), tokens)
        for gone in range(len(tokens)):
            kept = torch.arange(len(tokens)) != gone
            assert float((everybody - counted(Asking(how), tokens[kept])).norm()) <= 1.0


def test_row_count_of_rows_that_are_not_seen_or_not_there_is_refused():
    with pytest.raises(ModelError, match=r"words\.weight cannot be counted"):
        EmbeddingRowCounter(Asking("functional"), from_criterion(loss_fn), ["words.weight"]).check(
            texts(1).tensors
        )
    for bad in (WORDS, -1):
        tokens = texts(4).tensors[0]
        tokens[7, 0] = bad
        with pytest.raises(DataError, match=rf"words\.weight: 0 to {WORDS - 1}"):
            counted(Bag(), tokens)


@pytest.mark.parametrize("method", ["fest", "adafest"])
@pytest.mark.parametrize("how", ["offsets", "flattened"])
def test_selection_counts_a_table_however_the_model_lays_out_its_batch(method, how):
    """The model is given one text at a time, so whatever it looks up is that text's."""
    result = fit(Asking(how), texts(0), loss_fn, method=method, **QUICK)
    assert 0 < len(result.support.split(ParameterLayout.of(result.model))["words.weight"]) < WORDS * WIDTH


def test_fest_plans_the_selection_as_a_phase_with_its_share_of_the_budget():
    plan = a_plan(FEST)
    select, train = plan.phases
    assert (select.name, select.steps, select.sampling_rate, select.clip_norm) == ("select", 1, 1.0, 1.0)
    assert (train.name, select.trains, train.trains) == ("train", False, True)
    alone = plan_epsilon(Plan("x", (select,), units=ROWS, steps_per_epoch=1, delta=1e-3), "rdp")
    assert 0.995 * 0.8 <= alone <= 0.8
    assert 0.995 * 8 <= plan_epsilon(plan) <= 8
    dense = a_plan(get_method("dp-sgd"))
    assert 1 < train.noise_multiplier / dense.phases[0].noise_multiplier < 1.05
    more = a_plan(FEST, selection_budget=0.5)
    assert more.phases[0].noise_multiplier < select.noise_multiplier


def test_fest_trains_the_best_rows_of_the_noisy_count_and_the_rest_never_move(tmp_path):
    trainer = a_trainer(**SETUPS["table-fest"](), seed=3, data_seed=2, out=tmp_path / "run")
    model, select = trainer.model, trainer.plan.phases[0]
    before = model.words.weight.detach().clone()
    for batch in trainer:
        trainer.step(batch)
    result = trainer.finish()
    noisy = histogram(texts(2).tensors[0].tolist(), list(range(ROWS)), WORDS, padding=0)
    noisy = noisy + noise_of(3, (0,), 1.0, select.noise_multiplier, WORDS)
    kept = best_rows(noisy, int(0.3 * WORDS))
    assert table_rows(result.support).nonzero().flatten().tolist() == kept
    assert result.support.mask()[WORDS * WIDTH :].all()
    moved = (model.words.weight.detach() != before).any(1).nonzero().flatten().tolist()
    assert moved
    assert set(moved) <= set(kept)
    assert Run.open(tmp_path / "run").ledger.events() == result.plan.events()


def test_fest_counts_all_texts_of_a_unit_once_however_few_train():
    plan = build_plan(
        FEST, units=ROWS // 3, unit_name="user", batch_size=10, epochs=1, epsilon=8.0, delta=1e-3,
        accountant="rdp",
    )  # fmt: skip
    units = torch.arange(ROWS) // 3
    trainer = a_trainer(
        plan=plan, model=Bag(), draw=texts, data_seed=4, data=DataConfig(unit_ids=units, rows_per_unit=1)
    )
    with trainer:
        trainer.step(next(iter(trainer)))
    noisy = histogram(texts(4).tensors[0].tolist(), units.tolist(), WORDS, padding=0)
    noisy = noisy + noise_of(0, (0,), 1.0, plan.phases[0].noise_multiplier, WORDS)
    assert table_rows(trainer.support).nonzero().flatten().tolist() == best_rows(noisy, int(0.3 * WORDS))


def test_adafest_charges_both_releases_of_a_step_as_one_and_plans_how_it_is_shared(tmp_path):
    plan = a_plan(adafest_of(), epochs=2)
    (phase,) = plan.phases
    together = (phase.count_noise**-2 + phase.gradient_noise**-2) ** -0.5
    assert together == pytest.approx(phase.noise_multiplier, rel=1e-12)
    assert phase.count_noise**-2 == pytest.approx(0.3 * phase.noise_multiplier**-2, rel=1e-12)
    assert 0.995 * 8 <= plan_epsilon(plan) <= 8
    assert plan.events() == a_plan(get_method("dp-sgd"), epochs=2).events()
    assert phase.gradient_noise > phase.noise_multiplier
    assert noise_on_mean(plan, phase) == pytest.approx(phase.gradient_noise / BATCH)
    assert Plan.from_json(plan.to_json()) == plan
    trainer = a_trainer(plan=plan, model=Bag(), draw=texts, out=tmp_path / "run")
    for batch in trainer:
        trainer.step(batch)
    trainer.finish()
    assert Run.open(tmp_path / "run").ledger.events() == plan.events()


def test_adafest_step_is_the_papers_algorithm(monkeypatch):
    """Counts, threshold, mask, clip, noise and mean, against NumPy on the same batch and the same noise."""
    plan = a_plan(adafest_of(), epochs=2, max_grad_norm=0.2)
    (phase,) = plan.phases
    made, sizes, loaded_at = [], set(), []
    trainer = a_trainer(plan=plan, model=Bag(), draw=texts, seed=3)
    real = mechanism.GaussianMechanism.release

    def note(self: Any, query: Any, charge: Charge, **how: Any) -> Any:
        made.append((charge.step, charge.release))
        return real(self, query, charge, **how)

    def loading(parts: list[MicroBatch]) -> Iterator[MicroBatch]:
        loaded_at.append(len(made))
        yield from parts

    monkeypatch.setattr(mechanism.GaussianMechanism, "release", note)
    for number, batch in enumerate(trainer):
        parts = list(batch)
        samples = [tokens for part in parts for tokens in part.rows[0].tolist()]
        labels = [int(label) for part in parts for label in part.rows[1]]
        object.__setattr__(batch, "micro_batches", loading(parts))
        table, weight, bias = (p.detach().double().numpy().copy() for p in trainer.model.parameters())
        released = trainer.step(batch).released
        counts = histogram(samples, list(range(len(samples))), WORDS, padding=0)
        counts = counts + noise_of(3, (number, 1), 1.0, phase.count_noise, WORDS)
        kept = selection.chosen_rows(counts, tau=1.0 * phase.count_noise)
        chosen = table_rows(released.support)
        assert chosen.nonzero().flatten().tolist() == kept
        assert 0 < len(kept) < WORDS
        size = len(kept) * WIDTH + 2 * WIDTH + 2
        expected = selection.step(
            samples, labels, table, weight, bias, kept=kept, padding=0, clip=0.2 / 1.001,
            noise=noise_of(3, (number,), 0.2, phase.gradient_noise, size), expected=BATCH,
        )  # fmt: skip
        np.testing.assert_allclose(released.dense().numpy(), expected, atol=2e-5)
        moved = (trainer.model.words.weight.detach().double() != torch.from_numpy(table)).any(1)
        assert not bool((moved & ~chosen).any())
        sizes.add(released.support.size)
    assert loaded_at == [2 * step + 1 for step in range(phase.steps)], (
        "rows were loaded before they were paid for"
    )
    assert made == [(step, release) for step in range(phase.steps) for release in (1, 0)]
    assert len(sizes) > 1


def test_split_charge_refuses_releases_that_cost_more_than_the_step_before_they_are_made():
    whole = Charge("train", 4, 0.1, 1.0)
    ledger = ChargeLog()
    shared = SplitCharge(ledger, whole)
    half = replace(whole, noise_multiplier=2.0, release=1)
    for first in (
        replace(half, step=5),
        replace(half, noise_multiplier=0.0),
        replace(half, noise_multiplier=0.9),
    ):
        with pytest.raises(PrivacyError):
            shared.charge(first)
    assert ledger.charges == []
    shared.charge(half)
    for wrong in (
        half,
        whole,
        replace(whole, noise_multiplier=9.0, release=1),
        replace(whole, noise_multiplier=9.0, step=5),
        replace(whole, noise_multiplier=0.0),
    ):
        with pytest.raises(PrivacyError):
            shared.charge(wrong)
    shared.charge(replace(whole, noise_multiplier=(1 - 2.0**-2) ** -0.5))
    assert ledger.charges == [whole]


def test_split_charge_gives_the_two_releases_of_a_step_noise_of_their_own():
    one, other = Charge("train", 4, 0.1, 1.0), Charge("train", 4, 0.1, 1.0, 1)
    assert one.key == (4,)
    draws = [SeededRandomness(1).rounded_gaussian(20, 50, key=charge.key) for charge in (one, other)]
    assert not torch.equal(*draws)


ENTRIES = 12
BY_ROWS = {"granularity": Granularity.ROWS, "always": ("dense",)}
COUNTS = torch.tensor([0.0, 5, 9, 1, 9, 2, 0, 0, 3, 0, 0, 0])


def trained(**how) -> Result:
    if {"active_ratio", "options"} & set(how):
        how = {"method": "given", **how}
    rng = np.random.default_rng(0)
    pairs = TensorDataset(
        *(torch.from_numpy(rng.integers(0, n, s)) for n, s in ((ENTRIES, (ROWS, 2)), (2, ROWS)))
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ENTRIES, WIDTH), nn.Flatten(), nn.Linear(2 * WIDTH, 2))
    return fit(model, pairs, loss_fn, **placed({**QUICK, **how}))


def active(result: Result) -> dict[str, list[int]]:
    layout = ParameterLayout.of(result.model)
    return {name: places.tolist() for name, places in result.support.split(layout).items()}


def test_public_scores_by_a_count_train_the_best_rows_and_the_head():
    result = trained(public_scores={"0.weight": COUNTS}, active_ratio=0.25, options=BY_ROWS)
    rows = [1, 2, 4]  # a quarter of twelve: the counts 9, 9 and 5
    assert active(result)["0.weight"] == [row * WIDTH + i for row in rows for i in range(WIDTH)]
    assert len(active(result)["2.weight"]) == 2 * WIDTH * 2
    assert result.method == "given"


def test_public_scores_by_a_mask_and_names_are_all_that_is_trained_and_rows_are_ranked_whole():
    mask = torch.zeros(ENTRIES, WIDTH, dtype=torch.bool)
    mask[7] = True
    assert active(trained(public_scores={"0.weight": mask}, options=BY_ROWS))["0.weight"] == [21, 22, 23]
    mask[3, 1] = True
    result = trained(public_scores={"0.weight": mask, "bias": 2.0})
    assert active(result) == {"0.weight": [10, 21, 22, 23], "2.weight": [], "2.bias": [0, 1]}
    for ratio, kept in ((0.1, [21, 22, 23]), (1.0, [10, 21, 22, 23])):  # 3 entries of the table, and all
        found = trained(public_scores={"0.weight": mask}, active_ratio=ratio, options=BY_ROWS)
        assert active(found)["0.weight"] == kept


def test_public_scores_cost_nothing_and_the_record_names_them(tmp_path):
    scores = {"head": 1.0}
    result = trained(public_scores=scores, run_dir=tmp_path / "run")
    asked = {name: QUICK[name] for name in ("epsilon", "delta", "epochs", "batch_size", "accountant")}
    assert result.plan.events() == build_plan("dp-sgd", units=ROWS, **asked).events()
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert PublicScores.of(scores).checksum in json.dumps(record)
    with pytest.raises(SparseDPError, match="ranking was"):
        trained(public_scores={"bias": 1.0}, run_dir=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "expected a mapping"),
        ({"head": 1j}, "complex"),
        ({"0.weight": torch.zeros(5)}, "got shape"),
        ({"no.such": 1.0}, "fits none"),
        ({"head": float("nan")}, "NaN"),
        ({"head": False}, "nothing would be trained"),
    ],
)
def test_public_scores_without_meaning_are_refused(scores, message):
    with pytest.raises(SparseDPError, match=message):
        trained(public_scores=scores)
