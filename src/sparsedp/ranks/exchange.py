"""One sum of many ranks, one release: what travels between processes in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor

from sparsedp.errors import PrivacyError
from sparsedp.privacy.mechanism import within
from sparsedp.ranks.packing import STEPS, packed, unpacked

if TYPE_CHECKING:
    from sparsedp.ranks.group import RankGroup

LEADER = 0
"""The rank that holds the ledger, the noise and the run's folder."""
CONTROL = 2
"""Numbers that travel in front of a sum and of a release: whether a rank failed, whether one was asked to stop."""
_ROOM = 2**61


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank has put into sums, and got in releases, and how many collectives it took part in."""

    summed: int = 0
    released: int = 0
    collectives: int = 0


@final
@dataclass(frozen=True, slots=True)
class GroupExchange:
    """Adds up over a group as integers: exact, so neither the order nor the number of ranks changes a bit.

    A step takes one sum to rank 0 and one broadcast from it, of k numbers and two. The two tell all ranks in the same
    step that one of them failed or was asked to stop, so that all end there.

    **Privacy.** Only rank 0 calls `release`. What a rank gets is the release, or nothing.
    """

    ranks: RankGroup

    def integers(self, local: Callable[[], Tensor], release: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """Sum to rank 0, release there, send the release to all.

        Raises:
            RankError: another rank failed or is gone.
        """
        return self._exchanged(local, release, size, size)

    def floats(
        self, local: Callable[[], Iterable[Tensor]], release: Callable[[Tensor], Tensor], size: int
    ) -> Tensor:
        """The same, with three integers for each number (`packing`).

        Raises:
            RankError: another rank failed or is gone.
        """
        released = self._exchanged(
            lambda: packed(local()),
            lambda total: release(unpacked(total)).view(torch.int64),
            len(STEPS) * size,
            size,
        )
        return released.view(torch.float64)

    def _exchanged(
        self, local: Callable[[], Tensor], release: Callable[[Tensor], Tensor], sends: int, gets: int
    ) -> Tensor:
        ranks = self.ranks
        failure: Exception | None = None
        where = ranks.device
        sent = torch.zeros(CONTROL + sends, dtype=torch.int64, device=ranks.device)
        try:
            mine = self._in_bounds(local())
            where, sent[CONTROL:] = mine.device, mine
        except Exception as error:  # whatever it is: the others are told in this exchange, then it is raised
            failure = error
            ranks.leave_word(error)
        sent[:CONTROL] = torch.tensor(ranks.control(failure is not None))
        self._add_up(sent)
        got = torch.zeros(CONTROL + gets, dtype=torch.int64, device=ranks.device)
        if ranks.leads:
            got[:CONTROL] = sent[:CONTROL]
            if int(sent[0]) == 0:
                try:
                    got[CONTROL:] = release(sent[CONTROL:])
                except Exception as error:
                    failure = error
                    ranks.leave_word(error)
                    got[:CONTROL] = torch.tensor(ranks.control(failed=True))
        self._hand_out(got)
        if failure is not None:
            raise failure
        ranks.heed(int(got[0]), int(got[1]))
        return got[CONTROL:].to(where)

    def _in_bounds(self, mine: Tensor) -> Tensor:
        """Integers whose sum over all ranks has room, whatever the others have."""
        if not within(mine, _ROOM // self.ranks.count):
            raise PrivacyError("the sum has too many units for its grid; nothing was released")
        return mine

    def _add_up(self, sent: Tensor) -> None:
        self.ranks.traffic.summed += sent.numel() * sent.element_size()
        self.ranks.take_part(lambda: dist.reduce(sent, LEADER, group=self.ranks.group))

    def _hand_out(self, got: Tensor) -> None:
        self.ranks.traffic.released += got.numel() * got.element_size()
        self.ranks.take_part(lambda: dist.broadcast(got, LEADER, group=self.ranks.group))
