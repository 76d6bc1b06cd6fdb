"""A progress bar for work of minutes, on a terminal's standard error only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def shown(items: Sequence[Item], title: str) -> Iterator[Item]:
    """The items, with a bar that vanishes when they are done; silent where nobody watches."""
    console = Console(stderr=True)
    watched: Iterable[Item] = track(
        items, description=title, console=console, transient=True, disable=not console.is_terminal
    )
    yield from watched
