"""Which Flower node is which client of the plan."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import final

logger = logging.getLogger("sparsedp")


@final
class Roster:
    """As many numbers as the plan has clients; a node has one as long as it is there.

    **Privacy.** The number of clients is public and fixed. A node beyond it is not asked; one that comes for one that
    left takes its number, and so its coin.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._numbers: dict[int, int] = {}

    @property
    def present(self) -> int:
        """How many nodes have a number."""
        return len(self._numbers)

    @property
    def is_full(self) -> bool:
        """Whether every client is there."""
        return self.present == self.size

    def update(self, nodes: Iterable[int]) -> None:
        """Take note of which nodes are connected."""
        connected = sorted(nodes)
        self._numbers = {node: number for node, number in self._numbers.items() if node in set(connected)}
        free = iter(sorted(set(range(self.size)) - set(self._numbers.values())))
        for node in connected:
            if node not in self._numbers and (number := next(free, None)) is not None:
                self._numbers[node] = number
        if len(connected) > self.size:
            logger.warning("%d nodes are connected and the plan has %d clients", len(connected), self.size)

    def node(self, number: int) -> int | None:
        """The node of a client, if it is there."""
        return next((node for node, one in self._numbers.items() if one == number), None)

    def number(self, node: int) -> int | None:
        """The client that a node is, if it has a number."""
        return self._numbers.get(node)
