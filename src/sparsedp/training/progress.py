"""The live screen of a run: public numbers only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sparsedp.privacy.plan import Plan
from sparsedp.training.reports import Callback, EpochReport, Event, StepReport


@contextmanager
def live(plan: Plan, console: Console) -> Iterator[Callback]:
    """A progress bar as a callback: step, epoch, epsilon so far, active ratio, held-out accuracy, time left."""
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    epochs = len(plan.epoch_ends())
    with bar:
        task = bar.add_task(plan.method, total=plan.total_steps, facts="")
        shown = {"epsilon": "", "accuracy": ""}

        def show(event: Event) -> None:
            if isinstance(event, EpochReport):
                if event.epsilon is not None:
                    shown["epsilon"] = f"epsilon {event.epsilon:.2f}  "
                accuracy = event.metrics.get("accuracy")
                if accuracy is not None:
                    shown["accuracy"] = f"held-out accuracy {accuracy:.1%}  "
            elif isinstance(event, StepReport):
                ratio = f"active {event.released.support.active_ratio:.0%}  "
                facts = f"epoch {event.epoch}/{epochs}  {shown['epsilon']}{ratio}{shown['accuracy']}"
                bar.update(task, completed=event.step + 1, facts=facts)

        yield show
