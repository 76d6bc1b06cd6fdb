"""Texts as the mean of public word vectors: a fixed function of each text, with nothing to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from safetensors.torch import load_file
from torch import Tensor

from sparsedp.errors import DataError
from sparsedp_experiments.models.pretrained import PRETRAINED, public_file, reinstall

_VECTORS = PRETRAINED["wordllama"]
_TOKENIZER = replace(
    _VECTORS,
    file="tokenizers/l2_supercat_tokenizer_config.json",
    sha256="93248f2a9ec36c7b35f700a033d5f36228aae48db61aee31007fa49062cdeb68",
)


@final
class WordVectors:
    """WordLlama's 32,000 vectors of 256 numbers, and the tokenizer that comes with them.

    **Privacy.** The vectors are public, and each text's mean depends on that text alone: no privacy cost.

    Raises:
        DataError: a package is not installed, or a file of it is missing, damaged or another.
    """

    def __init__(self) -> None:
        vectors = public_file(_VECTORS)
        self._tokenizer = _load_tokenizer()
        (table,) = load_file(vectors).values()
        self._table = table.float()

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self._table.shape[1]

    def means(self, texts: Sequence[str]) -> Tensor:
        """The mean vector of each text's tokens, scaled to unit length; zero for a text without tokens."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        if not found:
            return self._table.new_empty(0, self.width)
        ids = [torch.tensor(each.ids, dtype=torch.int64) for each in found]
        starts = torch.tensor([0, *(len(each) for each in ids[:-1])]).cumsum(0)
        sums = torch.nn.functional.embedding_bag(torch.cat(ids), self._table, starts, mode="mean")
        return torch.nn.functional.normalize(sums, dim=1)


def _load_tokenizer() -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(
            f"{_TOKENIZER.name}: its tokenizer needs the package tokenizers ({error}); "
            'run pip install "sparsedp[pretrained]"'
        ) from error
    path = public_file(_TOKENIZER)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise DataError(
            f"{_TOKENIZER.name}: {_TOKENIZER.file} cannot be loaded ({error}), so the package tokenizers may be too "
            f"old for it; {reinstall(_TOKENIZER)}"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
