"""The strategy of a `ServerApp`: Flower carries the messages, `FederatedTrainer` decides everything."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, final

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result as FlowerResult
from flwr.serverapp.strategy import Strategy

from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.federated import FederatedTrainer, Round, RoundReport
from sparsedp.flower.records import in_one_line, read_answer, to_records
from sparsedp.flower.roster import Roster
from sparsedp.results import Result

logger = logging.getLogger("sparsedp")


@final
class SparseDPStrategy(Strategy):
    """Runs a `FederatedTrainer`'s plan over Flower's grid: `strategy.start(grid)`.

    Args:
        trainer: holds plan, ledger and model; its number of units is the number of clients.
        patience: seconds to wait for that many clients at the start.
        on_round: called with the number of every round, from 1, and its report, which names clients that took part:
            for the operator alone.

    **Privacy.** Clients are picked by coins, not by Flower's fixed-size sampling; the noise is the trainer's. Its
    `DifferentialPrivacy...` wrappers around this strategy are refused: they would clip and noise a second time, by
    rules that no ledger knows. The log names no clients, since who took part is private.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        patience: float = 600.0,
        on_round: Callable[[int, RoundReport], None] | None = None,
    ) -> None:
        self._trainer, self._patience = trainer, patience
        self._roster = Roster(trainer.plan.units)
        self._round: Round | None = None
        self._on_round = on_round
        self._started = False
        self.result: Result | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        **unused: Any,
    ) -> FlowerResult:
        """Run all rounds that the plan still has, and finish the run.

        Args:
            grid: Flower's.
            initial_arrays: nothing; the trainer has the model.
            num_rounds: nothing; the plan says how many.
            timeout: seconds to wait for the answers of a round; who is later counts as dropped out.
            unused: nothing; evaluation is the trainer's.
        """
        given = [name for name, value in unused.items() if value is not None]
        if initial_arrays is not None or num_rounds is not None or given:
            raise SparseDPError(
                "start: got initial_arrays, num_rounds or configurations, expected grid and timeout alone: model, "
                "number of rounds and evaluation are the trainer's"
            )
        trainer = self._trainer
        self._wait_for_clients(grid)
        self._started = True
        with trainer:
            result = super().start(grid, ArrayRecord(), trainer.rounds_left, timeout)
            self.result = trainer.finish()
        result.arrays = ArrayRecord(trainer.model.state_dict())
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round's tasks to those clients that are there."""
        if not self._started:
            raise PrivacyError(
                "run the strategy by its own start(grid); Flower's DifferentialPrivacy wrappers around it must stay "
                "off: sparsedp clips and adds the noise itself, and pays for it"
            )
        self._roster.update(grid.get_node_ids())
        self._round = self._trainer.begin()
        wire = self._round.task.to_wire()
        nodes = [self._roster.node(number) for number in self._round.clients]
        return [
            Message(to_records(wire), node, MessageType.TRAIN, group_id=str(server_round))
            for node in nodes
            if node is not None
        ]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Complete the round from what came back."""
        assert self._round is not None
        answers = {}
        for reply in replies:
            number = self._roster.number(reply.metadata.src_node_id)
            if number is not None:
                answers[number] = (
                    f"Flower says: {in_one_line(reply.error.reason)}"
                    if reply.has_error()
                    else read_answer(reply.content)
                )
        report = self._trainer.complete(self._round, answers)
        if self._on_round is not None:
            self._on_round(self._round.step + 1, report)
        return None, MetricRecord({"sent_by_a_client": self._round.task.size})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: what clients say about a model on their data is not covered by the plan."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Nothing."""

    def summary(self) -> None:
        """Say what is promised."""
        plan = self._trainer.plan
        logger.info(
            "%s: %d rounds of %g of %d clients on average; epsilon %s at delta %s for each client",
            plan.method,
            plan.total_steps,
            plan.expected_batch_size(plan.training[0]),
            plan.units,
            plan.target_epsilon,
            plan.delta,
        )

    def _wait_for_clients(self, grid: Grid) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            self._roster.update(grid.get_node_ids())
            if self._roster.is_full:
                return
            if time.monotonic() > deadline:
                raise SparseDPError(
                    f"got {self._roster.present} clients after {self._patience:g} s, expected {self._roster.size}: "
                    "the plan's units. Start the others, or make a plan for fewer"
                )
            time.sleep(0.5)


def server_app(
    make_trainer: Callable[[Context], FederatedTrainer],
    timeout: float = 3600,
) -> ServerApp:
    """A `ServerApp` that runs the trainer made from Flower's context; timeout as for the strategy."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        SparseDPStrategy(make_trainer(context)).start(grid, timeout=timeout)

    return app
