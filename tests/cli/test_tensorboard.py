"""`--tensorboard` writes what was released, what is public, and held-out numbers: nothing else."""

from sparsedp.callbacks import ScalarLog
from sparsedp.results import StepReport
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.settings import Settings


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, {})[step] = value

    def flush(self):
        pass


def test_the_log_holds_released_public_and_held_out_numbers_only():
    writer, steps = Writer(), []
    settings = Settings.from_json(
        {"dataset": "digits", "subset": 100, "epochs": 2, "batch_size": 25, "seed": 0}
    )
    result = execute(settings, callbacks=[ScalarLog(lambda: writer), steps.append])
    steps = [event for event in steps if isinstance(event, StepReport)]
    epochs = result.history
    assert len(steps) == result.plan.total_steps
    assert writer.scalars == {
        "released/norm": {event.step: float(event.released.mean.norm()) for event in steps},
        "public/active_ratio": {event.step: event.released.support.active_ratio for event in steps},
        "public/learning_rate": {event.step: event.learning_rates[0] for event in steps},
        "public/epsilon": {event.step: event.epsilon for event in epochs},
        "held-out/loss": {event.step: event.metrics["loss"] for event in epochs},
        "held-out/accuracy": {event.step: event.metrics["accuracy"] for event in epochs},
    }
