"""What outlives a restart: the launcher's key-value store remembers which runs its earlier starts have begun."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sparsedp.errors import SparseDPError

_THIS_START = uuid.uuid4().hex
"""This process among those that the launcher has started one after the other."""
_MAKING, _MADE = "making", "made"


@contextmanager
def beginning(out: Path) -> Iterator[None]:
    """Around the making of a run's folder: noted first, so that a kill in between leaves no run that nobody owns."""
    store, name = _store(), _name(out)
    store.set(name, f"{_MAKING} {_THIS_START}")
    try:
        yield
    except BaseException:
        store.delete_key(name)
        raise
    store.set(name, f"{_MADE} {_THIS_START}")


def begun_before(out: Path, here: bool) -> bool:
    """Whether an earlier start of this launch, and not another launch, has made the run that is `here`, at `out`.

    Raises:
        SparseDPError: it has, and the run is not here. A new one would not count what that one has spent.
    """
    store, name = _store(), _name(out)
    if not store.check([name]):
        return False
    state, start = store.get(name).decode().split()
    if start == _THIS_START:
        return False
    if state == _MADE and not here:
        raise SparseDPError(
            f"an earlier start of this launch has begun a run at {out}, which is not here: it was removed, or the "
            "leading rank is on another machine now. Put the run's folder where all machines see it"
        )
    return here


def _name(out: Path) -> str:
    return f"sparsedp/begun/{out.absolute()}"


def _store() -> Store:
    """The launcher's own, below the names that one start of the ranks goes by."""
    store: Store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
