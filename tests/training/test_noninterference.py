"""Design section 2, lock 4: with the mechanism's output replaced by fixed numbers, the data leaves no trace.

Two data sets of the same size, the same evaluation set: weights, supports, metrics, record, checkpoint and what
callbacks see are identical to the bit. A method registered tomorrow is enrolled by being registered.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runs import SETUPS, a_trainer, advance, finished, fix_releases, weights
from sparsedp._serialization import to_json
from sparsedp.methods import list_methods
from sparsedp.privacy import Charge, ledger
from sparsedp.randomness import PublicRandomness
from sparsedp.results import Event, StepReport
from sparsedp.training import recorder

METHODS = [method.name for method in list_methods()]
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda name=name: {"method": name} for name in METHODS},
    **SETUPS,
}


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes any time, and it is always the same day: what then differs is not the clock."""
    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: 7.0))
    monkeypatch.setattr(
        ledger, "datetime", SimpleNamespace(now=lambda zone: datetime(2020, 1, 2, tzinfo=zone))
    )


@pytest.fixture
def fixed_releases(monkeypatch: pytest.MonkeyPatch) -> list[Charge]:
    monkeypatch.setattr(PublicRandomness, "fresh", classmethod(lambda cls: cls(5)))
    return fix_releases(monkeypatch)


def content(path: Path) -> Any:
    """A file's bytes; the header of a checkpoint parsed, as its writer orders keys by chance."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def shown(setup: dict[str, Any], data_seed: int, out: Path) -> dict[str, Any]:
    """Everything a run shows, and every byte of its files."""
    seen: list[Any] = []

    def watch(event: Event) -> None:
        if isinstance(event, StepReport):
            seen.append((event.step, event.phase, event.learning_rates, event.released.dense().tolist()))
            seen.append(event.released.support.indices.tolist())
        else:
            seen.append(to_json(event))

    made = a_trainer(**setup, data_seed=data_seed, out=out, seed=None, callbacks=[watch], ema_decay=0.9)
    result = advance(made).finish()
    return {
        "weights": weights(result.model).tolist(),
        "buffers": {name: value.tolist() for name, value in result.model.named_buffers()},
        "support": result.support.indices.tolist(),
        "supports": result.supports,
        "scores": None if result.scores is None else result.scores.tolist(),
        "history": result.history,
        "files": {path.name: content(path) for path in sorted(out.iterdir())},
        "seen": seen,
    }


@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.parametrize("case", CASES)
def test_run_with_fixed_releases_shows_no_bit_of_the_data(
    case: str, fixed_releases: list[Charge], tmp_path: Path
) -> None:
    one = shown(CASES[case](), 1, tmp_path / "one")
    half = len(fixed_releases)
    other = shown(CASES[case](), 2, tmp_path / "other")
    assert half >= 15
    assert len(set(fixed_releases[:half])) == half
    assert fixed_releases[:half] == fixed_releases[half:]
    for name in one:
        assert one[name] == other[name], name
    if case.startswith("table"):
        assert 0 < len(one["support"]) < len(one["weights"])


def test_run_with_real_releases_shows_the_data() -> None:
    """The test above can fail: real releases of two data sets differ, seed and all."""
    one, other = (weights(finished("on-rand", data_seed=data_seed).model) for data_seed in (1, 2))
    assert not torch.equal(one, other)
