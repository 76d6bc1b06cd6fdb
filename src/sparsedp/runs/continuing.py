"""Continue earlier runs with a plan chosen after looking at them: their ledgers are closed for it, and for it alone.

An earlier run can be resumed, and two later plans could both count on what it has left. So, under the lock of every
earlier ledger, what is left is calibrated away to one plan, and each ledger gets a closing line that holds that plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from sparsedp.privacy.calibration import BudgetSplit, EqualNoise, RdpFilter
from sparsedp.privacy.ledger import FileLedger
from sparsedp.privacy.plan import Plan
from sparsedp.runs.reader import Run
from sparsedp.runs.store import FolderStore


def continue_runs(
    chosen: RdpFilter,
    plan: Plan,
    earlier: Sequence[Path | str],
    split: BudgetSplit = EqualNoise(),  # noqa: B008
) -> Plan:
    """The plan with the least noise that keeps it and all earlier runs within the cap; closes the earlier runs.

    Args:
        chosen: the cap, settled before any release was looked at.
        plan: what to run next.
        earlier: folders of all earlier runs on the same units.
        split: how phases without noise share what is left.

    **Privacy.** On return every earlier ledger is closed on disk, for the returned plan: its run cannot be resumed.
    A plan that got an earlier run's remainder counts whole unless the folder of its run is among `earlier`. Run the
    returned plan once.
    **Edge cases.** A process killed on the way may have closed some ledgers. The same call then gives the same plan,
    except when the kill cut a ledger's line: then the plan that nobody saw counts whole.

    Raises:
        PrivacyError: nothing is left, or an earlier run is still going on.
    """
    with ExitStack() as locks:
        runs = [Run.open(one) for one in earlier]
        ledgers = [locks.enter_context(FileLedger.lock(run.folder.ledger_file, run.plan)) for run in runs]
        for run in runs:
            run.check_ledger()
        known = {run.plan.fingerprint for run in runs}
        promised = {
            one.successor.fingerprint: one.successor for led in ledgers for one in led.record.closings
        }
        # What is committed once all are closed, which they are before anybody sees the plan.
        closed = [one.record if one.record.closings else one.record.closed(plan, "") for one in ledgers]
        found = chosen.calibrate(plan, closed, split)
        lost = [one for name, one in promised.items() if name not in known | {found.fingerprint}]
        if lost:
            found = chosen.calibrate(plan, [*closed, *lost], split)
        for run, ledger in zip(runs, ledgers, strict=True):
            if found not in [one.successor for one in ledger.record.closings]:
                ledger.retire(found)
                FolderStore(run.folder, ledger).save(run.checkpoint)
    return found
