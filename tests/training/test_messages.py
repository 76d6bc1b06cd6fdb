"""No message during a step depends on the data: nothing is logged or warned while private data are summed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runs import FEATURES, ROWS, a_plan, advance, loss_fn, sgd
from sparsedp.clipping import FlatClip
from sparsedp.methods import get_method
from sparsedp.privacy import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism
from sparsedp.privacy.queries import BoundedSum
from sparsedp.randomness import SystemRandomness
from sparsedp.training.trainer import Trainer

TARGET = 7


class Talkative(nn.Module):
    """Writes a line whenever it runs, as an engine that falls back does; how often depends on the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)
        self.quiet = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.quiet:
            logging.getLogger("sparsedp").warning("a line about %d rows", len(x))
            warnings.warn("a warning about rows", UserWarning, stacklevel=1)
        out: Tensor = self.layer(x)
        return out


class Routed(nn.Module):
    """Sends an example to the second expert if its first feature is large, as only the target's is."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)])

    def forward(self, x: Tensor) -> Tensor:
        second = x[:, 0] > 50
        out = x.new_zeros(len(x), 3)
        out[~second] = self.experts[0](x[~second])
        out[second] = self.experts[1](x[second])
        return out


@contextmanager
def messages() -> Iterator[list[str]]:
    """All log records of all loggers at any level, and all warnings."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    loggers = [logging.getLogger(), logging.getLogger("sparsedp")]
    before = [one.level for one in loggers]
    handler = Keep()
    loggers[0].addHandler(handler)
    for one in loggers:
        one.setLevel(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: found.append(str(message))
            yield found
    finally:
        loggers[0].removeHandler(handler)
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)


def said(model: nn.Module, *, target: bool, engine: str = "bookkeeping") -> list[str]:
    """What is said in five steps over half of the rows; the checks before them may say what they like."""
    x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(3))
    if target:
        x[TARGET, 0] = 100.0
    data = TensorDataset(x, torch.arange(ROWS) % 3)
    plan = a_plan(get_method("dp-sgd"), batch_size=30)
    trainer = Trainer(model, data, loss_fn, plan=plan, optimizer=sgd, seed=1, engine=engine)
    with messages() as found:
        if isinstance(model, Talkative):
            model.quiet = False
        advance(trainer, 5)
    return found


@pytest.mark.parametrize("engine", ["bookkeeping", "reference"])
@pytest.mark.parametrize("target", [False, True])
def test_nothing_is_said_while_private_data_are_summed(engine: str, target: bool) -> None:
    assert said(Talkative(), target=target, engine=engine) == []


def test_a_layer_that_only_a_target_reaches_is_not_spoken_of() -> None:
    assert said(Routed(), target=False) == said(Routed(), target=True) == []


class Chatty(BoundedSum):
    """A bounded sum that logs and warns."""

    size, clip = 3, FlatClip(1.0)

    def partial_sums(self, bound: float) -> Iterator[Tensor]:
        logging.getLogger("sparsedp").error("62 rows for 63 samples")
        warnings.warn("62 rows for 63 samples", UserWarning, stacklevel=1)
        yield torch.zeros(3, dtype=torch.float64)


def test_every_release_is_silent_and_the_log_works_again_afterwards() -> None:
    query = Chatty()
    with messages() as found:
        GaussianMechanism(ChargeLog(), SystemRandomness()).release(query, Charge("train", 0, 1.0, 1.0))
        assert found == []
        list(query.partial_sums(1.0))
    assert found == ["62 rows for 63 samples"] * 2
