"""The ledger: it never under-counts, and every tampering shows, with its line."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from runs import die_at
from sparsedp.errors import PrivacyError
from sparsedp.privacy import Charge, Phase, Plan, plan_epsilon
from sparsedp.privacy.ledger import Ledger, chain_line

PHASES = (
    Phase("statistics", 1, 1.0, 1.0, 20.0, trains=False),
    Phase("warm-up", 149, 0.02, 1.0, 2.0),
    Phase("main", 350, 0.02, 1.0, 1.5),
)
PLAN = Plan("tp-topk", PHASES, units=5000, steps_per_epoch=50, unit="patient_nbr", delta=1e-5)
BLOCK = PLAN.total_steps // 100


def charge_of(step, plan=PLAN):
    phase = plan.phase_at(step)
    return Charge(phase.name, step, phase.sampling_rate, phase.noise_multiplier)


def spend(ledger, steps):
    for step in steps:
        ledger.charge(charge_of(step))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def written(path):
    """The file of a run stopped in its 23rd step."""
    with Ledger(PLAN, path) as ledger:
        spend(ledger, range(23))
    return path


def lines_of(path):
    return path.read_text().splitlines()


def test_a_whole_run_charges_exactly_its_plan(path):
    with Ledger(PLAN, path) as ledger:
        spend(ledger, range(PLAN.total_steps))
        assert ledger.state.charged == ledger.next_step == PLAN.total_steps
    record = Ledger.read(path)
    assert record.charged == PLAN.total_steps
    assert record.spent() == plan_epsilon(PLAN)
    assert record.spent(1e-6, "rdp") == plan_epsilon(PLAN, "rdp", 1e-6)
    with pytest.raises(PrivacyError, match="delta"):
        replace(record, delta=None).spent()
    header = (record.unit, record.units, record.plan, record.delta)
    assert header == ("patient_nbr", 5000, PLAN.fingerprint, 1e-5)


@pytest.mark.parametrize("replay", [False, True])
def test_a_retired_ledger_charges_nothing_more_even_where_lost_steps_may_be_replayed(replay):
    ledger = Ledger(PLAN, replay=replay)
    spend(ledger, range(3))
    ledger.retire(PLAN)
    with pytest.raises(PrivacyError, match="closed"):
        spend(ledger, [3])


def test_every_write_is_flushed_to_disk_before_the_charge_returns(path, monkeypatch):
    calls = []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda *a: calls.append("write") or write(*a))
    monkeypatch.setattr(os, "fsync", lambda *a: calls.append("fsync") or fsync(*a))
    with Ledger(PLAN, path) as ledger:
        assert calls == ["write", "fsync", "fsync"]
        for step in range(12):
            before = len(calls)
            lines = len(lines_of(path))
            ledger.charge(charge_of(step))
            grown = len(lines_of(path)) > lines
            assert calls[before:] == (["write", "fsync"] if grown else [])


@pytest.mark.parametrize(
    "wrong",
    [{"noise_multiplier": 1.9999999999999998}, {"sampling_rate": 0.020000000000000004}, {"phase": "main"}]
    + [{"step": step} for step in (500, -1, 24, 400)],
)
def test_a_charge_that_is_not_the_plans_is_refused_and_writes_nothing(path, wrong):
    with Ledger(PLAN, path) as ledger:
        spend(ledger, range(21))
        before = path.read_bytes()
        fitting = charge_of(wrong["step"]) if wrong.get("step", -1) in range(500) else charge_of(21)
        with pytest.raises(PrivacyError):
            ledger.charge(replace(fitting, **wrong))
        assert path.read_bytes() == before
        ledger.charge(charge_of(21))


def test_a_step_cannot_be_released_twice(path):
    with Ledger(PLAN, path) as ledger:
        spend(ledger, range(9))
        for again in (0, 7, 8):
            with pytest.raises(PrivacyError, match="charged before"):
                ledger.charge(charge_of(again))


def test_resuming_loses_the_block_in_flight_and_goes_on_behind_it(written):
    with Ledger.resume(written, PLAN) as ledger:
        assert ledger.next_step == ledger.state.charged == 1 + 5 * BLOCK
        with pytest.raises(PrivacyError, match="Go on at 26"):
            ledger.charge(charge_of(23))
        spend(ledger, range(ledger.next_step, PLAN.total_steps))
        with pytest.raises(PrivacyError, match="outside the plan"):
            ledger.charge(replace(charge_of(499), step=500))
    assert Ledger.read(written).charged == PLAN.total_steps


def test_a_seeded_replay_charges_a_step_once(written):
    with Ledger.resume(written, PLAN, replay=True) as ledger:
        before = written.read_bytes()
        spend(ledger, range(10, 26))
        spend(ledger, range(26))
        assert written.read_bytes() == before
        ledger.charge(charge_of(26))
        assert ledger.state.charged == 26 + BLOCK


def test_a_ledger_is_neither_overwritten_nor_conjured_up_nor_taken_by_another_plan(written, tmp_path):
    before, gone = written.read_bytes(), tmp_path / "gone.jsonl"
    for attempt, says in (
        (lambda: Ledger(PLAN, written), "exists"),
        (lambda: Ledger.resume(gone, PLAN), "no ledger"),
        (lambda: Ledger.read(gone), "no ledger"),
        (lambda: Ledger.resume(written, replace(PLAN, units=5001)), "another plan"),
    ):
        with pytest.raises(PrivacyError, match=says):
            attempt()
    assert written.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["ledger.jsonl"]
    Ledger.resume(written, PLAN).close()


def test_a_ledger_has_one_writer(path):
    first = Ledger(PLAN, path)
    with pytest.raises(PrivacyError, match="in use"):
        Ledger.resume(path, PLAN)
    code = f"""
from sparsedp.privacy import Plan
from sparsedp.privacy.ledger import Ledger
Ledger.resume({str(path)!r}, Plan.from_json({PLAN.to_json()!r}))
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "in use by another run" in other.stderr
    assert Ledger.read(path).charged == 0
    first.charge(charge_of(0))
    first.close()
    Ledger.resume(path, PLAN).close()


def test_a_forked_child_can_neither_charge_nor_keep_the_lock(path):
    ledger = Ledger(PLAN, path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        verdict = b"refused"
        with contextlib.suppress(PrivacyError):
            ledger.charge(charge_of(0))
            verdict = b"charged"
        os.write(writer, verdict)
        time.sleep(30)
        os._exit(0)
    try:
        assert os.read(reader, 16) == b"refused"
        ledger.charge(charge_of(0))
        ledger.close()
        Ledger.resume(path, PLAN).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_failed_write_refuses_the_release_and_the_next_ones(path, monkeypatch):
    ledger = Ledger(PLAN, path)
    spend(ledger, range(6))
    write = os.write

    def full_disk(file, data):
        write(file, bytes(data)[:40])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(PrivacyError, match="No space left"):
        ledger.charge(charge_of(6))
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(PrivacyError, match="closed"):
        ledger.charge(charge_of(6))
    with Ledger.resume(path, PLAN) as again:
        assert again.next_step == 6 + BLOCK


@pytest.mark.parametrize("keep", ["all but the newline", "half", "one byte", "none"])
def test_a_torn_last_line_counts_as_a_block_wherever_it_broke(written, keep):
    *lines, last = written.read_bytes().splitlines(keepends=True)
    kept = last[: {"all but the newline": -1, "half": len(last) // 2, "one byte": 1, "none": 0}[keep]]
    torn = b"".join(lines) + kept
    written.write_bytes(torn)
    charged = 26 if kept else 21
    assert Ledger.read(written).charged == charged
    with Ledger.resume(written, PLAN) as ledger:
        assert ledger.next_step == charged
        spend(ledger, range(charged, charged + 2 * BLOCK))
    assert written.read_bytes().startswith(torn)
    assert Ledger.read(written).charged == charged + 2 * BLOCK


def test_a_repair_that_is_torn_itself_is_repaired(written):
    written.write_bytes(written.read_bytes()[:-30])
    Ledger.resume(written, PLAN).close()
    for cut in (3, 40):
        written.write_bytes(written.read_bytes()[:-cut])
        assert Ledger.read(written).charged == 26
        Ledger.resume(written, PLAN).close()
    assert Ledger.read(written).torn is None
    assert Ledger.read(written).charged == 26


@pytest.mark.parametrize(("steps", "charged"), [(23, 26 + BLOCK), (PLAN.total_steps, PLAN.total_steps)])
@pytest.mark.parametrize("left", [b"\0" * 100, b'{"first'], ids=["zeros", "half a line"])
def test_what_a_power_cut_leaves_behind_counts_as_torn_up_to_the_last_step(path, left, steps, charged):
    with Ledger(PLAN, path) as ledger:
        spend(ledger, range(steps))
    with path.open("ab") as file:
        file.write(left)
    assert Ledger.read(path).charged == charged
    Ledger.resume(path, PLAN).close()
    assert Ledger.read(path).charged == charged


def edited(line, **changes):
    return json.dumps({**json.loads(line), **changes}, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    ("tamper", "number"),
    [
        (lambda lines: [*lines[:3], edited(lines[3], steps=1), *lines[4:]], 4),
        (lambda lines: [*lines[:3], edited(lines[3], noise_multiplier=20.0), *lines[4:]], 4),
        (lambda lines: [edited(lines[0], delta=1e-9), *lines[1:]], 1),
        (lambda lines: [edited(lines[0], unit="row"), *lines[1:]], 1),
        (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 3),
        (lambda lines: [*lines[:2], *lines[3:]], 3),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4),
        (lambda lines: [*lines, lines[-1]], 8),
        (lambda lines: [*lines[:3], "", *lines[3:]], 4),
        (lambda lines: [*lines[:3], lines[3][:-9], *lines[4:]], 4),
        (lambda lines: [*lines[:3], lines[3] + " ", *lines[4:]], 4),
        (lambda lines: [*lines[:3], edited(lines[3], note="x"), *lines[4:]], 4),
        (lambda lines: lines[1:], 1),
        (lambda lines: [*lines[:-1], edited(lines[-1], steps=0)], 7),
    ],
    ids=["fewer", "noise", "delta", "unit", "reordered", "removed", "repeated", "replayed", "blank", "cut", "spaced",
         "extra", "no header", "last"],
)  # fmt: skip
def test_tampering_is_found_and_its_line_named(written, tamper, number):
    written.write_text("\n".join(tamper(lines_of(written))) + "\n")
    for attempt in (lambda: Ledger.read(written), lambda: Ledger.resume(written, PLAN)):
        with pytest.raises(PrivacyError, match=rf"ledger\.jsonl, line {number}:"):
            attempt()


def test_lines_rewritten_with_right_hashes_but_wrong_numbers_are_found(path):
    """Who can compute the chain still cannot leave steps out or change the plan's costs."""
    with Ledger(PLAN, path) as ledger:
        head, _ = ledger.place
    header = path.read_bytes()
    honest = {"kind": "block", **Ledger(PLAN).state.next_block()._asdict()}
    for change in (
        {"noise_multiplier": 40.0},
        {"first_step": 1},
        {"steps": 0},
        {"steps": 2},
        {"phase": "main"},
    ):
        line, _ = chain_line({**honest, **change}, head)
        path.write_bytes(header + line.encode() + b"\n")
        with pytest.raises(PrivacyError, match=r"line 2: .*does not allow"):
            Ledger.read(path)
    line, _ = chain_line(honest, head)
    path.write_bytes(header + line.encode() + b"\n")
    assert Ledger.read(path).charged == 1


def test_a_truncated_ledger_is_found_by_the_head_and_length_kept_elsewhere(path):
    with Ledger(PLAN, path) as ledger:
        spend(ledger, range(23))
        head, length = ledger.place
        spend(ledger, range(23, 60))
        ledger.state.check_extends(head, length)
    lines = lines_of(path)
    path.write_text("\n".join(lines[: length - 1]) + "\n")
    with pytest.raises(PrivacyError, match="lines were removed"):
        Ledger.read(path).check_extends(head, length)
    path.unlink()
    with Ledger(replace(PLAN, delta=2e-5), path) as other:
        spend(other, range(60))
        with pytest.raises(PrivacyError, match="rewritten"):
            other.state.check_extends(head, length)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\n", b"nonsense\nmore\n", b'torn\n{"kind":"block"}\n', b"[" * 5000]
)
def test_a_file_without_a_header_is_a_clear_error(path, content):
    path.write_bytes(content)
    with pytest.raises(PrivacyError, match="line 1: not a header"):
        Ledger.read(path)


def test_a_ledger_in_memory_enforces_the_plan_and_knows_what_it_cost():
    ledger = Ledger(PLAN)
    spend(ledger, range(41))
    assert ledger.state.events() == PLAN.events(41)
    assert (ledger.place, ledger.next_step) == ((None, 0), 41)
    for wrong in (charge_of(40), charge_of(42), replace(charge_of(41), sampling_rate=0.5)):
        with pytest.raises(PrivacyError, match=r"charged before|unpaid|the plan has"):
            ledger.charge(wrong)
    ledger.close()
    with pytest.raises(PrivacyError, match="is closed"):
        spend(ledger, [41])


def test_a_ledger_in_memory_goes_on_from_the_state_of_a_file(written):
    state = Ledger.read(written)
    ledger = Ledger(PLAN, state=state)
    assert (ledger.state.charged, ledger.next_step) == (state.charged, state.charged)
    spend(ledger, [state.charged])
    assert Ledger.read(written) == state


def _run_until(dies_at, path, released):
    """Charge, then release (one byte), step by step, until done or dead at the `dies_at`-th moment."""
    moment = die_at(dies_at - 1)
    if not path.exists():  # as a run directory is made: whole, or not at all
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        Ledger(PLAN, draft).close()
        draft.rename(path)
    ledger = Ledger.resume(path, PLAN)
    with released.open("ab", buffering=0) as out:
        for step in range(ledger.next_step, PLAN.total_steps):
            ledger.charge(charge_of(step))
            out.write(b".")
            moment()


def test_killed_at_any_moment_the_ledger_never_under_counts(path, tmp_path):
    released = tmp_path / "released"
    released.touch()
    moments = random.Random(7)
    context = multiprocessing.get_context("fork")
    seen_torn = 0
    for life in range(25):
        run = context.Process(
            target=_run_until, args=(life + 1 if life < 6 else moments.randint(4, 30), path, released)
        )
        run.start()
        run.join()
        assert run.exitcode == -signal.SIGKILL
        if path.exists():
            record = Ledger.read(path)
            seen_torn += record.torn is not None
            assert released.stat().st_size <= record.charged <= PLAN.total_steps
    assert seen_torn >= 2
    last = context.Process(target=_run_until, args=(-1, path, released))
    last.start()
    last.join()
    assert last.exitcode == 0
    assert released.stat().st_size <= Ledger.read(path).charged == PLAN.total_steps
