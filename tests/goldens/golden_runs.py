"""Small seeded runs of every method and of everything else that fit takes, and what they gave, as digests."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sparsedp
from runs import placed
from sparsedp.methods.scores import Contributions
from sparsedp.privacy.calibration import NominalSplit

CLOSE = 1e-5

"""How far a sketch may lie off, relative to the norm of the weights. Another engine's rounding moves it by 1e-8,
another seed by 4e-3, five percent more budget by 3e-4."""


def arithmetic() -> str:
    """The digest of a few sums whose last bits depend on processor and libraries."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.rand(32, 3, 11, 11, generator=generator), torch.rand(7, 3, 3, 3, generator=generator)
    convolved = torch.nn.functional.conv2d(x, w)
    flat = convolved.flatten(1)
    parts = (convolved, flat @ flat.T, flat.sum(0), flat.softmax(1).log(), flat.double().cos())
    return _digest([torch.__version__, np.__version__, *(_bytes(part) for part in parts)])


def content(
    result: sparsedp.Result, out: Path | None, supports: Sequence[Tensor] | None = None
) -> dict[str, Any]:
    """What a run gave, by quantity. The supports of single steps are seen by an uninterrupted run alone."""
    spans = [
        [span.step, span.active, [span.by_parameter[n] for n in sorted(span.by_parameter)]]
        for span in result.supports
    ]
    found: dict[str, Any] = {
        "weights": _digest([_bytes(value) for value in result.model.state_dict().values()]),
        "sketch": sketch(result.model),
        "support": _digest([_bytes(result.support.indices), spans]),
        "metrics": _digest([_history(result), _values(result.metrics), _rounded(result.epsilon)]),
    }
    if out is not None:
        found["ledger"] = _digest(charges(out))
    if supports is not None:
        found["supports by step"] = _digest([_bytes(support) for support in supports])
    return found


def sketch(model: nn.Module) -> list[float]:
    """The norm of all weights, and their products with four waves of that norm."""
    flat = torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])
    places = torch.arange(len(flat), dtype=torch.float64)
    waves = [torch.cos(places * frequency) for frequency in (0.31, 0.97, 1.71, 2.63)]
    return [float(flat.norm()), *(float(flat @ wave / wave.norm()) for wave in waves)]


def sketches_agree(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two sketches are of the same weights, up to rounding."""
    return all(abs(a - b) <= CLOSE * max(second[0], 1e-6) for a, b in zip(first, second, strict=True))


def charges(out: Path) -> list[list[object]]:
    """What every step cost: the ledger's content, however it is cut into blocks."""
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    blocks = [line for line in lines if line["kind"] == "block"]
    phases = list(dict.fromkeys(block["phase"] for block in blocks))
    return [
        [phases.index(block["phase"]), step, block["sampling_rate"], block["noise_multiplier"]]
        for block in blocks
        for step in range(block["first_step"], block["first_step"] + block["steps"])
    ]


def _history(result: sparsedp.Result) -> list[list[object]]:
    phases = list(dict.fromkeys(epoch.phase for epoch in result.history))
    return [
        [
            one.epoch, one.step, phases.index(one.phase), _rounded(one.epsilon), one.active, one.learning_rate,
            _values(one.metrics),
        ]
        for one in result.history
    ]  # fmt: skip


def _values(metrics: Mapping[str, float | None]) -> list[float | None]:
    """In the order of their names, without the counts of bytes that a network adds."""
    return [metrics[name] for name in sorted(metrics) if "bytes" not in name]


def _rounded(epsilon: float | None) -> str:
    """Nine digits: the accountants' own last digits are not a run's behaviour."""
    return "none" if epsilon is None or not math.isfinite(epsilon) else f"{epsilon:.9g}"


def _bytes(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    return f"{plain.dtype} {list(plain.shape)} {plain.numpy().tobytes().hex()}"


def _digest(value: Mapping[str, Any] | list[Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


MODELS = ("linear", "cnn")

BY_ROWS = ("adafest", "fest", "given")

"""Methods that also run on a table of rows: on the other models some of them have nothing to choose."""

_ROWS, _HELD_OUT, _STOP_AFTER = 192, 64, 5


def cases() -> dict[str, dict[str, Any]]:
    """What `run` is given, by name: every method on every model, some on the table, and every feature of `fit`."""
    methods = [(method.name, model) for method in sparsedp.list_methods() for model in MODELS]
    methods += [(method, "table") for method in BY_ROWS]
    found = {f"{method}, {model}": _of_method(method, model) for method, model in methods}
    features = {f"{how}: {method}": {"method": method, **more} for how, method, more in _FEATURES}
    assert len(features) == len(_FEATURES)
    return found | features


def run(out: Path, asked: Mapping[str, Any], *, interrupted: bool = False) -> dict[str, Any]:
    """What a run gave, by quantity; `interrupted` stops it on the way and resumes it."""
    if interrupted:
        try:
            _fit(out, asked, _stop)
        except _StopError:
            result, _ = _fit(out, {**asked, "resume": True})
            return content(result, out)
        raise AssertionError("the run ended before it was stopped")
    result, supports = _fit(out, asked)
    return content(result, out, supports)


class _StopError(Exception):
    pass


def _stop(event: object) -> None:
    if isinstance(event, sparsedp.StepReport) and event.step == _STOP_AFTER:
        raise _StopError


def _fit(out: Path, asked: Mapping[str, Any], watch: Any = None) -> tuple[sparsedp.Result, list[Tensor]]:
    supports: list[Tensor] = []

    def note(event: object) -> None:
        if isinstance(event, sparsedp.StepReport):
            supports.append(event.released.support.indices.clone())

    torch.manual_seed(3)
    train, test = digits(flat=asked.get("model") == "flat")
    usual = {
        "epsilon": 2.0, "delta": 1e-3, "accountant": "rdp", "epochs": 3, "batch_size": 48, "lr": 0.5, "seed": 7,
        "progress": False, "eval_dataset": test, "run_dir": out,
        "callbacks": (note,) if watch is None else (note, watch),
    }  # fmt: skip
    given = {name: value for name, value in {**usual, **asked}.items() if value is not None}
    network = _MODELS[given.pop("model", "linear")]()
    return sparsedp.fit(network, train, nn.CrossEntropyLoss(reduction="none"), **placed(given)), supports


def _of_method(method: str, model: str) -> dict[str, Any]:
    options = {"adafest": {"ranking": Contributions(1.0, 0.3)}, "given": {"active_ratio": 0.3}}
    asked = {"method": method, "model": model}
    return asked | {"options": options[method]} if model == "table" and method in options else asked


_adam = partial(torch.optim.Adam, lr=0.02)
_adamw = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, amsgrad=True)
_nesterov = partial(torch.optim.SGD, lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.01)
_rmsprop = partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True)


def _one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.6, total_steps=steps)


def _falling(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(1, steps // 4), gamma=0.5)


PATIENTS = {"unit_ids": torch.arange(_ROWS) % 70, "unit_name": "patient", "batch_size": 20}

TWO_RELEASES = sparsedp.PrivateNormalisation(noise_multiplier=3.0, clip_norm=2.0)

_ONE_RELEASE = sparsedp.PrivateNormalisation(
    noise_multiplier=3.0, clip_norm=2.0, centre=False, columns=tuple(range(1, 60, 2))
)

_FEATURES: list[tuple[str, str, dict[str, Any]]] = [
    ("pld", "dp-sgd", {"accountant": "pld"}),
    ("pld", "tp-topk", {"accountant": "pld"}),
    ("pld", "adadpigu", {"accountant": "pld"}),
    ("classic rdp", "tp-topk", {"accountant": "rdp-classic"}),
    ("nominal split", "tp-topk", {"split": NominalSplit(0.3)}),
    ("two clip norms", "tp-topk", {"max_grad_norm": (1.0, 0.4)}),
    ("units of one row", "dp-sgd", PATIENTS),
    ("units of one row", "tp-topk", PATIENTS),
    ("units of three rows", "dp-sgd", {**PATIENTS, "rows_per_unit": 3}),
    ("units of three rows", "adadpigu", {**PATIENTS, "rows_per_unit": 3, "model": "cnn"}),
    (
        "units of three rows, seven at once",
        "tp-topk",
        {**PATIENTS, "rows_per_unit": 3, "max_physical_batch": 7},
    ),
    ("seven rows at once", "on-rand", {"max_physical_batch": 7, "model": "cnn"}),
    ("reference", "tp-topk", {"engine": "reference", "model": "cnn"}),
    ("adam", "dp-sgd", {"optimizer": _adam, "lr": None}),
    ("adam", "tp-topk", {"optimizer": _adam, "lr": None, "model": "cnn"}),
    ("adam", "on-rand", {"optimizer": _adam, "lr": None}),
    ("adamw", "adadpigu", {"optimizer": _adamw, "lr": None}),
    ("nesterov", "tp-topk", {"optimizer": _nesterov, "lr": None}),
    ("nesterov", "on-topk", {"optimizer": _nesterov, "lr": None}),
    ("rmsprop", "tp-rand", {"optimizer": _rmsprop, "lr": None}),
    ("average", "dp-sgd", {"ema_decay": 0.9}),
    ("average", "tp-topk", {"ema_decay": 0.9, "model": "cnn"}),
    ("average", "on-rand", {"ema_decay": 0.9}),
    ("one cycle", "dp-sgd", {"lr_scheduler": _one_cycle}),
    ("one cycle", "tp-topk", {"lr_scheduler": _one_cycle, "optimizer": _adam, "lr": None}),
    ("falling rate", "on-rand", {"lr_scheduler": _falling}),
    ("normalised", "dp-sgd", {"model": "flat", "normalise": TWO_RELEASES, "epsilon": 6.0}),
    ("normalised", "tp-topk", {"model": "flat", "normalise": _ONE_RELEASE, "epsilon": 6.0}),
    ("normalised units", "tp-topk", {**PATIENTS, "normalise": TWO_RELEASES, "epsilon": 6.0}),
]


def _linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    first = [nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 10))


class _Table(nn.Module):
    """A row for every grey level of every pixel; their mean, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64 * 17, 4)
        self.out = nn.Linear(4, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        levels = (pictures.flatten(1) * 16).round().long()
        return self.out(self.rows(levels + 17 * torch.arange(64)).mean(1))


_MODELS = {"linear": _linear, "flat": _linear, "cnn": _cnn, "table": _Table}


def digits(*, flat: bool = False) -> tuple[TensorDataset, TensorDataset]:
    """Scikit-learn's, some to train on and some held out; `flat` has a feature for each pixel."""
    pictures, labels = load_digits(return_X_y=True)
    x = torch.tensor(pictures, dtype=torch.float32).reshape((-1, 64) if flat else (-1, 1, 8, 8)) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    end = _ROWS + _HELD_OUT
    return TensorDataset(x[:_ROWS], y[:_ROWS]), TensorDataset(x[_ROWS:end], y[_ROWS:end])
