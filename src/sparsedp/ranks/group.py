"""A group of processes that run as one: `torch.distributed`, and what the run needs of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from sparsedp._files import Json
from sparsedp.errors import RankError
from sparsedp.privacy.mechanism import ProcessGroup
from sparsedp.randomness import PrivateRandomness
from sparsedp.ranks.exchange import LEADER, RankSum, Traffic
from sparsedp.ranks.follower import FollowerRandomness
from sparsedp.ranks.launch import beginning, begun_before
from sparsedp.ranks.post import Post
from sparsedp.runs.checkpoint import json_diff, short
from sparsedp.sampling import Blocks, Shard, Share

T = TypeVar("T")


@final
@dataclass(eq=False)
class RankGroup:
    """The processes that a launcher of `torch.distributed` has started.

    **Privacy.** They are one trusted party: sums travel between them before the noise. Ledger and noise are on the
    leading rank alone.
    **Edge cases.** A rank that is killed or hangs makes the others' next exchange fail: at once, or after the time
    they wait for each other. Nothing is released then.

    Attributes:
        group: theirs, for this run alone.
        seconds: how long they wait for each other.
        restarted: whether the launcher has started them before.
        device: where what they exchange lies.
        traffic: what was exchanged so far.
    """

    group: dist.ProcessGroup
    seconds: float
    restarted: bool
    device: torch.device
    traffic: Traffic = field(default_factory=Traffic)
    _asked: bool = False
    _agreed: bool = False
    _post: Post = field(init=False)

    def __post_init__(self) -> None:
        self._post = Post(f"sparsedp/{self.group.group_name}")

    @property
    def rank(self) -> int:
        """Which one this is."""
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    @property
    def leads(self) -> bool:
        """Whether it is rank 0."""
        return self.rank == LEADER

    @property
    def process_group(self) -> ProcessGroup:
        """Sums are added up on rank 0, and all get what it releases."""
        return RankSum(self)

    def beginning(self, out: Path) -> AbstractContextManager[None]:
        """The launcher's store takes note."""
        return beginning(out)

    def begun_before(self, out: Path, here: bool) -> bool:
        """As the launcher's store has it."""
        return begun_before(out, here)

    def from_leader(self, make: Callable[[], T]) -> T:
        """The leader's value, or its error."""
        told: list[Any] = [None]
        failure: Exception | None = None
        if self.leads:
            try:
                told = [(True, make())]
            except Exception as error:  # whatever it is: all are told, then it is raised as it was
                failure, told = error, [(False, f"{type(error).__name__}: {error}")]
        self.take_part(lambda: dist.broadcast_object_list(told, LEADER, group=self.group))
        if failure is not None:
            raise failure
        fine, value = told[0]
        if not fine:
            raise RankError(f"rank {LEADER} stopped the run: {value}")
        return value  # type: ignore[no-any-return]

    def jointly(self, make: Callable[[], T]) -> T:
        """What `make` gives here, once it has given something everywhere.

        Raises:
            RankError: it failed on another rank, and on which.
        """
        value: list[T] = []

        def made() -> None:
            value.append(make())

        self._made_everywhere(made)
        return value[0]

    def _made_everywhere(self, make: Callable[[], T]) -> list[T]:
        """Every rank's value; where one cannot make it, all are told, and its error is raised there as it was."""
        failure: Exception | None = None
        mine: tuple[T | None, str | None]
        try:
            mine = make(), None
        except Exception as error:
            failure, mine = error, (None, f"{type(error).__name__}: {error}")
        told = self.gather(mine)
        if failure is not None:
            raise failure
        failed = [
            f"rank {rank} stopped the run: {text}" for rank, (_, text) in enumerate(told) if text is not None
        ]
        if failed:
            raise RankError("; ".join(failed))
        return [value for value, _ in told]  # type: ignore[misc]

    def gather(self, value: T) -> list[T]:
        """Every rank's value."""
        values: list[Any] = [None] * self.count
        self.take_part(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def alike(self, facts: Callable[[], Mapping[str, Json]]) -> None:
        """Compare with the leader's.

        Raises:
            RankError: on every rank, naming those that differ, and in what, or that cannot say.
        """

        def plain() -> Json:
            found: Json = json.loads(json.dumps(dict(facts())))
            return found

        leaders, *others = self._made_everywhere(plain)
        differing = []
        for rank, theirs in enumerate(others, start=LEADER + 1):
            words = [
                f"{name} is {short(here)} and {short(there)} on rank {LEADER}"
                for name, there, here in json_diff(leaders, theirs)
            ]
            differing += [f"rank {rank}: {'; '.join(words[:4])}"] if words else []
        if differing:
            raise RankError(
                f"the ranks are not alike. {'. '.join(differing)}. Start all with the same code, data and settings"
            )

    def share(self, units: int, *, sharded: bool) -> Share:
        """Blocks of what all hold, or what this rank alone holds."""
        return Shard(self.rank, tuple(self.gather(units))) if sharded else Blocks(self.rank, self.count)

    def randomness(self, private: PrivateRandomness) -> PrivateRandomness:
        """On ranks that follow: coins, but no noise."""
        return private if self.leads else FollowerRandomness(private)

    def align(self, model: nn.Module) -> None:
        """As in PyTorch's data-parallel training: rank 0's parameters and buffers are everybody's."""
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                sent = tensor.detach().to(self.device).clone(memory_format=torch.contiguous_format)
                self.take_part(functools.partial(dist.broadcast, sent, LEADER, group=self.group))
                tensor.copy_(sent)

    def stops(self, asked: bool) -> bool:
        """After the step in which all have heard that one was asked."""
        self._asked = self._asked or asked
        return self._agreed

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error here is written where the other ranks look when they miss this one."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            self.leave_word(error)
            raise

    def leave_word(self, error: Exception) -> None:
        """Tell the others why this rank ends, where they look when they miss it."""
        self._post.leave(self.rank, f"{type(error).__name__}: {error}")

    def take_part(self, collective: Callable[[], Any]) -> None:
        """Take part in a collective.

        Raises:
            RankError: it failed, and why, as far as the ranks that are still there can tell.
        """
        self.traffic.collectives += 1
        try:
            collective()
        except RuntimeError as error:
            self._post.leave(self.rank, "")
            raise RankError(f"rank {self.rank} cannot go on: {self._diagnosis(error)}") from error

    def _diagnosis(self, error: Exception) -> str:
        words = self._post.read(self.count)
        said = [
            f"rank {rank} stopped with {text}" for rank, text in words.items() if text and rank != self.rank
        ]
        silent = [str(rank) for rank in range(self.count) if rank not in words]
        if silent:
            said.append(f"nothing was heard of rank {', '.join(silent)}: killed, hanging or cut off")
        what = "; ".join(said) or str(error).splitlines()[0]
        return (
            f"{what}. Ranks wait {self.seconds:g} s for each other. What was paid for stays paid; resume the run to "
            "go on from its last checkpoint (`torchrun --max-restarts` does that by itself)"
        )

    def asked_to_stop(self) -> int:
        """What this rank adds to the count of those asked to stop; the main process passes on what it heard."""
        return int(self._asked or self._agreed)

    def heed(self, asked: int) -> None:
        """Take in how many were asked to stop."""
        self._agreed = asked > 0
