"""Federated rounds without a network: equal to central steps, safe from what clients do; kept and resumed on disk."""

from __future__ import annotations

import pytest
import torch
from federated_tools import CLIENTS, LOSS, ROWS, Loopback, a_plan, all_rows, make_model, sgd

import sparsedp
from runs import OFTEN
from sparsedp.batch import per_sample_loss
from sparsedp.clipping import FlatClip
from sparsedp.federated import FederatedTrainer, LocalSGD
from sparsedp.methods import list_methods
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.mechanism import Grid
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.queries import is_within, on_grid
from sparsedp.runs.run import Run

pytestmark = pytest.mark.usefixtures("checked_once")

METHODS = [
    pytest.param(one.name, marks=[] if one.name in OFTEN else pytest.mark.nightly)
    for one in list_methods()
    if one.name not in ("adafest", "fest")
]


def central(plan: Plan, seed: int = 5):
    """The same plan over the pooled rows; every client a unit, alone in its micro-batch."""
    dataset, units = all_rows()
    loading = sparsedp.DataConfig(unit_ids=units, rows_per_unit=ROWS, max_physical_batch=ROWS)
    how = {"plan": plan, "optimizer": sgd, "data": loading, "seed": seed, "engine": "reference"}
    trainer = sparsedp.Trainer(make_model(), dataset, LOSS, **how)
    for batch in trainer:
        trainer.step(batch)
    return trainer.finish()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("method", METHODS)
def test_rounds_of_one_step_are_central_steps_to_the_bit(method):
    plan = a_plan(method)
    expected = central(plan)
    with FederatedTrainer(make_model(), plan=plan, optimizer=sgd, seed=5) as trainer:
        assert len(Loopback().run(trainer)) == plan.total_steps
        found = trainer.finish()
    assert torch.equal(weights(found.model), weights(expected.model))
    assert found.supports == expected.supports
    assert found.ledger == expected.ledger


def dense(**changes) -> Plan:
    return a_plan("dp-sgd", batch_size=CLIENTS, **changes)


def one_round(meddle, seed=5):
    """The released mean of a first round of all clients, with the seed's noise, and the report."""
    trainer = FederatedTrainer(make_model(), plan=dense(), optimizer=sgd, seed=seed)
    report = Loopback(meddle).round(trainer)
    trainer.pause()
    return report.report.released.mean * CLIENTS, report


def test_a_huge_update_is_shortened_and_named_in_the_report_alone(caplog):
    def huge(client, task, update):
        return update * 0 + 10**8 if client == 7 else update

    honest, _ = one_round(None)
    without, _ = one_round(lambda client, task, update: None if client == 7 else update)
    moved, report = one_round(huge)
    assert 0.49 < float((moved - without).norm()) <= 0.5  # the clip norm, whatever it sent
    assert [refusal.client for refusal in report.rejected] == [7]
    assert "shortened" in report.rejected[0].reason
    assert caplog.text == ""
    assert float((honest - without).norm()) < 0.5


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (lambda update: update.double() * float("nan"), "float64"),
        (lambda update: update[:-1], "shape"),
        (lambda update: update.reshape(1, -1), "shape"),
        (lambda update: update.to(torch.int64), "int64"),
        (lambda update: "out of memory", "out of memory"),
    ],
    ids=["nan", "short", "matrix", "wide", "words"],
)
def test_what_is_no_update_is_refused_and_named_and_adds_nothing(sent, why):
    without, _ = one_round(lambda client, task, update: None if client == 2 else update)
    found, report = one_round(lambda client, task, update: sent(update) if client == 2 else update)
    assert torch.equal(found, without)
    assert [refusal.client for refusal in report.rejected] == [2]
    assert why in report.rejected[0].reason
    assert report.missing == ()


def test_who_was_not_picked_cannot_add_anything():
    plan = a_plan("dp-sgd")
    results = []
    for uninvited in (False, True):
        trainer = FederatedTrainer(make_model(), plan=plan, optimizer=sgd, seed=5)
        begun, clients = trainer.configure_round(), Loopback()
        assert 0 < len(begun.clients) < CLIENTS
        answers = {number: clients.ask(number, begun.task) for number in begun.clients}
        other = next(number for number in range(CLIENTS) if number not in begun.clients)
        if uninvited:
            answers[other] = clients.ask(other, begun.task)
        report = trainer.aggregate(begun, answers)
        results.append(report.report.released.mean)
        assert [refusal.client for refusal in report.rejected] == ([other] if uninvited else [])
        trainer.pause()
    assert torch.equal(*results)


def test_the_noise_is_the_servers_and_of_the_planned_size():
    draws = []
    for seed in range(40):
        trainer = FederatedTrainer(make_model(), plan=dense(), optimizer=sgd, seed=seed)
        report = trainer.aggregate(trainer.configure_round(), {})
        released = report.report.released
        assert float(released.noise_scale[0]) == pytest.approx(
            trainer.plan.phases[0].noise_multiplier * 0.5 / CLIENTS
        )
        draws.append(released.mean / released.noise_scale)
        trainer.pause()
    drawn = torch.cat(draws)
    assert abs(float(drawn.mean())) < 5 / len(drawn) ** 0.5
    assert abs(float(drawn.square().mean()) - 1) < 5 * (2 / len(drawn)) ** 0.5


def test_clients_are_picked_by_their_own_coins():
    counts, sizes = torch.zeros(CLIENTS), []
    plan = a_plan("dp-sgd", epochs=120)
    trainer = FederatedTrainer(make_model(), plan=plan, optimizer=sgd)
    while not trainer.is_done:
        begun = trainer.configure_round()
        counts[list(begun.clients)] += 1
        sizes.append(len(begun.clients))
        trainer.aggregate(begun, {})
    rounds, rate = plan.total_steps, 1 / 3
    spread = (rate * (1 - rate) * rounds) ** 0.5
    assert float((counts - rate * rounds).abs().max()) < 5 * spread
    sized = torch.tensor(sizes, dtype=torch.float64)
    expected = CLIENTS * rate * (1 - rate)
    assert abs(float(sized.var()) - expected) < 5 * expected * (2 / rounds) ** 0.5  # a fixed number has none


def test_another_model_is_refused_by_the_client():
    trainer = FederatedTrainer(make_model(), plan=dense(), optimizer=sgd, seed=5)
    begun = trainer.configure_round()
    odd = Loopback().clients[0]
    object.__setattr__(odd, "make_model", lambda: torch.nn.Linear(6, 3).double())
    with pytest.raises(sparsedp.ModelError, match="not the server's"):
        odd.answer(begun.task)
    trainer.close()


def test_local_steps_add_up_to_what_plain_sgd_moves():
    """Four steps by hand, on half of the coordinates."""
    model, by_hand = make_model(), make_model()
    layout = ParameterLayout.of(model)
    support = Support(torch.arange(0, layout.dimension, 2), layout.dimension)
    dataset = all_rows()[0]
    start = layout.flatten(model)
    update = LocalSGD(dataset=dataset, loss=LOSS, steps=4, lr=0.3)(model, layout, support, 0)
    flat = start.clone()
    for _ in range(4):
        torch.nn.utils.vector_to_parameters(flat, by_hand.parameters())
        by_hand.zero_grad()
        LOSS(by_hand(dataset.tensors[0]), dataset.tensors[1]).mean().backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in by_hand.parameters()])
        flat = flat - 0.3 * gradient * support.mask()
    assert torch.allclose(update, support.gather(start - flat) / (4 * 0.3), atol=1e-12)


def test_plans_without_noise_and_statistics_are_refused():
    for plan, says in (
        (a_plan("dp-sgd").with_noise({"train": 0.0}), "noise in each"),
        (a_plan(normalise=sparsedp.PrivateNormalisation()), "not asked for"),
        (a_plan("fest"), "not asked for"),
        (a_plan("adafest"), "not asked for"),
        (a_plan("dp-sgd", private_loss=2.0), "not asked for"),
        (a_plan(max_grad_norm="auto"), "held to one norm"),
    ):
        with pytest.raises(sparsedp.PrivacyError, match=says):
            FederatedTrainer(make_model(), plan=plan, optimizer=sgd)


def test_an_honest_client_keeps_to_the_clip_norm():
    """However much it has learned, and also if that is no number."""

    grid = Grid.for_mechanism(0.5, 1.0, 40)
    for scale in (1e-9, 0.07, 1.0, 1e30):
        learned = torch.linspace(-1, 1, 40, dtype=torch.float64) * scale
        sent = on_grid(learned, FlatClip(0.5), grid)
        assert is_within(sent, grid)
        length = float(sent.double().norm()) * grid.step
        assert length == pytest.approx(min(float(learned.norm()), 0.5), rel=2e-3, abs=40 * grid.step)
    learned[3] = float("nan")
    assert not on_grid(learned, FlatClip(0.5), grid).any()


def start(plan, out=None, **options):
    evaluate = sparsedp.held_out(all_rows()[0], per_sample_loss(LOSS))
    return FederatedTrainer(make_model(), plan=plan, optimizer=sgd, evaluate=evaluate, run_dir=out, **options)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    plan = a_plan("tp-topk", epochs=6)
    with start(plan, seed=9) as trainer:
        Loopback().run(trainer)
        whole = trainer.finish()
    with start(plan, tmp_path / "run", seed=9) as trainer:
        clients = Loopback()
        for _ in range(plan.total_steps // 2):
            clients.round(trainer)
        trainer.configure_round()  # dies in the middle of a round
    with start(plan, tmp_path / "run", seed=9, resume=True) as trainer:
        clients.run(trainer)  # clients remember the first half; the server does not rely on it
        resumed = trainer.finish()
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    found = sparsedp.verify(tmp_path / "run", independent=False)
    assert found.passed, found.reasons
    record = Run.open(tmp_path / "run").record
    assert (record["units"], record["unit"], record["settings"]["engine"]) == (CLIENTS, "client", "federated")
    assert "client" in resumed.report(tmp_path / "report.html").read_text()


def test_an_unseeded_run_pays_for_lost_rounds_and_never_twice(tmp_path):
    plan = a_plan("dp-sgd", epochs=70)  # 210 rounds: blocks of two
    trainer = start(plan, tmp_path / "run")
    clients = Loopback()
    clients.round(trainer)
    trainer.close()  # no checkpoint: as a kill would
    with start(plan, tmp_path / "run", resume=True) as trainer:
        assert trainer.position == 2
        clients.round(trainer)
    with pytest.raises(sparsedp.SparseDPError, match="closed"):
        trainer.configure_round()


def test_rounds_come_one_at_a_time():
    trainer = start(a_plan())
    begun = trainer.configure_round()
    with pytest.raises(sparsedp.SparseDPError, match="aggregate it first"):
        trainer.configure_round()
    trainer.aggregate(begun, {})
    with pytest.raises(sparsedp.SparseDPError, match="another round"):
        trainer.aggregate(begun, {})
    trainer.pause()
