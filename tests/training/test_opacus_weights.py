"""Moving from Opacus: one loop, the same batches and noise, and the dense path gives the same weights.

Opacus scales a sample by C/(norm + 1e-6) and we by C'/norm with C' a little below C, for rounding: Opacus is asked
for C', and every norm here is well above it, so the factors agree to 1e-6/norm.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from runs import FEATURES, loss_fn, rows, weights
from sparsedp import make_private
from sparsedp.clipping import ROUNDING_MARGIN
from sparsedp.privacy.mechanism import Grid
from sparsedp.randomness import SeededRandomness

SEED, CLIP_NORM = 4, 0.05


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 3))


class OpacusLoop:
    """The same loop, as one writes it with Opacus; its noise is given."""

    def __init__(self, make_optimizer, clip_norm: float, noise_multiplier: float, expected: float) -> None:
        opacus = pytest.importorskip("opacus")
        from opacus.optimizers import DPOptimizer

        given = self.noise = []

        class WithGivenNoise(DPOptimizer):
            def add_noise(self) -> None:
                left = given.pop()
                for p in self.params:
                    mine, left = left[: p.numel()], left[p.numel() :]
                    p.grad = p.summed_grad + mine.view_as(p).to(p)

        self.inner = a_model()
        self.model = opacus.GradSampleModule(self.inner)
        self.optimizer = WithGivenNoise(
            make_optimizer(self.inner.parameters()),
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_norm,
            expected_batch_size=expected,
        )

    def step(self, x: Tensor, y: Tensor, noise: Tensor) -> None:
        self.noise.append(noise)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in self.inner.parameters()]).norm(
            dim=0
        )
        assert float(norms.min()) > 2 * CLIP_NORM
        self.optimizer.step()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "make_optimizer",
    [lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.01)],
    ids=["sgd", "adam"],
)
def test_the_same_batches_and_noise_give_the_same_weights(make_optimizer):
    features, targets = rows(1).tensors
    data = TensorDataset(4 * features, targets)
    inner = a_model()
    private = make_private(
        inner, make_optimizer(inner.parameters()), DataLoader(data, batch_size=20), loss_fn,
        method="dp-sgd", epsilon=8.0, delta=1e-3, epochs=4, max_grad_norm=CLIP_NORM, accountant="rdp", seed=SEED,
    )  # fmt: skip
    (phase,) = private.plan.phases
    size = weights(inner).numel()
    grid = Grid.for_mechanism(CLIP_NORM, phase.noise_multiplier, size)
    theirs = OpacusLoop(make_optimizer, grid.bound / (1 + ROUNDING_MARGIN), phase.noise_multiplier, 20)
    start = weights(inner)
    assert torch.equal(weights(theirs.inner), start)
    for _ in range(4):
        for step, (x, y) in enumerate(private.loader, start=private.step):
            drawn = SeededRandomness(SEED).rounded_gaussian(grid.noise_bits, size, key=(step,))
            theirs.step(x, y, grid.dequantize(drawn))
            private.optimizer.zero_grad()
            private.criterion(private.model(x), y).backward()
            private.optimizer.step()
    moved = (weights(inner) - start).norm()
    assert float((weights(inner) - weights(theirs.inner)).norm() / moved) < 1e-4
    assert float(moved) > 0.01
