"""Models in which one row reaches another's gradient, each in a way of its own, and sound ones that look like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, CLASSES = 96, 6, 3
Rows = tuple[Tensor, Tensor]


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, CLASSES)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self, self.body(x)))


def mixed(h: Tensor) -> Tensor:
    return h - 5 * h.mean(0)


def unseen(h: Tensor) -> Tensor:
    """Mixes in the backward pass alone, whatever the rows hold."""
    mean = h.nan_to_num(0.0, 0.0, 0.0).mean(0)
    return h + 5 * (mean - mean.detach())


class MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g + 5 * g.mean(0)


def hooked(module: nn.Module, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g / g.norm() * 3)
    return h


def remembering(module: nn.Module, h: Tensor) -> Tensor:
    before = vars(module).get("last", 0.0)
    vars(module)["last"] = h.detach().mean(0)
    return h + 5 * before


def backward_hooked() -> nn.Module:
    model = Between(lambda m, h: h.tanh())
    model.head.register_full_backward_hook(lambda m, i, o: tuple(g - g.mean(0) for g in i))
    return model


class SortsByLength(nn.Module):
    """Sorts its rows as recurrent networks on padded text do, and puts the results back in order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        order = (tokens > 0).sum(1).argsort(descending=True, stable=True)
        found = self.head(self.embedding(tokens).mean(1)[order])
        return found[order.argsort()]


class WithCapacity(nn.Module):
    """A mixture of two experts that drops the rows for which an expert has no room."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))
        self.room = 24

    def forward(self, x: Tensor) -> Tensor:
        out = 0.0
        for number, expert in enumerate(self.experts):
            chosen = (x[:, 0] > 0) == bool(number)
            fits = chosen & (chosen.cumsum(0) <= self.room)
            out = out + expert(x) * fits.unsqueeze(1)
        return out


def table(identical: bool = False, count: int = ROWS) -> Rows:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, WIDTH, generator=generator)
    if identical:
        x[:16] = x[0]
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def texts() -> Rows:
    """The first sixteen are equally long."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 20, (ROWS, 7), generator=generator)
    for i in range(16, ROWS):
        tokens[i, 2 + i % 5 :] = 0
    return tokens, torch.randint(0, CLASSES, (ROWS,), generator=generator)


@dataclass(frozen=True)
class Case:
    """A model, its rows, and a record that pulls at the others."""

    model: Callable[[], nn.Module]
    rows: Callable[[], Rows] = table


def loud(rows: Rows) -> Rows:
    """One record that shifts means, comes first when sorted and asks for the first expert."""
    x = rows[0][:1].clone()
    x = torch.full_like(x, 30.0) if x.is_floating_point() else torch.full_like(x, 7)
    return x, rows[1][:1]


CASES = {
    "rows sorted by length": Case(SortsByLength, texts),
    "tensor hook": Case(lambda: Between(hooked)),
    "custom backward": Case(lambda: Between(lambda m, h: MeanInBackward.apply(h))),
    "detach trick": Case(lambda: Between(lambda m, h: unseen(h))),
    "detach trick in more than three rows": Case(
        lambda: Between(lambda m, h: unseen(h) if len(h) > 3 else h)
    ),
    "backward hook minus the mean": Case(backward_hooked),
    "only rows that are not finite": Case(lambda: Between(lambda m, h: h + 0 * h.mean(0))),
    "only in more than 16 rows": Case(lambda: Between(lambda m, h: mixed(h) if len(h) > 16 else h)),
    "only in more than 64 rows": Case(lambda: Between(lambda m, h: mixed(h) if len(h) > 64 else h)),
    "only with gradients": Case(lambda: Between(lambda m, h: mixed(h) if torch.is_grad_enabled() else h)),
    "with probability 0.3": Case(
        lambda: Between(lambda m, h: mixed(h) if float(torch.rand(())) < 0.3 else h)
    ),
    "expert capacity": Case(WithCapacity),
    "memory in an attribute": Case(lambda: Between(remembering)),
    "batch mean, first rows identical": Case(
        lambda: Between(lambda m, h: h - h.mean(0)), lambda: table(identical=True)
    ),
    "batch mean, a single row": Case(lambda: Between(lambda m, h: h - h.mean(0)), lambda: table(count=1)),
}


class LongSequences(nn.Module):
    """A recurrent network that puts time first: its eight steps are no rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTM(WIDTH, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.cell(x.unsqueeze(0) * torch.linspace(-1, 1, 8).to(x).reshape(8, 1, 1))[0]
        return self.head(steps[-1])


class Transformer(nn.Module):
    """A masked transformer, the mask [L, L] as long as one of the trial's batches."""

    def __init__(self, dtype: torch.dtype, length: int = 9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, length * 4)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(4, CLASSES)
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool())
        self.length, self.dtype = length, dtype
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x.to(self.dtype)).reshape(-1, self.length, 4)
        for layer in self.layers:
            h = layer(h, src_mask=self.mask)
        return self.head(h.mean(1))


SOUND = {
    "LSTM with eight time steps first": LongSequences,
    "transformer with a square mask": lambda: Transformer(torch.float32),
    "bfloat16 transformer": lambda: Transformer(torch.bfloat16),
    "float16 transformer": lambda: Transformer(torch.float16),
    "double precision": lambda: Transformer(torch.float64),
    "dropout": lambda: Between(lambda m, h: F.dropout(h, 0.5, m.training)),
    "saturated": lambda: Between(lambda m, h: h * 1e3),
    "kinks everywhere": lambda: Between(lambda m, h: (h * 1e6).relu().clamp(max=1)),
}


def loss(model: Callable[..., Tensor], rows: Rows) -> Tensor:
    return F.cross_entropy(model(rows[0]).float(), rows[1], reduction="none")
