"""A finished run's model and some rows of its data, for whoever looks at it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, PerSampleLoss, per_sample_loss
from sparsedp.errors import SparseDPError
from sparsedp.randomness import PublicRandomness
from sparsedp.training.normalization import Normalised
from sparsedp_experiments.data.bundle import Split
from sparsedp_experiments.runs.execute import build_model, load_data, loss_of, moments_in
from sparsedp_experiments.runs.settings import Settings

Side = Literal["test", "train"]
_BATCH = 128
_ROWS_KEY = (3,)


@final
@dataclass(frozen=True, slots=True, eq=False)
class FinishedModel:
    """What a run was about.

    Attributes:
        model: of its architecture, weights to be loaded.
        fresh: the same as it began; drawn anew if the run had no seed.
        loss: one number per row.
        batches: rows of its data, with their units where units are protected. Private.
    """

    model: nn.Module
    fresh: nn.Module
    loss: PerSampleLoss
    batches: list[MicroBatch] = field(repr=False)


def finished_model(settings: Settings, side: Side, rows: int) -> FinishedModel:
    """The model of a run and at most `rows` rows of one side of its data, chosen by public randomness.

    Where people are protected, each of them has at most as many rows as a step would draw.

    Raises:
        SparseDPError: too few rows, or a least-squares model.
    """
    if rows < 2:
        raise SparseDPError(f"rows: got {rows}, expected at least 2")
    found = settings.resolved()
    bundle = load_data(found)
    split = {"test": bundle.test, "train": bundle.train}[side]
    units = None if found.unit == "row" else split.units
    model, fresh = (
        model_of(found, bundle.input_shape, len(bundle.classes), bundle.vocabulary) for _ in range(2)
    )
    if moments_in(model) is not None:
        raise SparseDPError(
            "least squares: got a run whose loss is linear in its weights, expected one with gradients that change "
            "as it trains: here they are the same at all weights, so there is no curvature, support or progress to "
            "measure; `sparsedp audit` and `sparsedp report` take such a run"
        )
    chosen = choose_rows(len(split), units, found.rows_per_unit, rows)
    return FinishedModel(model, fresh, per_sample_loss(loss_of(model)), _batches(split, units, chosen))


def choose_rows(count: int, units: Tensor | None, per_unit: int, most: int) -> Tensor:
    """At most `most` of `count` rows at random, at most `per_unit` of each unit; rows of a unit stand together."""
    order = PublicRandomness(0).permutation(count, _ROWS_KEY)
    if units is None:
        return order[:most]
    owner = units[order]
    by_owner = torch.sort(owner, stable=True).indices
    sorted_owner = owner[by_owner]
    starts = torch.searchsorted(sorted_owner, sorted_owner)
    place = torch.empty_like(by_owner)
    place[by_owner] = torch.arange(count) - starts
    kept = order[place < per_unit][:most]
    return kept[torch.sort(units[kept], stable=True).indices]


def model_of(
    settings: Settings, shape: tuple[int, ...], classes: int, vocabulary: int | None = None
) -> nn.Module:
    """A fresh model of a run's architecture."""
    model = build_model(
        settings.model or "", settings.model_options, shape, classes, settings.seed, vocabulary
    )
    return Normalised(model, shape[0]) if settings.normalise else model


def _batches(split: Split, units: Tensor | None, chosen: Tensor) -> list[MicroBatch]:
    """Micro-batches of whole units."""
    if units is None:
        return [MicroBatch(split.rows_at(part)) for part in torch.split(chosen, _BATCH)]
    number = torch.unique_consecutive(units[chosen], return_inverse=True)[1]
    return [
        MicroBatch(split.rows_at(chosen[inside]), number[inside] - number[inside][0])
        for first in range(0, int(number[-1]) + 1, _BATCH)
        for inside in [(number >= first) & (number < first + _BATCH)]
    ]
