"""Networks on ids: mean of embeddings, transformer, factorization machine. Id 0 of a text is padding."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from sparsedp.errors import ModelError
from sparsedp_experiments.models.networks import InputShape, PairWithZero, check_shape, classifier_head

PADDING = 0
VOCABULARY = 2**14
"""Number of token ids, padding included; the text loaders hash to the same number."""


def embedding_bag(
    input_shape: InputShape, classes: int, vocabulary: int = VOCABULARY, width: int = 16
) -> nn.Module:
    """Mean of the token embeddings, then a linear layer: 262,161 parameters at the defaults for two classes."""
    check_shape(input_shape, axes=1)
    return EmbeddingBagClassifier(vocabulary, width, classes)


def masked_mean(vectors: Tensor, keep: Tensor) -> Tensor:
    """Mean over the kept positions of each sequence; zero for a sequence without any."""
    weights = keep.to(vectors.dtype).unsqueeze(-1)
    return (vectors * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


@final
class EmbeddingBagClassifier(nn.Module):
    """Embedding, masked mean, linear. Built of layers whose per-sample gradients have a fast path."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.head = classifier_head(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits from ids of shape [batch, length]."""
        logits: Tensor = self.head(masked_mean(self.embedding(ids), ids != PADDING))
        return logits


IDS = 2**18
"""Rows of the table when the data does not say."""
_SPREAD = 0.1
"""Of the vectors at first: small, so that all scores start near zero."""


def factorization(input_shape: InputShape, classes: int, vocabulary: int = IDS, width: int = 16) -> nn.Module:
    """A weight and a vector for every id; the score adds the weights and the inner products of all pairs."""
    check_shape(input_shape, axes=1)
    if classes != 2:
        raise ModelError(f"factorization: got {classes} classes, expected 2")
    return FactorizationMachine(vocabulary, width)


@final
class FactorizationMachine(nn.Module):
    """Rendle 2010: sum of weights plus the inner products of all pairs of fields, by one square of a sum."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(vocabulary, 1, mode="sum")
        self.vectors = nn.Embedding(vocabulary, width)
        self.scale = nn.Linear(2, 1)
        self.pair = PairWithZero()
        nn.init.zeros_(self.weights.weight)
        with torch.no_grad():
            self.vectors.weight.mul_(_SPREAD)
            self.scale.weight.fill_(1.0)
            self.scale.bias.zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (0, z) from ids of shape [batch, fields]."""
        vectors = self.vectors(ids)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        logits: Tensor = self.pair(self.scale(torch.cat([self.weights(ids), pairs], dim=1)))
        return logits
