"""`verify`: a good run passes, every kind of spoilt run fails and is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparsedp.cli import Exit
from sparsedp.privacy import Charge, Phase, Plan, plan_epsilon
from sparsedp.privacy.ledger import Ledger
from sparsedp.runs.verify import TIGHTEST, TOLERANCE, other_epsilons, verify


def test_a_good_run_is_verified_by_independent_accountants_and_explained(trained, typed):
    done = typed("verify", trained[0], "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["passed"]
    assert all(check["passed"] for check in found["checks"])
    assert found["epsilons"]["PLD (dp-accounting)"] == pytest.approx(trained[1]["epsilon_spent"], rel=0.005)
    assert found["epsilons"]["RDP (dp-accounting)"] > found["epsilons"]["PLD (dp-accounting)"]
    promised, limits = " ".join(found["guaranteed"]), " ".join(found["not_guaranteed"])
    assert "adding or removing one row" in promised
    assert "not a person or patient" in promised
    assert "not for release" in limits
    assert "outside the guarantee" in limits
    assert "Tuning" in limits


@pytest.fixture
def quick(monkeypatch):
    """Verification without the seconds that four accountants take."""
    spent = {"PLD (dp-accounting)": 2.99, "RDP (dp-accounting)": 3.3}
    monkeypatch.setattr("sparsedp.runs.verify.other_epsilons", lambda _: spent)


def test_a_corrupted_ledger_line_fails_and_is_named(run_copy, typed):
    ledger = run_copy / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    place = [number for number, line in enumerate(lines) if '"kind":"block"' in line][1]
    lines[place] = lines[place].replace('"steps":1', '"steps":0', 1)
    ledger.write_text("".join(lines))
    done = typed("verify", run_copy)
    assert done.code == Exit.MISMATCH
    assert f"ledger.jsonl, line {place + 1}" in done.out
    assert "Not verified" in done.out
    assert "Traceback" not in done.err


def edit_plan(**changes: object):
    def spoil(run: Path) -> None:
        file = run / "plan.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def drop_last_lines(run: Path) -> None:
    file = run / "ledger.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-5]))


def flip_a_byte(run: Path) -> None:
    file = run / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (edit_plan(units=10**6), "the ledger was opened for this plan"),
        (edit_plan(delta=1e-9), "delta"),
        (drop_last_lines, "the ledger goes on from where the checkpoint knew it"),
        (flip_a_byte, "the checkpoint's checksum"),
        (lambda run: (run / "ledger.jsonl").unlink(), "the ledger's hash chain"),
        (lambda run: (run / "record.json").write_text("{"), "the record can be read"),
    ],
)
def test_whatever_does_not_fit_is_named(run_copy, quick, spoil, named):
    assert verify(run_copy).passed
    spoil(run_copy)
    failed = [check.name for check in verify(run_copy).checks if not check.passed]
    assert named in failed


def test_independent_accountants_agree_on_a_published_number(tmp_path):
    """Noise 1.5, rate 0.04, 2,250 steps, delta 1e-5: RDP 7.3291, PRV 6.779, PLD 6.769 (Opacus, dp-accounting)."""

    phase = Phase(name="train", steps=2250, sampling_rate=0.04, clip_norm=1.0, noise_multiplier=1.5)
    plan = Plan(method="dp-sgd", phases=(phase,), units=1000, steps_per_epoch=25, delta=1e-5)
    with Ledger(plan, tmp_path / "ledger.jsonl") as ledger:
        for step in range(2250):
            ledger.charge(Charge("train", step, 0.04, 1.5))
    found = other_epsilons(Ledger.read(tmp_path / "ledger.jsonl"))
    assert found["RDP (dp-accounting)"] == pytest.approx(7.3291, abs=1e-3)
    assert found["PLD (dp-accounting)"] == pytest.approx(6.769, abs=5e-3)
    assert found["RDP (Opacus)"] == pytest.approx(7.3291, abs=1e-3)
    assert found["PRV (Opacus)"] == pytest.approx(6.779, abs=5e-3)


def test_the_accountant_that_verifies_agrees_at_a_small_rate(monkeypatch):
    """On the library's default grid of 1e-4 epsilon would be 0.1413, and an honest run would not verify."""
    monkeypatch.setattr("sparsedp.runs.verify._by_opacus", lambda *_: {})
    phase = Phase(name="train", steps=200_000, sampling_rate=1e-4, clip_norm=1.0, noise_multiplier=2.0)
    plan = Plan(method="dp-sgd", phases=(phase,), units=10**6, steps_per_epoch=10_000, delta=1e-8)
    state = Ledger(plan).state
    found = other_epsilons(replace(state, sealed=state.planned))
    assert found[TIGHTEST] == pytest.approx(plan_epsilon(plan), rel=TOLERANCE)
