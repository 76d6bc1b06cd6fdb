"""Bytes of real updates on the wire, over the active ratio (RS, Sec. 5)."""

from __future__ import annotations

from typing import Any, final

from sparsedp.parameters import Support
from sparsedp.results import StepReport
from sparsedp.runs.record import EpochMetrics
from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.figures.cost import Costs
from sparsedp_experiments.figures.runs import open_trainer, train_until
from sparsedp_experiments.theory.wire import decode_support, encode_support, encode_values, traffic


@final
class Messages:
    """A callback that encodes every update of a phase."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self.supports: list[Support] = []
        self.values: list[bytes] = []

    def __call__(self, event: StepReport | EpochMetrics) -> None:
        """Encode a step's."""
        if isinstance(event, StepReport) and event.phase == self._phase:
            self.supports.append(event.released.support)
            self.values.append(encode_values(event.released.mean))


def measure(study: Study, point: Point) -> dict[str, Any]:
    """One run; the updates of its sparse phase, encoded, with the last support decoded as a check."""
    costs = Costs()
    trainer, _ = open_trainer(study.run_settings(point))
    messages = Messages(trainer.plan.phases[-1].name)
    train_until(trainer, trainer.plan.total_steps, (messages,))
    trainer.close()
    with costs.of("counting the bytes of a run"):
        sent = traffic(messages.supports, messages.values)
    last = messages.supports[-1]
    with costs.of("encoding one support"):
        message = encode_support(last)
    with costs.of("decoding one support"):
        same = decode_support(message, last.size, last.dimension) == last
    return {
        "d": last.dimension,
        "k": last.size,
        "steps": sent.steps,
        "value_bytes": sent.values,
        "index_bytes": sent.indices,
        "dense_bytes": sent.dense,
        "share": sent.share,
        "one_support_bytes": len(message),
        "four_byte_indices": 4 * last.size,
        "round_trip": same,
        "costs": costs.to_json(),
    }
