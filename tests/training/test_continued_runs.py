"""Plans chosen after looking at earlier runs: whatever is paused, resumed or killed, the cap holds."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from runs import ROWS, a_plan, a_trainer, advance
from sparsedp.errors import PrivacyError
from sparsedp.methods import PlanSpec, get_method
from sparsedp.privacy import Charge, Plan, RdpFilter
from sparsedp.privacy.ledger import Ledger
from sparsedp.runs.run import Run, continue_runs

FIRST = a_plan(get_method("dp-sgd"))
CAP = RdpFilter.for_first_plan(FIRST, 9.0, 1e-3)


def draft(epochs: int, batch_size: int = 20) -> Plan:
    """A plan whose noise is not known yet."""
    asked = {"epochs": epochs, "batch_size": batch_size, "max_grad_norm": 1.0, "delta": 1e-3}
    return PlanSpec.asked("dp-sgd", units=ROWS, **asked).draft()


NEXT = draft(5, 15)


def paused(folder: Path, steps: int = 6, plan: Plan = FIRST) -> Path:
    """A run stopped after some of its 15 steps."""
    advance(a_trainer("dp-sgd", out=folder, plan=plan, seed=None), steps).close()
    return folder


def resumed(folder: Path, plan: Plan = FIRST) -> None:
    advance(a_trainer("dp-sgd", out=folder, plan=plan, seed=None, resume=True)).finish()


def charged(*folders: Path) -> float:
    """What their ledgers say was spent, at the filter's order."""
    return sum(CAP.cost(Run.open(folder).ledger.events()) for folder in folders)


def without_closing_line(folder: Path) -> bytes:
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    closing = next(i for i, line in enumerate(lines) if b'"kind":"closed"' in line)
    return b"".join(lines[:closing])


def test_a_run_whose_remainder_was_given_away_cannot_be_resumed(tmp_path: Path) -> None:
    first = paused(tmp_path / "first")
    further = continue_runs(CAP, NEXT, [first])
    assert CAP.cost(further.events()) > CAP.budget - CAP.cost(FIRST.events())
    with pytest.raises(PrivacyError, match="cannot be resumed"):
        resumed(first)
    second = tmp_path / "second"
    advance(a_trainer("dp-sgd", out=second, plan=further, seed=None)).finish()
    assert 0.98 * CAP.budget < charged(first, second) <= CAP.budget


def test_a_run_that_can_still_be_resumed_counts_with_its_whole_plan(tmp_path: Path) -> None:
    first = paused(tmp_path / "first")
    ledger = Run.open(first).ledger
    assert CAP.remaining([ledger]) == CAP.remaining([FIRST])
    assert CAP.remaining([ledger]) < CAP.budget - charged(first)
    further = CAP.calibrate(NEXT, [ledger])
    resumed(first)
    assert charged(first) + CAP.cost(further.events()) <= CAP.budget


def test_a_closed_ledger_takes_no_charge(tmp_path: Path) -> None:
    first = paused(tmp_path / "first")
    continue_runs(CAP, NEXT, [first])
    before = Run.open(first).ledger
    with Ledger.lock(first / "ledger.jsonl", FIRST) as ledger:
        assert ledger.state == before
        phase = FIRST.phase_at(ledger.next_step)
        step = Charge(phase.name, ledger.next_step, phase.sampling_rate, phase.noise_multiplier)
        with pytest.raises(PrivacyError, match="was closed"):
            ledger.charge(step)
    assert Run.open(first).ledger.committed() == before.events()


def test_a_closing_line_that_was_cut_off_is_missed(tmp_path: Path) -> None:
    first = paused(tmp_path / "first")
    continue_runs(CAP, NEXT, [first])
    (first / "ledger.jsonl").write_bytes(without_closing_line(first))
    with pytest.raises(PrivacyError, match="lines were removed"):
        resumed(first)
    with pytest.raises(PrivacyError, match="lines were removed"):
        continue_runs(CAP, NEXT, [first])


def test_a_second_follower_counts_the_first(tmp_path: Path) -> None:
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


def test_a_follower_that_was_lost_counts_whole(tmp_path: Path) -> None:
    first = paused(tmp_path / "first")
    lost = CAP.calibrate(draft(1), [FIRST])
    with Ledger.lock(first / "ledger.jsonl", FIRST) as ledger:
        ledger.retire(lost)
    further = continue_runs(CAP, draft(2), [first])
    total = charged(first) + CAP.cost(lost.events()) + CAP.cost(further.events())
    assert 0.98 * CAP.budget < total <= CAP.budget


def test_a_run_that_is_going_on_cannot_be_continued(tmp_path: Path) -> None:
    trainer = a_trainer("dp-sgd", out=tmp_path / "first", plan=FIRST, seed=None)
    advance(trainer, 3)
    with pytest.raises(PrivacyError, match="in use"):
        continue_runs(CAP, NEXT, [tmp_path / "first"])
    advance(trainer).finish()


def _continue_until(dies_at: int, folders: list[Path]) -> None:
    moments = iter(range(10**9))
    write, fsync = os.write, os.fsync

    def moment() -> None:
        if next(moments) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_in_two(file: int, data: bytes) -> int:
        half = len(data) // 2
        write(file, data[:half])
        moment()
        return half + write(file, data[half:])

    def slow_fsync(file: int) -> None:
        moment()
        fsync(file)
        moment()

    os.write, os.fsync = write_in_two, slow_fsync  # type: ignore[assignment]
    continue_runs(CAP, NEXT, folders)


def test_killed_at_any_moment_of_closing_the_cap_holds(tmp_path: Path) -> None:
    """Open ledgers count whole, closed ones wait for the same plan, and no charged step is forgotten."""
    context = multiprocessing.get_context("fork")
    closed_before, torn_before = set(), 0
    for dies_at in range(10):
        folders = [paused(tmp_path / f"{dies_at}-{name}", steps) for name, steps in (("a", 3), ("b", 5))]
        run = context.Process(target=_continue_until, args=(2 * dies_at, folders))
        run.start()
        run.join()
        closed_before.add(sum(Run.open(one).ledger.closings != () for one in folders))
        assert CAP.remaining([Run.open(one).ledger for one in folders]) <= CAP.budget - charged(*folders)
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
