"""What `sparsedp train` shows and logs: released and public numbers, and held-out metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.table import Table
from torch import nn

from sparsedp.core.errors import SparseDPError
from sparsedp.privacy import guarantee
from sparsedp.runs.history import EpochReport
from sparsedp.training.reports import Callback, Event, Result, StepReport


@final
class EpochLines:
    """A callback that prints a line per epoch, where no live screen can be shown."""

    def __init__(self, screen: Console, epochs: int | None) -> None:
        self._screen, self._epochs = screen, epochs

    def __call__(self, event: Event) -> None:
        """Print the epochs."""
        if not isinstance(event, EpochReport):
            return
        accuracy = event.metrics.get("accuracy")
        facts = [
            f"epoch {event.epoch}/{self._epochs or '?'}",
            f"epsilon {event.epsilon:.3f}" if event.epsilon is not None else "not private",
            f"active {event.active_ratio:.1%}",
            f"held-out accuracy {accuracy:.1%}" if accuracy is not None else "",
        ]
        self._screen.print("  ".join(facts))


@final
class ScalarLog:
    """A callback that writes scalars.

    **Privacy.** Takes released gradients, public numbers and held-out metrics; nothing else reaches a callback.
    """

    def __init__(self, open_writer: Callable[[], Any]) -> None:
        """`open_writer` is called at the first event: by then the run's folder is there."""
        self._open_writer = open_writer
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        """Write what a step or an epoch released."""
        self._writer = self._writer or self._open_writer()
        if isinstance(event, StepReport):
            self._writer.add_scalar("released/norm", float(event.released.mean.norm()), event.step)
            self._writer.add_scalar("public/active_ratio", event.released.support.active_ratio, event.step)
            self._writer.add_scalar("public/learning_rate", event.learning_rates[0], event.step)
            return
        if event.epsilon is not None:
            self._writer.add_scalar("public/epsilon", event.epsilon, event.step)
        for name, value in event.metrics.items():
            if value is not None:
                self._writer.add_scalar(f"held-out/{name}", value, event.step)
        self._writer.flush()


def tensorboard_log(folder: Path) -> ScalarLog:
    """A log that TensorBoard reads.

    Raises:
        SparseDPError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SparseDPError(
            "--tensorboard needs the package tensorboard; install it with: pip install 'sparsedp[tensorboard]'"
        ) from error
    return ScalarLog(lambda: SummaryWriter(log_dir=str(folder)))


def watching(folder: Path, snapshots: bool) -> Callable[[nn.Module], Sequence[Callback]]:
    """What looks at the model of a run: snapshots of its weights, if asked for now or when the run began."""
    from sparsedp.diagnostics.snapshots import SnapshotFiles
    from sparsedp.runs.folder import RunFolder

    wanted = snapshots or RunFolder(folder).snapshots.is_dir()
    return lambda model: [SnapshotFiles(model, folder)] if wanted else []


def show_result(result: Result, folder: Path, screen: Console) -> None:
    """What came out, what it cost, and what to do with it."""
    table = Table(title=f"{result.method}", show_header=False)
    for name, value in result.metrics.items():
        table.add_row(f"held-out {name.replace('_', ' ')}", "-" if value is None else f"{value:.4f}")
    table.add_row("coordinates", f"{result.k:,} of {result.d:,} active at the end")
    if result.private:
        table.add_row(
            "epsilon spent", f"{result.ledger.epsilon:.4f} at delta {result.delta:g}, per {result.unit}"
        )
    screen.print(table)
    screen.print(guarantee(result.plan))
    if not result.for_release:
        screen.print(
            "[yellow]Reproducible, not for release:[/yellow] a seed was given, or the method is not private."
        )
    screen.print(f"Run: {folder}")
    screen.print(
        f"Next: sparsedp verify {folder}; sparsedp report {folder}; sparsedp advise {folder}", soft_wrap=True
    )
