"""Models and batches for the engines, the plain loop they are held against, and structures of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip, Geometry, Identity, Standardized
from sparsedp.grad_sample import ClippedSumEngine, ClippedSumQuery
from sparsedp.parameters import ParameterLayout, Support

# One small model for every layer the engines must get right, and the supports and geometries to try on it.

SAMPLES = 6


def loss(model: Callable[[Tensor], Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with no symmetry: every output matters, each sample by another amount."""
    inputs, targets = rows
    outputs = model(inputs).flatten(1)
    weights = torch.linspace(0.5, 1.5, outputs.shape[1], dtype=outputs.dtype)
    return (weights * torch.sin(outputs)).sum(1) * targets.to(outputs.dtype)


def output_sum(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).float().flatten(1).sum(1)


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


class By(nn.Module):
    """A model out of named layers, bare parameters and a forward function."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def by(forward, **parts) -> Callable[[], nn.Module]:
    """Parts are made anew with every model."""
    return lambda: By(forward, **{name: make() for name, make in parts.items()})


def written(
    shape: tuple[int, ...], forward: Callable[[Any, Tensor], Tensor], tokens: int | None = None, **parts: Any
) -> Case:
    return Case(by(forward, **parts), shape, tokens)


def bare(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.ones(shape)


def linear(*size: int, **kwargs) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(*size, **kwargs)


def multihead(**kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(4, 2, batch_first=True, **kwargs)


def states_of(state: Any) -> Tensor:
    """Final states, whose first axis is not the examples."""
    parts = state if isinstance(state, tuple) else (state,)
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1)


def recurrent(kind: type[nn.RNNBase], take: str = "outputs", **kwargs) -> Callable[[], nn.Module]:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        outputs, state = m.cell(x if m.cell.batch_first else x.transpose(0, 1))
        if take == "outputs":
            return outputs if m.cell.batch_first else outputs.transpose(0, 1)
        return states_of(state)

    return by(forward, cell=lambda: kind(3, 4, **kwargs))


def weighted_bag(m: nn.Module, ids: Tensor) -> Tensor:
    weights = (1.0 + ids + torch.arange(ids.shape[1])).to(m.bag.weight).cos()
    return m.bag(ids, per_sample_weights=weights)


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


def conv(dims: int, *args: object, **kwargs: object) -> Callable[[], nn.Module]:
    return lambda: (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*args, **kwargs)


LINEAR = {
    "linear": Case(lambda: nn.Linear(5, 4), (5,)),
    "linear-sequence": Case(lambda: nn.Linear(5, 4), (3, 5)),
    "linear-wide": Case(lambda: nn.Linear(40, 30), (40,)),
    "linear-long-sequence": Case(lambda: nn.Linear(3, 2), (30, 3)),
}

CONVOLUTIONS = {
    "conv1d": Case(conv(1, 2, 3, 3), (2, 7)),
    "conv2d": Case(conv(2, 2, 3, 3), (2, 6, 5)),
    "conv2d-groups": Case(conv(2, 4, 6, 3, groups=2), (4, 5, 4)),
    "conv2d-depthwise": Case(conv(2, 3, 6, 3, groups=3, padding=1), (3, 4, 4)),
    "conv2d-many-channels": Case(conv(2, 20, 5, 3, padding=1), (20, 5, 4)),
    "conv3d": Case(conv(3, 2, 3, 2), (2, 4, 3, 3)),
    "conv3d-everything": Case(
        conv(3, 2, 4, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 2), dilation=(1, 1, 2), groups=2),
        (2, 4, 3, 4),
    ),
}

EMBEDDINGS = {
    "embedding": Case(lambda: nn.Embedding(9, 3), (5,), tokens=9),
    "embedding-repeated": Case(lambda: nn.Embedding(2, 3), (7,), tokens=2),
    "embedding-padding": Case(lambda: nn.Embedding(5, 3, padding_idx=1), (6,), tokens=5),
    "embedding-long-sequence": Case(lambda: nn.Embedding(40, 2), (300,), tokens=40),
    "embedding-bag": Case(lambda: nn.EmbeddingBag(6, 3), (4,), tokens=6),
    "embedding-bag-padding": Case(lambda: nn.EmbeddingBag(4, 3, padding_idx=1), (5,), tokens=4),
    "embedding-bag-weights": written(
        (5,), weighted_bag, tokens=6, bag=lambda: nn.EmbeddingBag(6, 3, mode="sum", padding_idx=2)
    ),
}

NORMS = {
    "layer-norm-sequence": Case(lambda: nn.LayerNorm(5), (3, 5)),
    "group-norm": Case(lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    "instance-norm-3d": Case(lambda: nn.InstanceNorm3d(3, affine=True), (3, 2, 3, 2)),
    "rms-norm": Case(lambda: nn.RMSNorm(5), (3, 5)),
}

UNKNOWN = {
    "own-parameter": written(
        (4,),
        lambda m, x: m.gain * m.inner(x).tanh() + x @ m.inner.weight.T.cos(),
        gain=bare(4),
        inner=linear(4, 4),
    ),
    "prelu": Case(lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)), (4,)),
    "attention": written(
        (3, 4), lambda m, x: m.attention(x, x, x, need_weights=False)[0], attention=multihead()
    ),
    "lstm-final-state": Case(recurrent(nn.LSTM, "state", batch_first=True), (3, 3)),
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
}

GIVES_WAY = {
    "bag-of-the-largest": Case(lambda: nn.EmbeddingBag(6, 3, mode="max"), (4,), tokens=6),
    "bags-by-offsets": written(
        (4,),
        lambda m, ids: m.bag(ids.reshape(-1), torch.arange(len(ids)) * ids.shape[1]),
        tokens=6,
        bag=lambda: nn.EmbeddingBag(6, 3),
    ),
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
        "rows": Support(rows.nonzero().flatten(), len(rows)),
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


# Per-sample gradients by a plain loop of `backward`, the clipped sum in NumPy: no code shared with the engines.


Loss = Callable[[Any, Any], Tensor]


def plain_loop(model: nn.Module, loss: Loss, rows: Sequence[Tensor]) -> np.ndarray:
    """The [n, d] matrix of per-sample gradients of the trainable parameters."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    gradients = []
    for i in range(len(rows[0])):
        for p in trainable:
            p.grad = None
        loss(model, tuple(part[i : i + 1] for part in rows)).sum().backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trainable]
        gradients.append(np.concatenate([part.double().numpy().ravel() for part in parts]))
    for p in trainable:
        p.grad = None
    return np.stack(gradients)


def unit_means(gradients: np.ndarray, units: Sequence[int]) -> np.ndarray:
    """The mean gradient of every unit."""
    return np.stack([gradients[np.equal(units, u)].mean(axis=0) for u in range(max(units) + 1)])


def measured(
    gradients: np.ndarray,
    indices: np.ndarray,
    centre: np.ndarray | float = 0.0,
    scale: np.ndarray | float = 1.0,
    keep: int | None = None,
) -> np.ndarray:
    """Restricted to the support, standardized, and only the `keep` largest magnitudes of each row."""
    z = (gradients[:, indices] - centre) / scale
    if keep is not None and keep < z.shape[1]:
        for row in z:
            order = sorted(range(len(row)), key=lambda j: (-abs(row[j]), j))
            row[order[keep:]] = 0.0
    return z


def clipped_sum(z: np.ndarray, clip_norm: float | None) -> np.ndarray:
    """The sum of the rows, each scaled down to `clip_norm` less the documented margin of 1e-3."""
    total = np.zeros(z.shape[1])
    for row in z:
        norm = np.sqrt((row**2).sum())
        if np.isfinite(norm):
            total += row if clip_norm is None else row * min(1.0, clip_norm / 1.001 / max(norm, 1e-300))
    return total


def median_norm(z: np.ndarray) -> float:
    """A clip norm that clips about half of the rows; 1 where there is nothing to clip."""
    norm = float(np.median(np.sqrt((z**2).sum(axis=1)))) if z.size else 0.0
    return norm if norm > 0 else 1.0


def assert_equals_a_plain_loop(
    engine: ClippedSumEngine,
    model: nn.Module,
    rows: tuple[Tensor, Tensor],
    *,
    loss: Loss = loss,
    geometry: str = "identity",
    units: Sequence[int] | None = None,
    keep: float | None = None,
    tolerance: float = 1e-9,
    least: float = 0.0,
) -> None:
    """On every kind of support; errors are in clip norms (or `least` gradients, if more) per contribution."""
    gradients = plain_loop(model, loss, rows)
    contributions = gradients if units is None else unit_means(gradients, units)
    batch = MicroBatch(rows, None if units is None else torch.tensor(units))
    for name, support in supports(engine.layout).items():
        space = GEOMETRIES[geometry](gradients, support)
        parts = (space.centre.numpy(), space.scale.numpy()) if isinstance(space, Standardized) else (0.0, 1.0)
        count = None if keep is None else max(1, int(keep * support.size))
        z = measured(contributions, support.indices.numpy(), *parts, keep=count)
        clip_norm = median_norm(z)
        found = engine.clipped_sum([batch], ClippedSumQuery(support, FlatClip(clip_norm), space, keep))
        assert (found.dtype, found.shape) == (torch.float64, (support.size,))
        error = np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm))
        allowed = max(clip_norm, least * np.abs(gradients).max())
        assert error <= tolerance * allowed * len(contributions), name
