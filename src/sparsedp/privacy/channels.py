"""Sums of channel statistics over units, bounded unit by unit: what private normalisation releases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch, Rows
from sparsedp.core.clip import Clip
from sparsedp.errors import DataError
from sparsedp.grad_sample.query import mean_by_unit
from sparsedp.privacy.mechanism import ClippedRows

_ROWS_AT_ONCE = 16
"""Few enough for the cache in float64."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChannelSum:
    """The clipped sum over units of their channels' means, or of their spreads around a centre.

    A row of shape [channels, ...] gives one number per channel: the mean over its positions, or the root mean square
    of its distance from `centre`. A unit gives the mean over its rows, clipped once.

    **Privacy.** What a unit adds follows from its own rows and the public centre, and is clipped last: adding or
    removing one unit moves the sum by at most the clip norm.
    **Edge cases.** A unit with a number that is not finite adds zero.

    Attributes:
        batches: the units. Private.
        channels: how many the inputs have; public.
        clip: the bound on a unit's vector.
        centre: one public number per channel that is measured; None for the means.
        columns: the channels that are measured; None for all. Public.
    """

    batches: Iterable[MicroBatch]
    channels: int
    clip: Clip
    centre: Tensor | None = None
    columns: Tensor | None = None

    @property
    def size(self) -> int:
        """One number per channel that is measured."""
        return self.channels if self.columns is None else self.columns.numel()

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The sum, micro-batch by micro-batch."""
        yield torch.zeros(self.size, dtype=torch.float64)
        for batch in self.batches:
            inputs = inputs_of(batch.rows)
            if inputs.shape[1] != self.channels:
                raise DataError(f"inputs: got {inputs.shape[1]} channels, expected {self.channels}")
            inputs = inputs if self.columns is None else inputs[:, self.columns.to(inputs.device)]
            parts = torch.split(inputs, _ROWS_AT_ONCE)
            values = torch.cat([self._statistic(part.to("cpu", torch.float64)) for part in parts])
            yield from ClippedRows(mean_by_unit(values, batch.units), self.clip).parts(bound)

    def _statistic(self, inputs: Tensor) -> Tensor:
        positions = inputs.unsqueeze(2).flatten(2)
        if self.centre is None:
            return positions.mean(dim=2)
        distances = positions - self.centre.to(positions).unsqueeze(1)
        return distances.square().mean(dim=2).sqrt()


def inputs_of(rows: Rows) -> Tensor:
    """The inputs of a batch: its first tensor.

    Raises:
        DataError: the batch is not (inputs, ...), or the inputs are not real numbers of shape [rows, channels, ...].
    """
    inputs = rows[0] if isinstance(rows, (tuple, list)) and rows else rows
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.dim() < 2:
        found = (
            f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        )
        raise DataError(
            f"normalise: got inputs {found}, expected batches of (inputs, ...) with inputs of real numbers and shape "
            "[rows, channels, ...]; leave it out for other data"
        )
    return inputs
