"""Texts as the mean of public word vectors: a fixed function of each text, with nothing to learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from safetensors.torch import load_file
from torch import Tensor

from sparsedp.core.errors import DataError
from sparsedp.models.pretrained import PRETRAINED, public_file

_TOKENS = "tokenizers/l2_supercat_tokenizer_config.json"


@final
class WordVectors:
    """WordLlama's 32,000 vectors of 256 numbers, and the tokenizer that comes with them.

    **Privacy.** The vectors are public, and each text's mean depends on that text alone: no privacy cost.
    """

    def __init__(self) -> None:
        weights = PRETRAINED["wordllama"]
        path = public_file(weights)
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise DataError(
                f"{weights.name}: its tokenizer needs the package tokenizers ({error}); "
                'run pip install "sparsedp[pretrained]"'
            ) from error
        (self._table,) = load_file(path).values()
        self._table = self._table.float()
        self._tokenizer: Any = Tokenizer.from_file(str(path.parents[1] / _TOKENS))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self._table.shape[1]

    def means(self, texts: Sequence[str]) -> Tensor:
        """The mean vector of each text's tokens, scaled to unit length; zero for a text without tokens."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids = [torch.tensor(each.ids, dtype=torch.int64) for each in found]
        starts = torch.tensor([0, *(len(each) for each in ids[:-1])]).cumsum(0)
        sums = torch.nn.functional.embedding_bag(
            torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64), self._table, starts, mode="mean"
        )
        return torch.nn.functional.normalize(sums, dim=1)
