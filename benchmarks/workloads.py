"""The five models of the benchmark, each with one fixed batch of made-up data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table_workloads import TableWorkload
from benchmarks.transformer import transformer
from sparsedp.batch import Batch
from sparsedp_experiments.models import dp_cnn, mnist_cnn, scatter_cnn, scatter_linear
from sparsedp_experiments.models.ids import VOCABULARY

SEED = 20250101


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its input shape and the batch size of one step."""

    build: Callable[[tuple[int, ...], int], nn.Module]
    input_shape: tuple[int, ...]
    classes: int
    batch_size: int
    tokens: bool = False
    momentum: float = 0.9

    def model(self) -> nn.Module:
        """The model, with the same initial values in every process."""
        torch.manual_seed(SEED)
        return self.build(self.input_shape, self.classes)

    def batch(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same in every process; token id 0 is padding and does not occur."""
        rows = rows or self.batch_size
        generator = torch.Generator().manual_seed(SEED)
        shape = (rows, *self.input_shape)
        if self.tokens:
            inputs = torch.randint(1, VOCABULARY, shape, generator=generator)
        else:
            inputs = torch.randn(shape, generator=generator)
        return inputs, torch.randint(0, self.classes, (rows,), generator=generator)


WORKLOADS = {
    "mnist-cnn": Workload(mnist_cnn, (1, 28, 28), classes=10, batch_size=1024),
    "scatter-linear": Workload(scatter_linear, (3969,), classes=10, batch_size=4096),
    "scatter-cnn": Workload(scatter_cnn, (243, 8, 8), classes=10, batch_size=1024),
    "dp-cnn": Workload(dp_cnn, (3, 32, 32), classes=10, batch_size=256),
    "transformer": Workload(transformer, (64,), classes=2, batch_size=128, tokens=True),
}


def workload_of(name: str) -> Workload | TableWorkload:
    """A model of one of the benchmarks by its name, or an embedding table."""
    from benchmarks.model_workloads import MODELS

    return TableWorkload.named(name) if name.startswith("table:") else (WORKLOADS | MODELS)[name]


def per_sample_loss(model: Callable[..., Tensor], rows: Batch) -> Tensor:
    """Cross entropy, one number per row."""
    inputs, targets = rows
    return F.cross_entropy(model(inputs), targets, reduction="none")
