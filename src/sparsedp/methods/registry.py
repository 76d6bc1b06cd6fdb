"""Pieces of methods by name: the library's own, and those that users make known."""

from __future__ import annotations

import difflib
from typing import Generic, Protocol, TypeVar, final

from sparsedp.errors import SparseDPError


class Named(Protocol):
    """Has a name."""

    @property
    def name(self) -> str:
        """By which it is found."""
        ...


T = TypeVar("T", bound=Named)


@final
class Registry(Generic[T]):
    """One thing a name.

    Args:
        what: what they are, for messages.
        door: the function that makes one of a user's own known.
    """

    def __init__(self, what: str, door: str) -> None:
        self._what, self._door = what, door
        self._known: dict[str, T] = {}

    def register(self, one: T) -> T:
        """Make one known by its name.

        Raises:
            SparseDPError: the name is another's.
        """
        if self._known.get(one.name, one) != one:
            raise SparseDPError(f"{self._what}: the name {one.name!r} is taken; choose another")
        self._known[one.name] = one
        return one

    def get(self, name: str) -> T:
        """The one of that name.

        Raises:
            SparseDPError: there is none.
        """
        if name not in self._known:
            near = difflib.get_close_matches(name, self._known, n=1)
            hint = f"Did you mean {near[0]!r}? One" if near else "One"
            raise SparseDPError(
                f"{self._what}: got {name!r}, expected one of {', '.join(self.names())}. {hint} of your own is made "
                f"known by {self._door}"
            )
        return self._known[name]

    def names(self) -> list[str]:
        """All of them, in order."""
        return sorted(self._known)
