"""AdaFEST: two releases of every step's batch, one charge for both, and the rows that the first lets through."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from oracles import adafest
from oracles.fest import histogram
from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import FlatClip
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.grad_sample.selection import EmbeddingRowCounter
from sparsedp.methods import Granularity, MethodOptions, SupportScheduler, build_plan, get_method
from sparsedp.methods.scores import Contributions
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy import mechanism
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.ledger import Charge, ChargeLog, SplitCharge
from sparsedp.privacy.mechanism import Grid
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import PublicRandomness, SeededRandomness
from sparsedp.training.fit import fit
from sparsedp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("checked_once")

WORDS, WIDTH, LENGTH, ROWS, BATCH = 24, 3, 5, 80, 20
LOSS = nn.CrossEntropyLoss(reduction="none")


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens).mean(1))


def texts(seed: int = 0, count: int = ROWS) -> TensorDataset:
    """Zipf's law, some padding, some words several times."""
    rng = np.random.default_rng(seed)
    law = 1 / np.arange(1, WORDS)
    tokens = 1 + rng.choice(WORDS - 1, size=(count, LENGTH), p=law / law.sum())
    tokens[rng.random((count, LENGTH)) < 0.2] = 0
    return TensorDataset(torch.from_numpy(tokens), torch.from_numpy(rng.integers(0, 2, count)))


def a_plan(threshold: float = 1.0, share: float = 0.3, **more) -> Plan:
    asked = {"batch_size": BATCH, "epochs": 2, "epsilon": 8.0, "delta": 1e-3, "accountant": "rdp", **more}
    ranking = Contributions(threshold=threshold, share=share)
    return build_plan("adafest", MethodOptions(ranking=ranking), units=ROWS, **asked)


def trainer(plan: Plan, data: TensorDataset | None = None, **more) -> Trainer:
    how = {"seed": 3, "optimizer": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), **more}
    return Trainer(Bag(), data or texts(), LOSS, plan=plan, **how)


def test_both_releases_are_one_charge_and_the_plan_says_how_it_is_shared(tmp_path):
    plan, (phase,) = a_plan(), a_plan().phases
    together = (phase.count_noise**-2 + phase.gradient_noise**-2) ** -0.5
    assert together == pytest.approx(phase.noise_multiplier, rel=1e-12)
    assert phase.count_noise**-2 == pytest.approx(0.3 * phase.noise_multiplier**-2, rel=1e-12)
    assert 0.995 * 8 <= plan_epsilon(plan) <= 8
    dense = build_plan(
        "dp-sgd", units=ROWS, batch_size=BATCH, epochs=2, epsilon=8.0, delta=1e-3, accountant="rdp"
    )
    assert plan.events() == dense.events()
    assert phase.gradient_noise > phase.noise_multiplier
    assert noise_on_mean(plan, phase) == pytest.approx(phase.gradient_noise / BATCH)
    assert Plan.from_json(plan.to_json()) == plan
    assert "count_share" not in dense.to_json()
    made = trainer(plan, run_dir=tmp_path / "run")
    for batch in made:
        made.step(batch)
    made.finish()
    lines = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    charged = [
        (b["phase"], b["sampling_rate"], b["noise_multiplier"])
        for b in lines if b["kind"] == "block" for _ in range(b["steps"])
    ]  # fmt: skip
    assert charged == [(phase.name, phase.sampling_rate, phase.noise_multiplier)] * phase.steps


def test_a_step_is_the_papers_algorithm(monkeypatch):
    """Counts, threshold, mask, clip, noise and mean, against NumPy on the same batch and the same noise."""
    plan, seen, batches, looked = a_plan(max_grad_norm=0.2), [], [], []
    (phase,) = plan.phases
    made, noise = trainer(plan, callbacks=[seen.append]), SeededRandomness(3)
    real = mechanism.GaussianMechanism.noisy_sum

    def note(self, query, charge, **how):
        looked.append(charge)
        return real(self, query, charge, **how)

    monkeypatch.setattr(mechanism.GaussianMechanism, "noisy_sum", note)
    for number, batch in enumerate(made):
        parts = list(batch)
        rows = [
            (tokens, int(label))
            for part in parts for tokens, label in zip(part.rows[0].tolist(), part.rows[1], strict=True)
        ]  # fmt: skip
        batches.append(rows)
        object.__setattr__(batch, "micro_batches", iter(parts))
        table, weight, bias = (p.detach().double().numpy().copy() for p in made.model.parameters())
        made.step(batch)
        samples = [tokens for tokens, _ in rows]
        counts = histogram(samples, list(range(len(rows))), WORDS, padding=0)
        grid = Grid.for_mechanism(1.0, phase.count_noise, WORDS)
        counts += noise.rounded_gaussian(grid.noise_bits, WORDS, key=(number, 1)).numpy() * grid.step
        kept = adafest.chosen_rows(counts, tau=1.0 * phase.count_noise)
        released = seen[number if number < 4 else number + number // 4].released
        mask = released.support.mask()[: WORDS * WIDTH].reshape(WORDS, WIDTH)
        assert mask.any(1).nonzero().flatten().tolist() == kept
        assert 0 < len(kept) < WORDS
        size = len(kept) * WIDTH + 2 * WIDTH + 2
        grid = Grid.for_mechanism(0.2, phase.gradient_noise, size)
        drawn = noise.rounded_gaussian(grid.noise_bits, size, key=(number,)).numpy() * grid.step
        expected = adafest.step(
            samples, [label for _, label in rows], table, weight, bias,
            kept=kept, padding=0, clip=0.2 / 1.001, noise=drawn, expected=BATCH,
        )  # fmt: skip
        np.testing.assert_allclose(released.dense().numpy(), expected, atol=2e-5)
    assert any(batches)
    assert [(c.step, c.release) for c in looked] == [(s, r) for s in range(phase.steps) for r in (1, 0)]
    made.finish()


def test_rows_that_are_not_chosen_do_not_move_and_the_number_of_rows_varies():
    made, before, sizes = trainer(a_plan(2.0)), None, set()
    for batch in made:
        before = made.model.words.weight.detach().clone()
        made.step(batch)
        chosen = made.support.mask()[: WORDS * WIDTH].reshape(WORDS, WIDTH).any(1)
        moved = (made.model.words.weight.detach() != before).any(1)
        assert not bool((moved & ~chosen).any())
        sizes.add(made.support.size)
    made.finish()
    assert len(sizes) > 1


@pytest.mark.parametrize("seed", range(10))
def test_a_whole_unit_moves_the_count_by_at_most_one(seed):
    """The count of one step's batch; the unit has several texts, a word many times, padding."""
    from sparsedp.privacy.queries import RowCountSum

    tokens = texts(seed, 12).tensors[0]
    tokens[0], tokens[1] = 0, 5
    size = 1 + seed % 4
    units = torch.cat([torch.zeros(size, dtype=torch.int64), torch.arange(1, 13 - size)])
    look = EmbeddingRowCounter(Bag(), from_criterion(LOSS), ["words.weight"])

    def count(rows: Tensor, owners: Tensor) -> Tensor:
        batch = MicroBatch((rows, torch.zeros(len(rows), dtype=torch.int64)), owners)
        return torch.stack(list(RowCountSum([batch], look, WORDS, FlatClip(1.0)).partial_sums(1.0))).sum(0)

    assert float((count(tokens, units) - count(tokens[size:], units[size:] - 1)).norm()) <= 1.0


def test_what_is_chosen_depends_on_releases_alone(monkeypatch):
    real = mechanism.GaussianMechanism.noisy_sum

    def fixed(self, query, charge, **how):
        total, std = real(self, query, charge, **how)
        generator = torch.Generator().manual_seed(2 * charge.step + charge.release)
        return 3.0 * std * torch.randn(total.numel(), generator=generator).to(total), std

    monkeypatch.setattr(mechanism.GaussianMechanism, "noisy_sum", fixed)
    monkeypatch.setattr(PublicRandomness, "fresh", classmethod(lambda cls: cls(5)))
    found = []
    for seed in (1, 2):
        made, supports = trainer(a_plan(), texts(seed), seed=None), []
        for batch in made:
            made.step(batch)
            supports.append(made.support)
        found.append((supports, [p.detach().clone() for p in made.finish().model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_releases_that_cost_more_than_the_step_are_refused_before_they_are_made():
    whole = Charge("train", 4, 0.1, 1.0)
    ledger = ChargeLog()
    shared = SplitCharge(ledger, whole)
    shared.charge(replace(whole, noise_multiplier=2.0, release=1))
    with pytest.raises(PrivacyError, match="cost more"):
        shared.charge(whole)
    with pytest.raises(PrivacyError, match="another release"):
        shared.charge(replace(whole, noise_multiplier=9.0, release=1))
    with pytest.raises(PrivacyError, match="another release"):
        shared.charge(replace(whole, noise_multiplier=9.0, step=5))
    with pytest.raises(PrivacyError, match="noise in every"):
        shared.charge(replace(whole, noise_multiplier=0.0))
    shared.charge(replace(whole, noise_multiplier=(1 - 2.0**-2) ** -0.5))
    assert ledger.charges == [whole]


def test_the_two_releases_of_a_step_have_noise_of_their_own():
    one, other = Charge("train", 4, 0.1, 1.0), Charge("train", 4, 0.1, 1.0, 1)
    assert one.key == (4,)
    draws = [SeededRandomness(1).rounded_gaussian(20, 50, key=charge.key) for charge in (one, other)]
    assert not torch.equal(*draws)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_resumed_run_goes_on_to_the_bit(tmp_path, optimizer):
    def stop(event):
        if getattr(event, "step", None) == 4 and hasattr(event, "released"):
            raise KeyboardInterrupt

    def run(out, **more):
        return fit(
            Bag(), texts(2), LOSS, method=get_method("adafest", ranking=Contributions(1.0, 0.3)),
            epsilon=8.0, delta=1e-3, epochs=2, batch_size=BATCH, accountant="rdp", seed=3, run_dir=out,
            progress=False, optimizer=lambda p: getattr(torch.optim, optimizer)(p, lr=0.1), **more,
        )  # fmt: skip

    straight = run(tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", callbacks=[stop])
    resumed = run(tmp_path / "stopped", resume=True)
    assert resumed.supports == straight.supports
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_waits_for_its_count_and_the_row_for_its_clock():
    layout = ParameterLayout.of(Bag())
    with pytest.raises(SparseDPError, match="have not been counted"):
        SupportScheduler(a_plan(), layout, PublicRandomness(1)).begin_step(0)
    with pytest.raises(SparseDPError, match="in every step"):
        build_plan("adafest", MethodOptions(refresh="once"), units=ROWS)
    for wrong in (
        {"share": 0.0}, {"share": 1.0}, {"share": None}, {"threshold": -1.0}, {"threshold": "a"},
        {"threshold": float("nan")},
    ):  # fmt: skip
        with pytest.raises(SparseDPError, match=r"contributions: (share|threshold) is .*, expected a number"):
            Contributions(**wrong)


class Placed(nn.Module):
    """Words and positions, as models ask for them in ways that do not tell whose row is whose."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words = nn.EmbeddingBag(WORDS, WIDTH) if how == "offsets" else nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH) if how == "positions" else None
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.place is not None:
            return self.out((self.words(tokens) + self.place(torch.arange(LENGTH))).mean(1))
        if self.how == "offsets":
            return self.out(self.words(tokens.reshape(-1), torch.arange(len(tokens)) * LENGTH))
        return self.out(self.words(tokens.reshape(-1)).view(*tokens.shape, WIDTH).mean(1))


@pytest.mark.parametrize("method", ["fest", "adafest"])
@pytest.mark.parametrize("how", ["offsets", "flattened", "positions"])
def test_tables_are_counted_however_the_model_lays_out_its_batch(method, how):
    """The model is given one text at a time, so whatever it looks up is that text's."""
    always = ("dense", "place.weight") if how == "positions" else ("dense",)
    result = fit(
        Placed(how), texts(), LOSS, method=get_method(method, always=always), epsilon=8.0, delta=1e-3, epochs=1,
        batch_size=BATCH, accountant="rdp", lr=0.1, seed=3, progress=False,
    )  # fmt: skip
    active = result.support.split(ParameterLayout.of(result.model))
    assert 0 < len(active["words.weight"]) < WORDS * WIDTH
    assert how != "positions" or len(active["place.weight"]) == LENGTH * WIDTH


def test_the_row_of_padding_gets_noise_where_it_is_in_the_support():
    how = {"epsilon": 8.0, "delta": 1e-3, "epochs": 1, "batch_size": BATCH, "accountant": "rdp", "lr": 0.1}
    scores = {"words.weight": torch.arange(WORDS) > 0, "out.*": True}
    by_rows = {"public_scores": scores, "method": get_method("given", granularity=Granularity.ROWS)}
    for more, moves in (({"method": "dp-sgd"}, True), (by_rows, False)):
        trained = fit(Bag(), texts(), LOSS, seed=3, progress=False, **how, **more).model
        assert bool((trained.words.weight[0] != 0).all()) is moves
