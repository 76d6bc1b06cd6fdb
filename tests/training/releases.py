"""Releases with chosen values, made by the real mechanism from an engine that returns what it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch
from sparsedp.clipping import NoClip
from sparsedp.grad_sample.query import ClippedSumQuery
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.ledger import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism, Release
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import SeededRandomness


@dataclass(frozen=True)
class FixedSum:
    layout: ParameterLayout
    total: Tensor

    def clipped_sum(self, batches: Iterable[MicroBatch], query: ClippedSumQuery) -> Tensor:
        return query.support.gather(self.total.to(torch.float64))


def release(layout: ParameterLayout, support: Support, gradient: Tensor, step: int = 0) -> Release:
    """A release of exactly `gradient` on the support."""
    return GaussianMechanism(ChargeLog(), SeededRandomness(0)).release(
        GradientSum(FixedSum(layout, gradient), [], ClippedSumQuery(support, NoClip())),
        Charge("train", step, 0.1, 0.0),
        expected_batch_size=1.0,
    )
