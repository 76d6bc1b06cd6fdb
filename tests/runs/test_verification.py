"""`sparsedp.verify`: every field of every file is computed again, bound by the ledger's chain, or named."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sparsedp
from runs import a_trainer, advance
from sparsedp._files import readable_json
from sparsedp._serialization import canonical
from sparsedp.errors import DataError, PrivacyError
from sparsedp.privacy import Charge, Phase, Plan, plan_epsilon
from sparsedp.privacy.ledger import Ledger, chain_line
from sparsedp.runs.checkpoint import checkpoint_bytes, read_checkpoint
from sparsedp.runs.directory import digest_of
from sparsedp.runs.record import RunRecord
from sparsedp.runs.run import Run
from sparsedp.runs.verify import TIGHTEST, TOLERANCE, UNCHECKED, Verification, other_epsilons, verify

FILES = ("plan.json", "ledger.jsonl", "checkpoint.safetensors", "metrics.jsonl", "record.json")
SCRAPS = (
    b"\xff", b"\x00", b"\n", b" ", b"0", b"9", b"-", b"e9", b"1e999", b"NaN", b"Infinity", b"[]", b"{}", b"null",
    b"true", b"false", b'"', b",", b'"epsilon":0.1,', b'"epsilon": 0.1,', b"[" * 5000, b'{"a":' * 3000, b"\\ud800",
    b'"format":1,', b'"status": "running",', b"9" * 5000,
)  # fmt: skip


def edited(content: bytes, chance: random.Random) -> bytes:
    """A file after one edit: bytes cut, doubled, replaced or put in; a digit or letter another, as by hand."""
    start = chance.randrange(len(content) + 1)
    stop = min(len(content), start + chance.choice((0, 1, 1, 2, 5, 40)))
    before, piece, after = content[:start], content[start:stop], content[stop:]
    places = [i for i, byte in enumerate(content) if chr(byte).isalnum()] or [0]
    place, other_byte = chance.choice(places), bytes([chance.choice(b"0123456789abcxyz")])
    return chance.choice(
        (
            before,
            before + after,
            before + piece + piece + after,
            before + bytes(chance.randrange(256) for _ in piece) + after,
            before + chance.choice(SCRAPS) + after,
            before + chance.choice(SCRAPS) + after[1:],
            content[:place] + other_byte + content[place + 1 :],
        )
    )


def claims(path: Path) -> Any:
    """Everything a run's files say, as values that compare; but for the timing, which verify names."""
    run = Run.open(path)
    record = {name: value for name, value in run.record.items() if name != "timing"}
    return (run.plan, run.ledger, record, run.epochs, checkpoint_bytes(run.checkpoint))


pytestmark = pytest.mark.usefixtures("checked_once")

FIELDS = [name for name in RunRecord.__annotations__ if name != "timing"]
BOUND_ALONE = {"dataset", "model", "variant", "schema", "checksum", "config", "versions"}


def quick(path: Path) -> Verification:
    return verify(path, independent=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    advance(a_trainer(out=out, seed=None)).finish()
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if value is None:
        return "1"
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value / 2 if isinstance(value, float) else value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return value[:-1]
    key = next(iter(value))
    return {**value, key: other(value[key])}


def rewrite(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = run / "record.json"
    file.write_bytes(readable_json(change(json.loads(file.read_text()))))


def chain_again(run: Path, file: str) -> None:
    """What a forger would do next: put the edited file's digest into the ledger's last line about it, and re-hash."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    place = max(i for i, line in enumerate(lines) if file in line.get("sha256", ()))
    lines[place]["sha256"][file] = digest_of(file, (run / file).read_bytes())
    text, head = [], ""
    for line in lines:
        sealed, head = chain_line({key: value for key, value in line.items() if key != "hash"}, head)
        text.append(sealed + "\n")
    (run / "ledger.jsonl").write_text("".join(text))


@pytest.mark.parametrize("seed", [0, pytest.param(None, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("method", ["tp-topk", "on-rand"])
def test_a_run_verifies_at_every_moment(tmp_path: Path, method: str, seed: int | None) -> None:
    out = tmp_path / "run"
    trainer = a_trainer(method, out=out, seed=seed)
    assert quick(out).reasons == ()
    for _ in range(3):
        advance(trainer, 2)
        assert quick(out).reasons == ()
    trainer.pause()
    assert quick(out).reasons == ()
    trainer = a_trainer(method, out=out, seed=seed, resume=True)
    assert quick(out).reasons == ()
    advance(trainer, 1).close()
    assert quick(out).reasons == ()
    advance(a_trainer(method, out=out, seed=seed, resume=True)).finish()
    found = sparsedp.verify(out)
    assert found.reasons == ()
    assert found.unchecked == UNCHECKED


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_of_the_record_can_be_changed(run: Path, name: str) -> None:
    assert set(Run.open(run).record) == {*FIELDS, "timing"}
    rewrite(run, lambda record: {**record, name: other(record[name])})
    assert not quick(run).passed
    if name in BOUND_ALONE:
        return
    chain_again(run, "record.json")
    assert not quick(run).passed


def test_the_chain_made_anew_is_a_chain_and_timing_is_not_in_it(run: Path) -> None:
    """The forger above does all that can be done without touching a claim that is computed again."""
    rewrite(run, lambda record: {**record, "dataset": "another"})
    assert not quick(run).passed
    chain_again(run, "record.json")
    rewrite(run, lambda record: {**record, "timing": {"seconds": 123.0}})
    assert quick(run).passed
    assert "timing" in " ".join(quick(run).unchecked)


def test_a_headline_epsilon_is_computed_again(run: Path) -> None:
    rewrite(run, lambda record: {**record, "epsilon": 0.1})
    assert any(reason.startswith("the record's epsilon:") for reason in quick(run).reasons)


def test_calling_a_run_running_switches_nothing_off(run: Path) -> None:
    rewrite(run, lambda record: {**record, "status": "running", "epsilon": 0.1})
    chain_again(run, "record.json")
    assert any("it says running" in reason for reason in quick(run).reasons)


@pytest.mark.parametrize(
    "name", ["epoch", "step", "phase", "epsilon", "active", "active_ratio", "learning_rate", "metrics"]
)
def test_no_field_of_the_metrics_can_be_changed(run: Path, name: str) -> None:
    file = run / "metrics.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    line = json.loads(first)
    file.write_text(json.dumps({**line, name: other(line[name])}) + "\n" + "".join(rest))
    assert not quick(run).passed
    chain_again(run, "metrics.jsonl")
    assert not quick(run).passed  # the checkpoint has the same lines


def test_weights_belong_to_the_chain_and_changed_ones_are_not_resumed(run: Path) -> None:
    file = run / "checkpoint.safetensors"
    saved = read_checkpoint(file)
    model = {name: value + 1 for name, value in saved.state["model"].items()}
    file.write_bytes(checkpoint_bytes(replace(saved, state={**saved.state, "model": model})))
    assert not quick(run).passed
    with pytest.raises(PrivacyError, match="not the one the ledger knows"):
        a_trainer(out=run, seed=None, resume=True)


def test_spaces_and_another_order_of_keys_are_refused(run: Path) -> None:
    file = run / "record.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    assert any(reason.startswith("record.json is in canonical form") for reason in quick(run).reasons)
    file = run / "plan.json"
    file.write_text(file.read_text().replace('{"accountant"', '{"units":1,"accountant"', 1))
    with pytest.raises(DataError, match="twice"):
        assert Run.open(run).plan


def test_a_file_that_nothing_binds_is_named(run: Path) -> None:
    (run / "notes.txt").write_text("hello")
    found = quick(run)
    assert found.passed
    assert found.unchecked == (*UNCHECKED, "notes.txt")


def test_an_older_checkpoint_put_back_is_found(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trainer = advance(a_trainer(out=out), 4)
    shutil.copy(out / "checkpoint.safetensors", tmp_path / "old")
    advance(trainer, 4).pause()
    shutil.copy(tmp_path / "old", out / "checkpoint.safetensors")
    assert any("checkpoint.safetensors is as the run wrote it" in reason for reason in quick(out).reasons)


def test_a_run_of_an_older_format_is_refused_by_name(run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(canonical({**plan, "format": 1}) + "\n")
    rewrite(run, lambda record: {**record, "format": 0})
    reasons = " ".join(quick(run).reasons)
    assert "plan format: got 1" in reasons
    assert "got format 0, expected 1" in reasons


def test_an_edit_that_is_accepted_changes_no_claim_and_none_gives_a_traceback(run: Path) -> None:
    chance, original, refused = random.Random(5), claims(run), 0
    for _ in range(300):
        file = run / chance.choice(FILES)
        content = file.read_bytes()
        file.write_bytes(edited(content, chance))
        found = quick(run)
        refused += not found.passed
        assert not found.passed or claims(run) == original
        json.dumps([found.reasons, found.unchecked])
        file.write_bytes(content)
    assert refused > 250


def test_independent_accountants_agree_on_a_published_number(tmp_path: Path) -> None:
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


def test_the_accountant_that_verifies_agrees_at_a_small_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the library's default grid of 1e-4 epsilon would be 0.1413, and an honest run would not verify."""
    monkeypatch.setattr("sparsedp.runs.verify._by_opacus", lambda *_: {})
    phase = Phase(name="train", steps=200_000, sampling_rate=1e-4, clip_norm=1.0, noise_multiplier=2.0)
    plan = Plan(method="dp-sgd", phases=(phase,), units=10**6, steps_per_epoch=10_000, delta=1e-8)
    state = Ledger(plan).state
    found = other_epsilons(replace(state, sealed=state.planned))
    assert found[TIGHTEST] == pytest.approx(plan_epsilon(plan), rel=TOLERANCE)
