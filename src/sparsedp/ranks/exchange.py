"""What ranks send each other in a step: one sum to rank 0, one broadcast from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor

from sparsedp.errors import PrivacyError
from sparsedp.privacy.mechanism import within

if TYPE_CHECKING:
    from sparsedp.ranks.group import RankGroup

LEADER = 0
"""The rank that holds the ledger, the noise and the run's folder."""
CONTROL = 1
"""Numbers that travel in front of a sum and of a release: whether a rank was asked to stop."""
_ROOM = 2**61


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank has put into sums, and got in releases, and how many collectives it took part in."""

    summed: int = 0
    released: int = 0
    collectives: int = 0


@final
@dataclass(frozen=True, slots=True)
class RankSum:
    """Adds up over a group as integers: exact, so neither the order nor the number of ranks changes a bit.

    A step takes one sum to rank 0 and one broadcast from it, of k numbers and one, which tells all ranks in the same
    step that one of them was asked to stop.

    Formal guarantees:
        A rank that fails never joins the sum, so rank 0 has nothing to release, and what the others get is an error.

    Edge cases:
        Float sums (ablations that promise nothing) are added in the order the backend adds them.
    """

    ranks: RankGroup

    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.leads

    def reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, complete on rank 0.

        Raises:
            PrivacyError: integers whose sum over all ranks may have no room.
            RankError: another rank failed or is gone.
        """
        if values.dtype == torch.int64 and not within(values, _ROOM // self.ranks.count):
            raise PrivacyError("the sum has too many units for its grid; nothing was released")
        sent = self._with_control(values)
        self._add_up(sent)
        if self.ranks.leads:
            self.ranks.heed(int(sent[0]))
        return sent[CONTROL:].to(values.device)

    def broadcast(self, values: Tensor) -> Tensor:
        """What rank 0 has.

        Raises:
            RankError: rank 0 failed or is gone.
        """
        got = self._with_control(values)
        self._hand_out(got)
        self.ranks.heed(int(got[0]))
        return got[CONTROL:].to(values.device)

    def _with_control(self, values: Tensor) -> Tensor:
        control = torch.tensor([self.ranks.asked_to_stop()])
        return torch.cat([control.to(values), values]).to(self.ranks.device)

    def _add_up(self, sent: Tensor) -> None:
        self.ranks.traffic.summed += sent.numel() * sent.element_size()
        self.ranks.take_part(lambda: dist.reduce(sent, LEADER, group=self.ranks.group))

    def _hand_out(self, got: Tensor) -> None:
        self.ranks.traffic.released += got.numel() * got.element_size()
        self.ranks.take_part(lambda: dist.broadcast(got, LEADER, group=self.ranks.group))
