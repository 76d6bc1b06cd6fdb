"""Embedding tables of any size: a mean of word vectors and a linear layer, on tokens that follow Zipf's law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.parameters import ParameterLayout, Support

WIDTH, TOKENS = 64, 32
SEED = 20250101


@final
class MeanOfWords(nn.Module):
    """Embedding, mean, linear."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Two logits from ids of shape [batch, tokens]."""
        logits: Tensor = self.head(self.table(ids).mean(1))
        return logits


@dataclass(frozen=True, slots=True)
class TableWorkload:
    """A table of so many rows and the batch size of one step; SGD without momentum, as sparse gradients need."""

    rows: int
    batch_size: int
    momentum: float = 0.0

    @property
    def name(self) -> str:
        """What a job calls it."""
        return f"table:{self.rows}:{self.batch_size}"

    @classmethod
    def named(cls, name: str) -> TableWorkload:
        """The workload of a name."""
        _, rows, batch_size = name.split(":")
        return cls(int(rows), int(batch_size))

    @property
    def dimension(self) -> int:
        """D."""
        return self.rows * WIDTH + 2 * WIDTH + 2

    def model(self) -> nn.Module:
        """The model, with the same initial values in every process."""
        torch.manual_seed(SEED)
        return MeanOfWords(self.rows)

    def batch(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Ids and targets, the same in every process: the word of rank r comes with a chance of about 1/r."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (rows or self.batch_size, TOKENS)
        ranks = (self.rows ** torch.rand(shape, generator=generator, dtype=torch.float64)).long() - 1
        ids = rows_of_ranks(ranks.clamp_(0, self.rows - 1), self.rows)
        return ids, torch.randint(0, 2, shape[:1], generator=generator)


def rows_of_ranks(ranks: Tensor, rows: int) -> Tensor:
    """Where the words of these ranks stand in the table: all over it, as hashing would put them."""
    step = 2_654_435_761 % rows
    while torch.gcd(torch.tensor(step), torch.tensor(rows)) != 1:
        step += 1
    return ranks * step % rows


def frequent_rows(layout: ParameterLayout, words: int) -> Support:
    """The rows of the most frequent words, and the whole head."""
    table = layout.slots[0]
    rows = rows_of_ranks(torch.arange(min(words, table.shape[0])), table.shape[0])
    within = (rows.unsqueeze(1) * WIDTH + torch.arange(WIDTH)).reshape(-1)
    head: Sequence[int] = range(table.span.stop, layout.dimension)
    return Support(torch.cat([within, torch.tensor(head)]), layout.dimension)
