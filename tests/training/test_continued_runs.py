"""Plans chosen after looking at earlier runs: whatever is paused, resumed or killed, the cap holds."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import sparsedp
from runs import ROWS, a_plan, a_trainer, advance, die_at, loss_fn, network, placed, rows
from sparsedp.errors import PrivacyError
from sparsedp.methods import PlanConfig, get_method
from sparsedp.privacy import Plan, RdpFilter
from sparsedp.privacy.ledger import Ledger
from sparsedp.runs.run import Run, continue_runs

FIRST = a_plan(get_method("dp-sgd"))
CAP = RdpFilter.for_first_plan(FIRST, 9.0, 1e-3)


def draft(epochs, batch_size: int = 20) -> Plan:
    """A plan whose noise is not known yet."""
    asked = {"epochs": epochs, "batch_size": batch_size, "max_grad_norm": 1.0, "delta": 1e-3}
    return PlanConfig.asked("dp-sgd", units=ROWS, **asked).draft()


NEXT = draft(5, 15)


def paused(folder, steps: int = 6, plan: Plan = FIRST) -> Path:
    """A run stopped after some of its 15 steps."""
    advance(a_trainer("dp-sgd", out=folder, plan=plan, seed=None), steps).close()
    return folder


def resumed(folder, plan: Plan = FIRST) -> None:
    advance(a_trainer("dp-sgd", out=folder, plan=plan, seed=None, resume=True)).finish()


def charged(*folders) -> float:
    """What their ledgers say was spent, at the filter's order."""
    return sum(CAP.cost(Run.open(folder).ledger.events()) for folder in folders)


def test_a_run_that_can_still_be_resumed_counts_with_its_whole_plan(tmp_path):
    first = paused(tmp_path / "first")
    ledger = Run.open(first).ledger
    assert CAP.cost(ledger.committed()) == CAP.cost(FIRST.events()) > charged(first)
    further = CAP.calibrate(NEXT, [(ledger.charged_head, ledger.committed())])
    resumed(first)
    assert charged(first) + CAP.cost(further.events()) <= CAP.budget


def test_a_closing_line_that_was_cut_off_is_missed(tmp_path):
    first = paused(tmp_path / "first")
    continue_runs(CAP, NEXT, [first])
    file = first / "ledger.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    closing = next(i for i, line in enumerate(lines) if b'"kind":"closed"' in line)
    file.write_bytes(b"".join(lines[:closing]))
    with pytest.raises(PrivacyError, match="lines were removed"):
        resumed(first)
    with pytest.raises(PrivacyError, match="lines were removed"):
        continue_runs(CAP, NEXT, [first])


def test_a_second_follower_counts_the_first(tmp_path):
    """Whole if its folder is not named: every plan that was promised something is in the closed ledger."""
    first = paused(tmp_path / "first")
    second_plan = continue_runs(CAP, draft(1), [first])
    third_plan = continue_runs(CAP, draft(3), [first])
    fourth_plan = continue_runs(CAP, draft(2), [first])
    every = (second_plan, third_plan, fourth_plan)
    assert charged(first) + sum(CAP.cost(plan.events()) for plan in every) <= CAP.budget
    second = paused(tmp_path / "second", 2, plan=second_plan)
    fifth = continue_runs(CAP, draft(2), [first, second])
    total = charged(first, second) + sum(CAP.cost(plan.events()) for plan in (third_plan, fourth_plan, fifth))
    assert 0.98 * CAP.budget < total <= CAP.budget
    with pytest.raises(PrivacyError, match="cannot be resumed"):
        resumed(second, second_plan)


def test_a_follower_that_was_lost_counts_whole(tmp_path):
    first = paused(tmp_path / "first")
    lost = CAP.calibrate(draft(1), [(FIRST.fingerprint, FIRST.events())])
    with Ledger.resume(first / "ledger.jsonl", FIRST, even_closed=True) as ledger:
        ledger.retire(lost)
    further = continue_runs(CAP, draft(2), [first])
    total = charged(first) + CAP.cost(lost.events()) + CAP.cost(further.events())
    assert 0.98 * CAP.budget < total <= CAP.budget


def _continue_until(dies_at: int, folders: list[Path]) -> None:
    die_at(dies_at)
    continue_runs(CAP, NEXT, folders)


def test_killed_at_any_moment_of_closing_the_cap_holds(tmp_path):
    """Open ledgers count whole, closed ones wait for the same plan, and no charged step is forgotten."""
    context = multiprocessing.get_context("fork")
    closed_before, torn_before = set(), 0
    for dies_at in range(10):
        folders = [paused(tmp_path / f"{dies_at}-{name}", steps) for name, steps in (("a", 3), ("b", 5))]
        run = context.Process(target=_continue_until, args=(2 * dies_at, folders))
        run.start()
        run.join()
        closed_before.add(sum(Run.open(one).ledger.closed is not None for one in folders))
        assert sum(CAP.cost(Run.open(one).ledger.committed()) for one in folders) >= charged(*folders)
        if any(Run.open(one).ledger.torn for one in folders):
            torn_before += 1
            with suppress(PrivacyError):
                continue_runs(CAP, NEXT, folders)
            continue
        further = continue_runs(CAP, NEXT, folders)
        assert further == continue_runs(CAP, NEXT, folders)
        assert charged(*folders) + CAP.cost(further.events()) <= CAP.budget
        for folder in folders:
            with pytest.raises(PrivacyError, match="cannot be resumed"):
                resumed(folder)
    assert closed_before == {0, 1, 2}
    assert torn_before < 3


def stop(event):
    raise KeyboardInterrupt


def fitted(folder, **told):
    how = {"epochs": 2, "batch_size": 10, "max_grad_norm": 0.7, "method": "dp-sgd", "progress": False}
    return sparsedp.fit(network(), rows(1), loss_fn, **placed({"run_dir": folder, **how, **told}))


def first_fit(folder, **changes):
    return fitted(folder, **{"epsilon": 2.0, "delta": 1e-3, "total_epsilon": 9.0, **changes})


def spent_under_the_cap(*folders):
    plan = Run.open(folders[0]).plan
    cap = RdpFilter(plan.target_epsilon, plan.delta, plan.continuation.order)
    return sum(cap.cost(Run.open(folder).ledger.events()) for folder in folders) / cap.budget


@pytest.fixture
def folders(tmp_path):
    return [tmp_path / name for name in ("first", "second", "third")]


def test_a_fit_that_continues_another_spends_what_its_cap_has_left_and_no_more(folders):
    first, second, third = folders
    first_fit(first)
    before = Run.open(first).plan
    assert (before.target_epsilon, before.accountant, before.continuation.ledgers) == (9.0, "rdp-filter", ())
    result = fitted(second, continue_from=first)
    assert 0.98 < spent_under_the_cap(first, second) <= 1
    assert 8.5 < result.epsilon <= 9.0
    assert all(sparsedp.verify(folder).passed for folder in (first, second))
    fitted(third, continue_from=[first, second])
    assert spent_under_the_cap(*folders) <= 1


def test_the_same_remainder_goes_to_no_second_folder(folders):
    first, second, third = folders
    first_fit(first)
    fitted(second, continue_from=first)
    fitted(third, continue_from=first)
    assert spent_under_the_cap(*folders) <= 1


def test_a_paused_run_gives_up_what_it_had_not_spent_and_one_that_continues_resumes_with_its_plan(folders):
    first, second, _ = folders
    with pytest.raises(KeyboardInterrupt):
        first_fit(first, callbacks=[stop])
    with pytest.raises(PrivacyError, match="it is never changed"):
        first_fit(first, total_epsilon=12.0, resume=True)
    with pytest.raises(KeyboardInterrupt):
        fitted(second, continue_from=first, callbacks=[stop])
    plan = Run.open(second).plan
    assert fitted(second, continue_from=first, resume=True).plan == plan
    assert 0.98 < spent_under_the_cap(first, second) <= 1
    with pytest.raises(PrivacyError, match="cannot be resumed"):
        first_fit(first, resume=True)


def test_a_run_that_continues_another_is_not_continued_without_that(folders):
    first, second, third = folders
    first_fit(first)
    with pytest.raises(KeyboardInterrupt):
        fitted(second, continue_from=first, callbacks=[stop])
    with pytest.raises(PrivacyError, match="continues a run that is not named"):
        fitted(third, continue_from=second)
    fitted(third, continue_from=[first, second])
    assert 0.98 < spent_under_the_cap(*folders) <= 1


def test_what_does_not_go_with_a_cap_is_refused(folders):
    first, second, third = folders
    first_fit(first)
    for told in ({"epsilon": 1.0}, {"delta": 1e-4}, {"accountant": "pld"}, {"total_epsilon": 20.0}):
        with pytest.raises(PrivacyError, match="gets what is left of the cap"):
            fitted(second, continue_from=first, **told)
    with pytest.raises(PrivacyError, match="one cap is over the same units"):
        fitted(second, continue_from=first, unit_ids=torch.arange(60) // 3)
    first_fit(second, total_epsilon=None)
    with pytest.raises(PrivacyError, match="declared no cap before its first release"):
        fitted(third, continue_from=second)
