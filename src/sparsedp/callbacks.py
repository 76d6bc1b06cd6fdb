"""Callbacks that show a run: progress bar, lines per epoch, TensorBoard; and Ctrl-C between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from sparsedp._validate import rounded_up
from sparsedp.privacy.accounting import epsilon_by_epoch
from sparsedp.privacy.plan import Plan
from sparsedp.results import Callback, Event
from sparsedp.runs.record import EpochMetrics


@contextmanager
def live(plan: Plan, console: Console) -> Iterator[Callable[[Event], None]]:
    """A callback that shows step and time left, and below epoch, epsilon so far, active ratio, held-out accuracy.

    The epsilon is a bound on what is spent so far: the plan's, up to the end of the epoch at work.
    """
    named, steps, left = map(TextColumn, ("[bold]{task.description}", "steps,", "left"))
    bar = Progress(named, BarColumn(), MofNCompleteColumn(), steps, TimeRemainingColumn(), left)
    task = bar.add_task(plan.method, total=plan.total_steps)
    facts = Text()
    epsilons = [f"epsilon ≤ {rounded_up(bound, 3)}" for bound in epsilon_by_epoch(plan)]
    epochs = len(plan.epoch_ends())
    accuracy: list[str] = []

    def show(event: Event) -> None:
        if isinstance(event, EpochMetrics):
            found, loss = event.metrics.get("accuracy"), event.training_loss
            accuracy[:] = [] if found is None else [f"held-out accuracy {found:.1%}"]
            accuracy.extend([] if loss is None else [f"private training loss {loss:.3f}"])
            return
        bar.update(task, completed=event.step + 1)
        epsilon = epsilons[event.epoch - 1 : event.epoch]
        ratio = f"active {event.released.support.active_ratio:.0%}"
        facts.plain = "  ".join([f"epoch {event.epoch}/{epochs}", *epsilon, ratio, *accuracy])

    with Live(Group(bar, facts), console=console, transient=True, refresh_per_second=10):
        yield show


@final
class EpochLines(Callback):
    """A callback that prints a line per epoch, where no live screen can be shown."""

    def __init__(self, screen: Console, epochs: int | None) -> None:
        self._screen, self._epochs = screen, epochs

    def on_epoch(self, metrics: EpochMetrics) -> None:
        """Print a line."""
        accuracy = metrics.metrics.get("accuracy")
        facts = [
            f"epoch {metrics.epoch}/{self._epochs or '?'}",
            f"epsilon {rounded_up(metrics.epsilon)}",
            f"active {metrics.active_ratio:.1%}",
            f"held-out accuracy {accuracy:.1%}" if accuracy is not None else "",
        ]
        self._screen.print("  ".join(facts))


@contextmanager
def deferred_interrupt(*signals: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Hold back the first Ctrl-C: the function given says whether there was one. A second one acts at once.

    `signals` are what counts as such; SIGINT alone if none is given.

    Edge cases: Outside the main thread, where Python delivers no signals, nothing is held back; nor is a signal
    that somebody else handles.
    """
    asked = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(number, before[signal.Signals(number)])

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    usual = {signal.SIGINT: signal.default_int_handler}
    held = signals or (signal.SIGINT,)
    before = {one: signal.getsignal(one) for one in held}
    before = {one: handler for one, handler in before.items() if handler is usual.get(one, signal.SIG_DFL)}
    try:
        for number in before:
            signal.signal(number, remember)
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
