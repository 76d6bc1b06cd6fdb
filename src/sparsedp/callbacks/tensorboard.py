"""A callback that logs a run for TensorBoard: released and public numbers, and held-out metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from sparsedp.callbacks.reports import Event, StepReport
from sparsedp.errors import SparseDPError


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
