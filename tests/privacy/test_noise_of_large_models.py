"""Noise at the size of real models: every coordinate gets its own, whatever lies beyond powers of two or of ten."""

from __future__ import annotations

import numpy as np
import torch

from sparsedp.auditing.mechanism import KEPT, NoisePatterns
from sparsedp.clipping import FlatClip
from sparsedp.privacy.ledger import Charge, MemoryLedger
from sparsedp.privacy.mechanism import GaussianMechanism
from sparsedp.privacy.queries import ClippedVectorSum
from sparsedp.randomness import SystemRandomness

SIZE = 200_003
RISK = 1e-9


def test_every_coordinate_of_a_large_model_gets_noise_of_its_own():
    patterns, largest = NoisePatterns(SIZE), np.zeros(SIZE)
    for step in range(KEPT):
        released = GaussianMechanism(MemoryLedger(), SystemRandomness()).release(
            ClippedVectorSum(torch.zeros(1, SIZE), FlatClip(1.0)),
            Charge("main", step, 1.0, 3.0),
            expected_batch_size=1.0,
        )
        noise = released.mean.numpy() / 3
        assert abs(noise.std() - 1) < 0.012  # seven standard errors
        patterns.add(noise)
        largest = np.maximum(largest, np.abs(noise))
    assert largest.min() > 1e-3  # six normals below this: once in 10^18 coordinates
    assert patterns.problems(RISK) == []
