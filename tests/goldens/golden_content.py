"""What a run gave, as digests by quantity, and a sketch of its weights that rounding does not move.

Nothing here holds a name that may change: phases are numbered in their order, metrics are values in the order of
their names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sparsedp

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
        "weights": weights_digest(result.model),
        "sketch": sketch(result.model),
        "support": _digest([_bytes(result.support.indices), spans]),
        "metrics": _digest([_history(result), _values(result.metrics), _rounded(result.epsilon)]),
    }
    if out is not None:
        found["ledger"] = _digest(charges(out))
    if supports is not None:
        found["supports by step"] = _digest([_bytes(support) for support in supports])
    return found


def weights_digest(model: nn.Module) -> str:
    """The digest of every tensor of the model's state."""
    return _digest({name: _bytes(value) for name, value in sorted(model.state_dict().items())})


def sketch(model: nn.Module) -> list[float]:
    """The norm of all weights, and their products with four waves of that norm."""
    state = [value.detach().double().flatten() for _, value in sorted(model.state_dict().items())]
    flat = torch.cat(state)
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
            epoch.epoch,
            epoch.step,
            phases.index(epoch.phase),
            _rounded(epoch.epsilon),
            epoch.active,
            epoch.learning_rate,
            _values(epoch.metrics),
        ]
        for epoch in result.history
    ]


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
