"""The folder of a run that several processes share: the leading rank keeps it, the others are told what it says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from sparsedp.privacy.plan import Plan
from sparsedp.ranks.follower import FollowerLedger
from sparsedp.ranks.one import Ranks
from sparsedp.runs.checkpoint import Checkpoint
from sparsedp.runs.directory import (
    NoStore,
    RunDirectory,
    RunStore,
    SavedRun,
    find_run,
    holds_run,
)
from sparsedp.runs.record import RunRecord


def goes_on(ranks: Ranks, out: Path | str | None, resume: bool) -> bool:
    """Whether the run at `out` is gone on with: if that was asked for, or if this launch began it and starts again.

    Another launch's run is not taken up, however often the launcher tries.
    """
    return ranks.from_leader(
        lambda: resume or (out is not None and ranks.begun_before(Path(out), holds_run(Path(out))))
    )


def find_shared_run(
    ranks: Ranks, out: Path | str | None, resume: bool, plan: Plan, *, replay: bool
) -> SavedRun | None:
    """The run to resume, or None for a new one; found, checked and locked by the leading rank alone."""
    kept: list[SavedRun] = []

    def find() -> tuple[Checkpoint, RunStore] | None:
        found = find_run(out, resume, plan, replay=replay)
        if found is None:
            return None
        kept.append(found)
        return found.checkpoint, _followed(found.directory)

    told = ranks.from_leader(find)
    if kept or told is None:
        return kept[0] if kept else None
    checkpoint, store = told
    return SavedRun(store, checkpoint)


def new_shared_store(
    ranks: Ranks,
    out: Path | str | None,
    plan: Plan,
    start: Callable[[], Checkpoint],
    record: RunRecord,
    *,
    replay: bool,
) -> RunStore:
    """Where a new run is kept: by the leading rank, if anywhere."""
    kept: list[RunStore] = []

    def make() -> RunStore:
        with nullcontext() if out is None else ranks.beginning(Path(out)):
            kept.append(
                NoStore() if out is None else RunDirectory.create(out, plan, start, record, replay=replay)
            )
        return _followed(kept[0])

    told = ranks.from_leader(make)
    return kept[0] if kept else told


def _followed(store: RunStore) -> RunStore:
    """What a rank that follows has in the place of the leader's store."""
    if not isinstance(store, RunDirectory):
        return NoStore()
    return NoStore(FollowerLedger(store.ledger.record, store.ledger.next_step), store.path, store.seconds)
