"""The processes of a run, and the run of one process, which has nobody to talk to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, final

from torch import nn

from sparsedp._files import Json
from sparsedp.privacy.mechanism import ONE_PROCESS, ProcessGroup
from sparsedp.randomness import PrivateRandomness
from sparsedp.sampling import EVERYTHING, Share

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a run, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this one holds the ledger, the noise and the run's folder, and speaks for all."""
        ...

    @property
    def restarted(self) -> bool:
        """Whether the launcher has started these processes before, and again after a failure."""
        ...

    def beginning(self, out: Path) -> AbstractContextManager[None]:
        """Around the making of a run's folder, on the leading rank: a later start of this launch takes it up."""
        ...

    def begun_before(self, out: Path, here: bool) -> bool:
        """Whether an earlier start of this very launch began the run that is `here`; asked on the leading rank."""
        ...

    @property
    def process_group(self) -> ProcessGroup:
        """How sums become one."""
        ...

    def from_leader(self, make: Callable[[], T]) -> T:
        """What `make` gives on the leading rank, on all; the others do not call it. Its error stops all."""
        ...

    def jointly(self, make: Callable[[], T]) -> T:
        """What `make` gives on this rank, if it fails on none."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order."""
        ...

    def alike(self, facts: Callable[[], Mapping[str, Json]]) -> None:
        """See that all ranks have the same facts, JSON values by name."""
        ...

    def share(self, units: int, *, sharded: bool) -> Share:
        """Which units are this rank's, where it holds so many."""
        ...

    def randomness(self, private: PrivateRandomness) -> PrivateRandomness:
        """What this rank may draw from."""
        ...

    def align(self, model: nn.Module) -> None:
        """Give the leader's parameters and buffers to all."""
        ...

    def stops(self, asked: bool) -> bool:
        """Whether all stop here, if some were asked to."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Around what every rank does: an error on one is told to the others."""
        ...


@final
@dataclass(frozen=True, slots=True)
class OneRank:
    """A process by itself."""

    rank: int = 0
    count: int = 1
    leads: bool = True
    restarted: bool = False
    process_group: ProcessGroup = ONE_PROCESS

    def beginning(self, out: Path) -> AbstractContextManager[None]:
        """Nobody will start it again."""
        return nullcontext()

    def begun_before(self, out: Path, here: bool) -> bool:
        """Nobody has started it before."""
        return False

    def from_leader(self, make: Callable[[], T]) -> T:
        """It leads."""
        return make()

    def jointly(self, make: Callable[[], T]) -> T:
        """If it does not fail."""
        return make()

    def gather(self, value: T) -> list[T]:
        """Its own."""
        return [value]

    def alike(self, facts: Callable[[], Mapping[str, Json]]) -> None:
        """There is nobody to differ from."""

    def share(self, units: int, *, sharded: bool) -> Share:
        """All units."""
        return EVERYTHING

    def randomness(self, private: PrivateRandomness) -> PrivateRandomness:
        """All of it."""
        return private

    def align(self, model: nn.Module) -> None:
        """There is one model."""

    def stops(self, asked: bool) -> bool:
        """If asked."""
        return asked

    @contextmanager
    def together(self) -> Iterator[None]:
        """Nobody to tell."""
        yield


ONE_RANK = OneRank()
