"""One small model for every layer the engines must get right, and the supports and geometries to try on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.clipping import Geometry, Identity, Standardized
from sparsedp.parameters import ParameterLayout, Support

SAMPLES = 6


def loss(model: Callable[[Tensor], Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with no symmetry: every output matters, each sample by another amount."""
    inputs, targets = rows
    outputs = model(inputs).flatten(1)
    weights = torch.linspace(0.5, 1.5, outputs.shape[1], dtype=outputs.dtype)
    return (weights * torch.sin(outputs)).sum(1) * targets.to(outputs.dtype)


@dataclass(frozen=True)
class Case:
    """A model and the shape of one input; integers below `tokens` where that is given."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int | None = None

    def make(
        self, dtype: torch.dtype, samples: int = SAMPLES, seed: int = 0
    ) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        torch.manual_seed(seed)
        model = self.build().to(dtype)
        with torch.no_grad():
            for p in model.parameters():  # norms start at ones and zeros, which hides mistakes
                p.add_(0.3 * torch.randn_like(p))
        if self.tokens is None:
            inputs = torch.randn(samples, *self.shape).to(dtype)
        else:
            inputs = torch.randint(0, self.tokens, (samples, *self.shape))
        return model, (inputs, torch.linspace(0.2, 2.0, samples).to(dtype))


class OwnParameter(nn.Module):
    """A module of the user's own, with a child used in an unusual way."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.inner(x).tanh() + x @ self.inner.weight.T.cos()


class DoubledLinear(nn.Linear):
    """A subclass that computes something else than its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + x.sum(-1, keepdim=True) * self.weight[:, 0]


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention.batch_first:
            return self.attention(x, x, x, need_weights=False)[0]
        x = x.transpose(0, 1)
        return self.attention(x, x, x, need_weights=False)[0].transpose(0, 1)


class Recurrent(nn.Module):
    """Uses the outputs along the sequence, or the final state, whose first axis is not the samples."""

    def __init__(self, kind: type[nn.RNNBase], final_state: bool) -> None:
        super().__init__()
        self.cell = kind(3, 4, batch_first=True)
        self.final_state = final_state

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.cell(x)
        hidden = state[0] if isinstance(state, tuple) else state
        return hidden.transpose(0, 1) if self.final_state else outputs


class WeightedBag(nn.Module):
    """A bag whose weights are computed from its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, mode="sum", padding_idx=2)

    def forward(self, ids: Tensor) -> Tensor:
        weights = (1.0 + ids + torch.arange(ids.shape[1])).to(self.bag.weight).cos()
        return self.bag(ids, per_sample_weights=weights)


class WeightsNamedFirst(WeightedBag):
    """The same called by names, the tokens' last."""

    def forward(self, ids: Tensor) -> Tensor:
        weights = (1.0 + ids + torch.arange(ids.shape[1])).to(self.bag.weight).cos()
        return self.bag(per_sample_weights=weights, offsets=None, input=ids)


class BagsByOffsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids.reshape(-1), torch.arange(len(ids)) * ids.shape[1])


class Tables(nn.Module):
    """Two tables, one of them looked up three times and once as a bag of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(9, 3, padding_idx=0)
        self.bag = nn.EmbeddingBag(9, 3, mode="sum", padding_idx=0)
        self.bag.weight = self.items.weight
        self.users = nn.Embedding(9, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        sequence = self.items(ids[:, :3]).sum(1) + self.items(ids[:, 1]).tanh() * self.items(ids[:, 2])
        return self.head((sequence + self.bag(ids[:, 2:])) * self.users(ids[:, 0]))


class TiedToOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 3)
        self.out = nn.Linear(3, 8, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.tokens(ids).mean(1).tanh())


def conv(dims: int, *args: object, **kwargs: object) -> Callable[[], nn.Module]:
    return lambda: (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*args, **kwargs)


LINEAR = {
    "linear": Case(lambda: nn.Linear(5, 4), (5,)),
    "linear-no-bias": Case(lambda: nn.Linear(5, 4, bias=False), (5,)),
    "linear-sequence": Case(lambda: nn.Linear(5, 4), (3, 5)),
    "linear-grid": Case(lambda: nn.Linear(5, 4), (2, 3, 5)),
    "linear-to-one": Case(lambda: nn.Linear(5, 1), (5,)),
    "linear-wide": Case(lambda: nn.Linear(40, 30), (40,)),
    "linear-few-inputs": Case(lambda: nn.Linear(2, 20), (3, 2)),
    "linear-long-sequence": Case(lambda: nn.Linear(3, 2), (30, 3)),
}

CONVOLUTIONS = {
    "conv1d": Case(conv(1, 2, 3, 3), (2, 7)),
    "conv1d-stride-padding": Case(conv(1, 2, 3, 3, stride=2, padding=1), (2, 8)),
    "conv1d-shifts": Case(conv(1, 18, 3, 3, padding=1), (18, 6)),
    "conv2d": Case(conv(2, 2, 3, 3), (2, 6, 5)),
    "conv2d-no-bias": Case(conv(2, 2, 3, (3, 2), bias=False), (2, 5, 6)),
    "conv2d-one-by-one": Case(conv(2, 17, 3, 1), (17, 3, 4)),
    "conv2d-stride": Case(conv(2, 2, 3, 3, stride=(2, 1)), (2, 7, 5)),
    "conv2d-stride-leaves-a-rest": Case(conv(2, 2, 3, 3, stride=2), (2, 6, 8)),
    "conv2d-padding": Case(conv(2, 2, 3, 3, padding=(2, 1)), (2, 4, 5)),
    "conv2d-same": Case(conv(2, 2, 3, (2, 3), padding="same"), (2, 5, 4)),
    "conv2d-valid": Case(conv(2, 2, 3, 3, padding="valid"), (2, 5, 4)),
    "conv2d-reflect": Case(conv(2, 2, 3, 3, padding=(1, 2), padding_mode="reflect"), (2, 5, 4)),
    "conv2d-circular": Case(conv(2, 2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 4)),
    "conv2d-replicate-same": Case(conv(2, 2, 3, 3, padding="same", padding_mode="replicate"), (2, 5, 4)),
    "conv2d-dilation": Case(conv(2, 2, 3, 2, dilation=(2, 3)), (2, 5, 6)),
    "conv2d-groups": Case(conv(2, 4, 6, 3, groups=2), (4, 5, 4)),
    "conv2d-depthwise": Case(conv(2, 3, 6, 3, groups=3, padding=1), (3, 4, 4)),
    "conv2d-shifts": Case(conv(2, 20, 5, 3, padding=1), (20, 5, 4)),
    "conv2d-shifts-dilated": Case(conv(2, 16, 4, (2, 3), dilation=2), (16, 6, 7)),
    "conv2d-many-channels-strided": Case(conv(2, 16, 4, 3, stride=2, padding=1), (16, 6, 7)),
    "conv2d-many-channels-grouped": Case(conv(2, 32, 4, 3, groups=2, padding=1), (32, 4, 5)),
    "conv3d": Case(conv(3, 2, 3, 2), (2, 4, 3, 3)),
    "conv3d-everything": Case(
        conv(3, 2, 4, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 2), dilation=(1, 1, 2), groups=2),
        (2, 4, 3, 4),
    ),
    "conv3d-shifts": Case(conv(3, 16, 3, 2, padding="same"), (16, 3, 3, 2)),
}

EMBEDDINGS = {
    "embedding": Case(lambda: nn.Embedding(9, 3), (5,), tokens=9),
    "embedding-repeated": Case(lambda: nn.Embedding(2, 3), (7,), tokens=2),
    "embedding-padding": Case(lambda: nn.Embedding(5, 3, padding_idx=1), (6,), tokens=5),
    "embedding-one-token": Case(lambda: nn.Embedding(9, 3), (), tokens=9),
    "embedding-grid": Case(lambda: nn.Embedding(6, 3), (2, 3), tokens=6),
    "embedding-long-sequence": Case(lambda: nn.Embedding(40, 2), (300,), tokens=40),
    "embedding-bag": Case(lambda: nn.EmbeddingBag(6, 3), (4,), tokens=6),
    "embedding-bag-sum": Case(lambda: nn.EmbeddingBag(4, 3, mode="sum"), (7,), tokens=4),
    "embedding-bag-padding": Case(lambda: nn.EmbeddingBag(4, 3, padding_idx=1), (5,), tokens=4),
    "embedding-bag-weights": Case(WeightedBag, (5,), tokens=6),
    "embedding-bag-weights-by-name": Case(WeightsNamedFirst, (5,), tokens=6),
}

NORMS = {
    "layer-norm": Case(lambda: nn.LayerNorm(5), (5,)),
    "layer-norm-sequence": Case(lambda: nn.LayerNorm(5), (3, 5)),
    "layer-norm-two-axes": Case(lambda: nn.LayerNorm((3, 5)), (2, 3, 5)),
    "layer-norm-no-bias": Case(lambda: nn.LayerNorm(5, bias=False), (3, 5)),
    "group-norm": Case(lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    "group-norm-flat": Case(lambda: nn.GroupNorm(2, 4), (4,)),
    "instance-norm-1d": Case(lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "instance-norm-2d": Case(lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 3)),
    "instance-norm-3d": Case(lambda: nn.InstanceNorm3d(3, affine=True), (3, 2, 3, 2)),
    "rms-norm": Case(lambda: nn.RMSNorm(5), (3, 5)),
    "rms-norm-two-axes": Case(lambda: nn.RMSNorm((3, 5), eps=1e-3), (3, 5)),
}

UNKNOWN = {
    "own-parameter": Case(OwnParameter, (4,)),
    "linear-subclass": Case(lambda: DoubledLinear(4, 3), (4,)),
    "prelu": Case(lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)), (4,)),
    "attention": Case(lambda: Attention(batch_first=True), (3, 4)),
    "attention-sequence-first": Case(lambda: Attention(batch_first=False), (3, 4)),
    "lstm": Case(lambda: Recurrent(nn.LSTM, final_state=False), (3, 3)),
    "lstm-final-state": Case(lambda: Recurrent(nn.LSTM, final_state=True), (3, 3)),
    "gru": Case(lambda: Recurrent(nn.GRU, final_state=False), (3, 3)),
    "conv-transpose": Case(lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 3, 2)),
    "weight-norm": Case(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
}

NETWORKS = {
    "perceptron": Case(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,)),
    "cnn": Case(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.GroupNorm(1, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(3, 4, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        (1, 6, 6),
    ),
    "text": Case(
        lambda: nn.Sequential(
            nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)
        ),
        (5,),
        tokens=7,
    ),
    "tables": Case(Tables, (5,), tokens=9),
    "tied-to-output": Case(TiedToOutput, (4,), tokens=8),
}

GIVES_WAY = {
    "bag-of-the-largest": Case(lambda: nn.EmbeddingBag(6, 3, mode="max"), (4,), tokens=6),
    "bags-by-offsets": Case(BagsByOffsets, (4,), tokens=6),
}

KNOWN = LINEAR | CONVOLUTIONS | EMBEDDINGS | NORMS
CASES = KNOWN | UNKNOWN | NETWORKS | GIVES_WAY


def supports(layout: ParameterLayout) -> dict[str, Support]:
    """Full, random, one coordinate, none, and whole rows with whole parameters left out."""
    d = layout.dimension
    generator = torch.Generator().manual_seed(d)
    rows = torch.zeros(d, dtype=torch.bool)
    for number, slot in enumerate(reversed(list(layout))):
        if number % 3 != 2:
            width = slot.size // slot.shape[0]
            rows[slot.offset : slot.offset + width * max(1, slot.shape[0] // 3)] = True
    return {
        "full": Support.full(d),
        "random": Support(torch.randperm(d, generator=generator)[: max(1, d // 3)], d),
        "one": Support(torch.randint(0, d, (1,), generator=generator), d),
        "none": Support.empty(d),
        "rows": Support.from_mask(rows),
    }


def identity(gradients: np.ndarray, support: Support) -> Geometry:
    return Identity()


def standardized(gradients: np.ndarray, support: Support) -> Geometry:
    """A centre of the gradients' own size, and scales over a factor of 25."""
    generator = np.random.default_rng(support.size)
    size = np.abs(gradients).mean() if gradients.size else 1.0
    centre = size * generator.standard_normal(support.size)
    scale = np.exp(generator.uniform(np.log(0.2), np.log(5.0), support.size))
    return Standardized(torch.from_numpy(centre), torch.from_numpy(scale))


GEOMETRIES = {"identity": identity, "standardized": standardized}
