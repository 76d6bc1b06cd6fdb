"""With the mechanism's output replaced by fixed numbers the data leave no trace, and no message tells of them."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runs import (
    FEATURES,
    ROWS,
    SETUPS,
    a_plan,
    a_trainer,
    advance,
    finished,
    fix_releases,
    loss_fn,
    sgd,
    weights,
)
from sparsedp._serialization import to_json
from sparsedp.methods import get_method, list_methods
from sparsedp.privacy import ledger
from sparsedp.randomness import PublicRandomness
from sparsedp.results import Event, StepReport
from sparsedp.training import recorder
from sparsedp.training.trainer import Trainer

CASES = {**{method.name: lambda name=method.name: {"method": name} for method in list_methods()}, **SETUPS}


@pytest.fixture
def fixed_releases(monkeypatch):
    """Nothing takes any time, and it is always the same day: what then differs is not the clock."""
    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: 7.0))
    day = SimpleNamespace(now=lambda zone: datetime(2020, 1, 2, tzinfo=zone))
    monkeypatch.setattr(ledger, "datetime", day)
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
    """Everything a run shows, every byte of its files and its report."""
    seen: list[Any] = []

    def watch(event: Event) -> None:
        if isinstance(event, StepReport):
            seen.append((event.step, event.phase, event.learning_rates, event.released.dense().tolist()))
            seen.append(event.released.support.indices.tolist())
        else:
            seen.append(to_json(event))

    made = a_trainer(**setup, data_seed=data_seed, out=out, seed=None, callbacks=[watch], ema_decay=0.9)
    result = advance(made).finish()
    result.report()
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


@pytest.mark.parametrize("case", CASES)
def test_run_with_fixed_releases_shows_no_bit_of_the_data(case, fixed_releases, tmp_path):
    one = shown(CASES[case](), 1, tmp_path / "one" / "run")
    half = len(fixed_releases)
    other = shown(CASES[case](), 2, tmp_path / "other" / "run")
    assert half >= 15
    assert len(set(fixed_releases[:half])) == half
    assert fixed_releases[:half] == fixed_releases[half:]
    for name in one:
        assert one[name] == other[name], name
    if case.startswith("table"):
        assert 0 < len(one["support"]) < len(one["weights"])


def test_run_with_real_releases_shows_the_data():
    """The test above can fail: real releases of two data sets differ, seed and all."""
    one, other = (weights(finished("on-rand", data_seed=data_seed).model) for data_seed in (1, 2))
    assert not torch.equal(one, other)


class Talkative(nn.Module):
    """Writes a line whenever it runs, as an engine that falls back does; may route an extreme example apart."""

    def __init__(self, routes: bool):
        super().__init__()
        self.routes = routes
        self.experts = nn.ModuleList([nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)])
        self.quiet = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.quiet:
            logging.getLogger("sparsedp").warning("a line about %d rows", len(x))
            warnings.warn("a warning about rows", UserWarning, stacklevel=1)
        if not self.routes:
            return self.experts[0](x)
        second = x[:, 0] > 50
        out = x.new_zeros(len(x), 3)
        out[~second] = self.experts[0](x[~second])
        out[second] = self.experts[1](x[second])
        return out


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """All log records of all loggers at any level, and all warnings."""
    with caplog.at_level(1), caplog.at_level(1, "sparsedp"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield lambda: [*caplog.messages, *(str(one.message) for one in warned)]


@pytest.mark.parametrize("routes", [False, True])
@pytest.mark.parametrize("engine", ["bookkeeping", "reference"])
def test_nothing_is_said_while_private_data_are_summed(engine, routes, messages):
    """Five steps over half of the rows; the checks before them may say what they like."""
    x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(3))
    x[7, 0] = 100.0
    model, data = Talkative(routes), TensorDataset(x, torch.arange(ROWS) % 3)
    plan = a_plan(get_method("dp-sgd"), batch_size=30)
    trainer = Trainer(model, data, loss_fn, plan=plan, optimizer=sgd, seed=1, engine=engine)
    before = messages()
    model.quiet = False
    advance(trainer, 5)
    assert messages() == before
