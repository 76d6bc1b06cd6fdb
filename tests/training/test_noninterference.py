"""Design section 2, lock 4: with the mechanism's output replaced by fixed numbers, the data leaves no trace.

Two data sets of the same size, the same evaluation set: weights, supports, metrics, record, checkpoint and what
callbacks see are identical to the bit. A method registered tomorrow is enrolled by being registered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runs import a_trainer, advance, network, weights
from sparsedp._serialization import to_json
from sparsedp.methods import Granularity, MethodOptions, list_methods
from sparsedp.privacy import ledger, mechanism
from sparsedp.randomness import PublicRandomness
from sparsedp.results import Event, StepReport
from sparsedp.training import recorder

METHODS = [method.name for method in list_methods()]
VARIANTS = {
    "rows": ("tp-coherent", MethodOptions(granularity=Granularity.ROWS)),
    "pruned": ("adadpigu", MethodOptions(prune=True, per_sample_top=0.5)),
}


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes any time, and it is always the same day: what then differs is not the clock."""
    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: 7.0))
    monkeypatch.setattr(
        ledger, "datetime", SimpleNamespace(now=lambda zone: datetime(2020, 1, 2, tzinfo=zone))
    )


@pytest.fixture
def fixed_releases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The true mechanism runs on the data, and its sum is thrown away for numbers that know only the step."""
    looked: list[int] = []
    real = mechanism.GaussianMechanism.noisy_sum

    def fixed(self: Any, query: Any, charge: Any, **how: Any) -> tuple[torch.Tensor, float]:
        total, std = real(self, query, charge, **how)
        looked.append(charge.step)
        numbers = torch.randn(total.numel(), generator=torch.Generator().manual_seed(charge.step))
        return 3.0 * numbers.to(total), std

    monkeypatch.setattr(mechanism.GaussianMechanism, "noisy_sum", fixed)
    return looked


def content(path: Path) -> Any:
    """A file's bytes; the header of a checkpoint parsed, as its writer orders keys by chance."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def run(method: str, options: MethodOptions | None, data_seed: int, out: Path) -> dict[str, Any]:
    """Everything a run shows, and every byte of its files."""
    seen: list[Any] = []

    def watch(event: Event) -> None:
        if isinstance(event, StepReport):
            seen.append((event.step, event.phase, event.learning_rates, event.released.dense().tolist()))
            seen.append(event.released.support.indices.tolist())
        else:
            seen.append(to_json(event))

    made = a_trainer(
        method, options=options, data_seed=data_seed, out=out, seed=None, callbacks=[watch], ema_decay=0.9
    )
    result = advance(made).finish()
    return {
        "weights": weights(result.model).tolist(),
        "support": result.support.indices.tolist(),
        "supports": result.supports,
        "scores": None if result.scores is None else result.scores.tolist(),
        "history": result.history,
        "files": {path.name: content(path) for path in sorted(out.iterdir())},
        "seen": seen,
    }


@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.parametrize(
    ("method", "options"),
    [*((name, None) for name in METHODS), *VARIANTS.values()],
    ids=[*METHODS, *VARIANTS],
)
def test_two_data_sets_leave_the_same_bits(
    method: str,
    options: MethodOptions | None,
    fixed_releases: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PublicRandomness, "fresh", classmethod(lambda cls: cls(5)))
    one = run(method, options, 1, tmp_path / "one")
    other = run(method, options, 2, tmp_path / "other")
    steps = 16 if method == "fest" else 15  # its selection is a release as well
    assert fixed_releases == [*range(steps), *range(steps)]
    for name in one:
        assert one[name] == other[name], name


def test_without_the_fixed_releases_the_data_does_show(tmp_path: Path) -> None:
    """The test above can fail: real releases of two data sets differ, seed and all."""
    one, other = (
        weights(advance(a_trainer("on-rand", data_seed=data_seed, model=network())).model)
        for data_seed in (1, 2)
    )
    assert not torch.equal(one, other)
