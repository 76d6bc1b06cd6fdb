"""What everything that trains a run offers of the run it keeps: its place, its history, its end."""

from __future__ import annotations

from typing import Self

from sparsedp.callbacks.reports import Result
from sparsedp.parameters import Support
from sparsedp.privacy.plan import Plan
from sparsedp.runs.history import EpochReport
from sparsedp.training.keeper import RunKeeper


class KeptRun:
    """A run that a keeper keeps; a subclass sets `_keeper` and takes the steps."""

    _keeper: RunKeeper

    @property
    def plan(self) -> Plan:
        """What was planned."""
        return self._keeper.plan

    @property
    def position(self) -> int:
        """How many steps of the plan are done, those lost in a crash included: the next step's index."""
        return self._keeper.position

    @property
    def support(self) -> Support:
        """The coordinates of the last step; all of them before the first."""
        return self._keeper.history.support

    @property
    def history(self) -> tuple[EpochReport, ...]:
        """One report per epoch so far."""
        return tuple(self._keeper.history.epochs)

    def save(self) -> None:
        """Write a checkpoint now; does nothing without a run directory."""
        self._keeper.save()

    def pause(self) -> None:
        """Save and close, so that a later `resume=True` goes on from here. Steps paid for and not taken are lost.

        **Edge cases.** After an error inside a step nothing is saved: the last checkpoint stands.
        """
        self._keeper.pause()

    def finish(self) -> Result:
        """Evaluate, save, write the record and close; further calls give the same result."""
        return self._keeper.finish()

    def close(self) -> None:
        """Release the ledger; steps already paid for and not taken are lost to an unseeded run."""
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()
