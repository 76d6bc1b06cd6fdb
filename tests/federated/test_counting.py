"""Rounds that count: what a client says of its rows, that it counts once, and that it is paid for."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from federated_tools import CLIENTS, LOSS, TEXTS, WORDS, Loopback, a_plan, make_bag, sgd, words_of

import sparsedp
from sparsedp.federated import Client, CountRequest, FederatedTrainer, LocalSGD
from sparsedp.parameters import ParameterLayout

pytestmark = pytest.mark.usefixtures("checked_once")

TABLE = CountRequest(("table.weight",))


@cache
def everyone(method: str) -> sparsedp.Plan:
    return a_plan(method, batch_size=CLIENTS, epochs=1)


def trainer_of(plan, seed=5, **options) -> FederatedTrainer:
    return FederatedTrainer(make_bag(), plan=plan, optimizer=sgd, seed=seed, **options)


def test_a_client_touches_the_words_of_its_rows_and_no_padding():
    model = make_bag()
    for number in (0, 7):
        counted = LocalSGD(dataset=words_of(number), loss=LOSS).count(
            model, ParameterLayout.of(model), TABLE, 0
        )
        words = set(words_of(number).tensors[0].flatten().tolist()) - {0}
        assert set(counted.nonzero().flatten().tolist()) == words
        assert set(counted.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("method", ["fest", "adafest"])
def test_a_client_moves_a_count_by_at_most_its_bound(method):
    """Whatever it claims to touch, and however often."""
    bound = 1.0 if method == "adafest" else a_plan(method).phases[0].clip_norm

    def counted(meddle):
        trainer = trainer_of(everyone(method))
        seen, controller = [], trainer._learner.controller
        for name in ("observe_selection", "observe_counts"):
            setattr(controller, name, lambda released: seen.append(released.mean * CLIENTS))
        clients = Loopback(meddle, world=TEXTS)
        begun = trainer.configure_round()
        answers = {number: clients.ask(number, begun.task) for number in begun.clients}
        report = trainer.aggregate(begun, {n: a for n, a in answers.items() if a is not None})
        trainer.close()
        return seen[0], report

    honest, report = counted(None)
    assert report.report is None
    assert report.rejected == ()
    without, _ = counted(lambda client, task, update: None if client == 7 else update)
    assert 0 < float((honest - without).norm()) <= bound
    moved, report = counted(lambda client, task, update: update * 0 + 10**8 if client == 7 else update)
    assert 0.9 * bound < float((moved - without).norm()) <= bound
    assert [(one.client, one.reason[:9]) for one in report.rejected] == [(7, "shortened")]
    refused, report = counted(lambda client, task, update: update[1:] if client == 7 else update)
    assert torch.equal(refused, without)
    assert [one.client for one in report.rejected] == [7]


def test_a_step_that_counts_asks_the_same_clients_twice():
    plan = a_plan("adafest", epochs=3)
    clients, sent = Loopback(world=TEXTS), []
    with trainer_of(plan, seed=None) as trainer:
        d = ParameterLayout.of(trainer.model).dimension
        while not trainer.is_done:
            step = trainer.position
            both = []
            for _ in range(2):
                begun = trainer.configure_round()
                both.append(begun.clients)
                answers = {n: clients.ask(n, begun.task) for n in begun.clients}
                trainer.aggregate(begun, answers)
                sent.append(
                    ({name: len(a) for name, a in begun.task.to_payload().arrays.items()}, begun.task.size)
                )
            assert both[0] == both[1]
            assert trainer.position == step + 1
        trainer.finish()
    for (down, rows), (again, k) in zip(sent[::2], sent[1::2], strict=True):
        assert down == {"weights": d}
        assert rows == WORDS
        assert again == {"weights": d} | ({"support": k} if k < d else {})


@pytest.mark.parametrize("method", ["fest", "adafest"])
def test_a_run_that_counts_is_kept_resumed_and_verified(tmp_path, method):
    plan = a_plan(method, epochs=3)
    with trainer_of(plan) as trainer:
        Loopback(world=TEXTS).run(trainer)
        whole = trainer.finish()
    clients = Loopback(world=TEXTS)
    with trainer_of(plan, run_dir=tmp_path / "run") as trainer:
        for _ in range(5):
            clients.round(trainer)
        trainer.configure_round()  # dies in the middle of a round
    with trainer_of(plan, run_dir=tmp_path / "run", resume=True) as trainer:
        clients.run(trainer)
        resumed = trainer.finish()
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    verified = sparsedp.verify(tmp_path / "run", independent=False)
    assert verified.passed, verified.reasons


def test_a_selection_that_was_paid_for_and_lost_is_not_released_again(tmp_path, monkeypatch):
    plan = a_plan("fest")
    trainer = trainer_of(plan, seed=None, run_dir=tmp_path / "run")
    monkeypatch.setattr(trainer._learner.controller, "observe_selection", lambda released: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Loopback(world=TEXTS).round(trainer)
    trainer.close()
    with pytest.raises(sparsedp.PrivacyError, match="would cost again"):
        trainer_of(plan, seed=None, run_dir=tmp_path / "run", resume=True)


def test_a_training_of_ones_own_that_cannot_count_says_so():
    trainer = trainer_of(everyone("fest"))
    client = Client(make_bag, lambda model, layout, support, step: torch.zeros(support.size))
    with pytest.raises(sparsedp.SparseDPError, match="asks for a count"):
        client.answer(trainer.configure_round().task)
    trainer.close()
