"""Max pooling on the memory layout where PyTorch is fast on CPUs."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn


@final
class MaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` with the channels last in memory: the same numbers, ties included, and faster.

    PyTorch's kernel for the usual layout compares one number at a time; for a small CNN it is the dearest layer.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """The largest of each window."""
        usual = inputs.dim() != 4 or inputs.device.type != "cpu"
        laid_out = inputs if usual else inputs.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        pooled: Tensor = super().forward(laid_out)
        return pooled.contiguous()
