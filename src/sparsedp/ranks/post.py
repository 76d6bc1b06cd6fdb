"""Last words: where ranks leave a message before they end, outside the collectives that have just failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch.distributed as dist

GRACE = 5.0
"""Seconds to wait for what the others have to say."""


@final
@dataclass(frozen=True, slots=True)
class Post:
    """Messages by rank, in the key-value store that the launcher's rendezvous keeps."""

    name: str

    def leave(self, rank: int, text: str) -> None:
        """Leave word; the first one stands."""
        _soon(lambda: dist.distributed_c10d._get_default_store().compare_set(self._key(rank), "", f"!{text}"))

    def read(self, count: int) -> dict[int, str]:
        """What the ranks have left, after giving them a moment; those that said nothing are missing."""
        found: dict[int, str] = {}

        def ask() -> None:
            store = dist.distributed_c10d._get_default_store()
            for rank in range(count):
                try:
                    store.wait([self._key(rank)], timedelta(seconds=GRACE / count))
                    found[rank] = store.get(self._key(rank)).decode().removeprefix("!")
                except RuntimeError:  # said nothing in time
                    continue

        _soon(ask)
        return dict(found)

    def _key(self, rank: int) -> str:
        return f"{self.name}/{rank}"


def _soon(do: Callable[[], object]) -> None:
    """Do it, but do not wait long: the store may be gone with the rank that kept it."""

    def quietly() -> None:
        try:
            do()
        except RuntimeError:  # the store is gone; what is missing is silence, and said to be
            return

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(GRACE + 1)
