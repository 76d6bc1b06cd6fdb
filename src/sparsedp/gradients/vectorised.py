"""The setting in which per-sample gradients are vectorised."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def detached_and_quiet() -> Iterator[None]:
    """Around `vmap` of `grad`: results carry no graph, and a slow batching rule is no cause for alarm."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield
