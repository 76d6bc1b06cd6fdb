"""A small pre-norm transformer encoder, of layers with per-example rules."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn

from sparsedp_experiments.models.ids import PADDING, VOCABULARY, masked_mean
from sparsedp_experiments.models.networks import classifier_head


def transformer(
    input_shape: tuple[int, ...],
    classes: int,
    vocabulary: int = VOCABULARY,
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
) -> nn.Module:
    """A small pre-norm transformer encoder for classifying token sequences of a fixed length."""
    return TransformerClassifier(input_shape[0], vocabulary, width, heads, layers, classes)


@final
class TransformerClassifier(nn.Module):
    """Token and position embeddings, encoder blocks, masked mean, linear."""

    def __init__(
        self, length: int, vocabulary: int, width: int, heads: int, layers: int, classes: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = classifier_head(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits from ids of shape [batch, length]."""
        keep = ids != PADDING
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
        hidden = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, keep)
        logits: Tensor = self.head(masked_mean(self.norm(hidden), keep))
        return logits


@final
class EncoderBlock(nn.Module):
    """Self-attention and a two-layer perceptron, each on a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm_perceptron = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, keep: Tensor) -> Tensor:
        """Vectors of the same shape."""
        attended: Tensor = hidden + self.attention(self.norm_attention(hidden), keep)
        out: Tensor = attended + self.perceptron(self.norm_perceptron(attended))
        return out


@final
class SelfAttention(nn.Module):
    """Multi-head attention out of four linear layers; padded positions are not attended to.

    Written out, because PyTorch's fused attention has no batching rule for `vmap` on the CPU.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, keep: Tensor) -> Tensor:
        """Attention of every position to the kept ones (to all, where a sequence keeps none: no NaN)."""
        attend = keep | ~keep.any(dim=1, keepdim=True)
        query, key, value = (self._split(layer(hidden)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(~attend[:, None, None, :], -math.inf).softmax(dim=-1)
        mixed: Tensor = self.out((weights @ value).transpose(1, 2).flatten(start_dim=2))
        return mixed

    def _split(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        return hidden.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
