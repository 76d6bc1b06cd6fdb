"""Small runs to interrupt, resume and compare, on numbers and on texts."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from sparsedp import DataConfig, Normalised, PrivateNormalisation, RunConfig
from sparsedp.batch import from_criterion
from sparsedp.evaluation import held_out
from sparsedp.methods import Granularity, Method, build_plan, get_method
from sparsedp.methods.method import OF_THE_PLAN
from sparsedp.methods.public_scores import PublicScores
from sparsedp.methods.scores import Contributions, Given
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy import mechanism
from sparsedp.privacy.charge import Charge
from sparsedp.privacy.mechanism import Grid
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import SeededRandomness
from sparsedp.results import Result
from sparsedp.training.planning import changed_method
from sparsedp.training.trainer import Trainer

ROWS, FEATURES, CLASSES = 60, 5, 3
WORDS, WIDTH, LENGTH = 24, 3, 5
loss_fn = nn.CrossEntropyLoss(reduction="none")


def rows(seed: int, count: int = ROWS) -> TensorDataset:
    """Separable classes in a few dimensions."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(99))
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    return TensorDataset(centres[targets] + 0.5 * torch.randn(count, FEATURES, generator=generator), targets)


def network(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, CLASSES))


class Bag(nn.Module):
    """The mean of a text's word vectors, and a head. Word 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
            self.out = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens).mean(1))


def texts(seed: int, count: int = ROWS) -> TensorDataset:
    """Zipf's law: word 1 in nearly every text; some padding, some words several times."""
    rng = np.random.default_rng(seed)
    law = 1 / np.arange(1, WORDS)
    tokens = 1 + rng.choice(WORDS - 1, size=(count, LENGTH), p=law / law.sum())
    tokens[rng.random((count, LENGTH)) < 0.2] = 0
    return TensorDataset(torch.from_numpy(tokens), torch.from_numpy(rng.integers(0, 2, count)))


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def a_plan(method: Method, *, epochs: int = 5, batch_size: int = 20, unit: str = "row", **more: Any) -> Plan:
    """A plan of `3 * epochs` steps; RDP, which calibrates at once."""
    return build_plan(
        method,
        units=ROWS,
        batch_size=batch_size,
        epochs=epochs,
        epsilon=8.0,
        delta=1e-3,
        unit_name=unit,
        **{"max_grad_norm": 1.0, "accountant": "rdp", **more},
    )


def a_trainer(
    method: str = "tp-topk",
    *,
    out: Path | None = None,
    resume: bool = False,
    seed: int | None = 0,
    draw: Callable[..., TensorDataset] = rows,
    data_seed: int = 1,
    epochs: int = 5,
    model: nn.Module | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
    options: dict[str, Any] | None = None,
    plan: Plan | None = None,
    **more: Any,
) -> Trainer:
    row = get_method(method, **(options or {}))
    more.setdefault("evaluate", held_out(draw(7, 30), from_criterion(loss_fn)))
    return Trainer(
        network() if model is None else model,
        draw(data_seed),
        loss_fn,
        plan=a_plan(row, epochs=epochs) if plan is None else plan,
        optimizer=optimizer,
        run_dir=out,
        resume=resume,
        seed=seed,
        **more,
    )


def advance(trainer: Trainer, steps: int | None = None) -> Trainer:
    """Take that many steps, or all."""
    if steps == 0:
        return trainer
    for taken, batch in enumerate(trainer, start=1):
        trainer.step(batch)
        if taken == steps:
            break
    return trainer


def finished(*asked: Any, **more: Any) -> Result:
    """What `a_trainer` with these arguments gives in the end."""
    return advance(a_trainer(*asked, **more)).finish()


def weights(model: nn.Module) -> Tensor:
    return ParameterLayout.of(model).flatten(model)


def noise_of(seed: int, key: tuple[int, ...], clip: float, multiplier: float, size: int) -> np.ndarray:
    """The noise that a seeded run draws for a release."""
    grid = Grid.for_mechanism(clip, multiplier, size)
    return SeededRandomness(seed).rounded_gaussian(grid.noise_bits, size, key=key).numpy() * grid.step


def die_at(moment_of_death: int) -> Callable[[], None]:
    """Of a forked process: every write is made in two, and it is killed at that moment of a write or a flush."""
    moments = itertools.count()
    write, fsync = os.write, os.fsync

    def moment() -> None:
        if next(moments) == moment_of_death:
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
    return moment


SCORES = {"words.weight": torch.arange(float(WORDS))}
SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "rows": lambda: {"method": "tp-coherent", "options": {"granularity": Granularity.ROWS}},
    "pruned": lambda: {"method": "adadpigu", "options": {"prune": True, "per_sample_top": 0.5}},
    "table-fest": lambda: {"method": "fest", "options": {"active_ratio": 0.3}, "model": Bag(), "draw": texts},
    "table-adafest": lambda: {
        "method": "adafest",
        "options": {"ranking": Contributions(threshold=1.0, share=0.3)},
        "model": Bag(),
        "draw": texts,
    },
    "public-scores": lambda: {
        "method": "given",
        "options": {
            "active_ratio": 0.3,
            "granularity": Granularity.ROWS,
            "ranking": Given(PublicScores.of(SCORES).checksum),
        },
        "public_scores": SCORES,
        "model": Bag(),
        "draw": texts,
    },
    "normalised": lambda: {
        "plan": a_plan(get_method("tp-topk"), normalise=PrivateNormalisation(3.0, 2.0)),
        "model": Normalised(network(), FEATURES),
    },
    "private-loss": lambda: {
        "plan": a_plan(get_method("tp-topk"), private_loss=2.0),
        "model": network(dropout=0.4),
    },
}
"""Arguments of `a_trainer` for what a method's defaults do not show; the model is another one each time."""


def fix_releases(monkeypatch: Any) -> list[Charge]:
    """The true mechanism runs on the data, and its sum is thrown away for numbers that know only the charge."""
    made: list[Charge] = []
    real = mechanism.GaussianMechanism.release

    def fixed(self: Any, query: Any, charge: Charge, expected_batch_size: float = 1.0) -> mechanism.Release:
        released = real(self, query, charge, expected_batch_size=expected_batch_size)
        made.append(charge)
        generator = torch.Generator().manual_seed(2 * charge.step + charge.release)
        numbers = 3.0 * torch.randn(query.size, generator=generator).double() / expected_batch_size
        values = {
            name: getattr(released, name)
            for name in ("support", "phase", "step", "publishable", "noise_scale")
        }
        return mechanism.Release(mean=numbers, seal=mechanism._SEAL, **values)

    monkeypatch.setattr(mechanism.GaussianMechanism, "release", fixed)
    return made


OFTEN = frozenset({"dp-sgd", "tp-topk", "on-rand", "adadpigu", "fest"})
"""What a slow test tries every day, one of each kind: dense, learned once, renewed, standardized, by a count."""


def by_method(names: Iterable[str]) -> list[Any]:
    """The names, as parameters of a test; `make nightly` tries those that are not tried often."""
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.nightly) for name in names]


_DATA = ("unit_name", "rows_per_unit", "max_physical_batch", "num_workers", "collate_fn", "sharded")
_RUN = ("total_epsilon", "continue_from", "engine", "metadata")


def placed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with those of the method in `method`, and those of loading in `data`, of the run in `run`."""
    rest = dict(settings)
    changes = rest.pop("options", {}) | {
        name: rest.pop(name) for name in ("active_ratio", *OF_THE_PLAN) if name in rest
    }
    loading = {name: rest.pop(name) for name in _DATA if name in rest}
    run = {name: rest.pop(name) for name in _RUN if name in rest}
    if changes:
        rest["method"] = changed_method(rest.get("method", "auto"), **changes)
    if loading:
        rest["data"] = replace(rest.get("data", DataConfig()), **loading)
    if run:
        rest["run"] = RunConfig(**run)
    return rest
