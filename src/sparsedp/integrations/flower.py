"""Federated training over Flower: a strategy for its `ServerApp`, and a `ClientApp`. Needs `sparsedp[flower]`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result as FlowerResult
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.federated import Client, ClientTask, FederatedTrainer, Payload, Round, RoundReport
from sparsedp.results import Result

logger = logging.getLogger("sparsedp")

LONGEST = 300
"""Characters of a client's words that reach the operator, in one line."""
_ARRAYS, _VALUES = "sparsedp.arrays", "sparsedp.values"
_UPDATE, _REASON = "update", "reason"


def client_app(make_client: Callable[[Context], Client], mods: Sequence[Any] = ()) -> ClientApp:
    """Make a `ClientApp` whose clients come from a function of Flower's context.

    Args:
        make_client: called for every round a client takes part in; `context.node_config["partition-id"]` says which.
        mods: Flower's. Those that clip or add noise are refused.

    Formal guarantees:
        The client clips before it sends. An error of its training is told to the server by its type alone: an error's
        words may quote the data.
    """
    _refuse_private_mods(mods)
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(to_records(_answer(from_records(message.content), context)), reply_to=message)

    def _answer(payload: Payload, context: Context) -> Payload:
        try:
            update = make_client(context).answer(ClientTask.from_payload(payload))
            return Payload({_UPDATE: update.numpy()}, {})
        except SparseDPError as error:
            return Payload({}, {_REASON: str(error)})
        except Exception as error:
            logger.debug("training failed", exc_info=error)  # the client's own log
            return Payload({}, {_REASON: f"its training failed ({type(error).__name__})"})

    return app


def server_app(make_trainer: Callable[[Context], FederatedTrainer], timeout: float = 3600) -> ServerApp:
    """Make a `ServerApp` that runs the trainer made from Flower's context; timeout as for the strategy."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        SparseDPStrategy(make_trainer(context)).start(grid, timeout=timeout)

    return app


@final
class SparseDPStrategy(Strategy):
    """Runs a `FederatedTrainer`'s plan over Flower's grid: `strategy.start(grid)`.

    Args:
        trainer: holds plan, ledger and model; its number of units is the number of clients.
        connect_timeout: seconds to wait for that many clients at the start.
        on_round: called with the number of every round, from 1, and its report, which names clients that took part:
            for the operator alone.

    Formal guarantees:
        Clients are sampled by coins, not by Flower's fixed-size sampling; the noise is the trainer's. Flower's
        `DifferentialPrivacy...` wrappers around this strategy are refused: they would clip and noise a second time,
        by rules that no ledger knows. The log names no clients, since who took part is private.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        connect_timeout: float = 600.0,
        on_round: Callable[[int, RoundReport], None] | None = None,
    ) -> None:
        self._trainer, self._connect_timeout = trainer, connect_timeout
        self._clients = ClientRegistry(trainer.plan.units)
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
            timeout: seconds to wait for the answers of a round; who is later counts as missing.
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
        """Make the messages of a round's task to those sampled clients that are connected."""
        if not self._started:
            raise PrivacyError(
                "run the strategy by its own start(grid); Flower's DifferentialPrivacy wrappers around it must stay "
                "off: sparsedp clips and adds the noise itself, and pays for it"
            )
        self._clients.update(grid.get_node_ids())
        self._round = self._trainer.configure_round()
        payload = self._round.task.to_payload()
        return [
            Message(to_records(payload), node, MessageType.TRAIN, group_id=str(server_round))
            for number in self._round.clients
            if (node := self._clients.node_of.get(number)) is not None
        ]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Complete the round from what came back."""
        assert self._round is not None
        answers: dict[int, Tensor | str] = {}
        for reply in replies:
            number = self._clients.number_of.get(reply.metadata.src_node_id)
            if number is not None:
                answers[number] = (
                    f"Flower says: {_in_one_line(reply.error.reason)}"
                    if reply.has_error()
                    else read_answer(reply.content)
                )
        report = self._trainer.aggregate(self._round, answers)
        if self._on_round is not None:
            self._on_round(self._round.step + 1, report)
        return None, MetricRecord({"numbers_sent": self._round.task.size})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nothing: what clients say about a model on their data is not covered by the plan."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Do nothing."""

    def summary(self) -> None:
        """Log what is promised."""
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
        deadline = time.monotonic() + self._connect_timeout
        while True:
            self._clients.update(grid.get_node_ids())
            found, expected = len(self._clients.number_of), self._clients.size
            if found == expected:
                return
            if time.monotonic() > deadline:
                raise SparseDPError(
                    f"got {found} clients after {self._connect_timeout:g} s, expected {expected}: the plan's units. "
                    "Start the others, or make a plan for fewer"
                )
            time.sleep(0.5)


@final
class ClientRegistry:
    """Which Flower node is which client of the plan: a node has a number as long as it is connected.

    Formal guarantees:
        The number of clients is public and fixed. A node beyond it is not asked; one that comes for one that left
        takes its number, and so its coin.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.number_of: dict[int, int] = {}
        self.node_of: dict[int, int] = {}

    def update(self, nodes: Iterable[int]) -> None:
        """Take note of which nodes are connected."""
        connected = sorted(nodes)
        known = set(connected)
        self.number_of = {node: number for node, number in self.number_of.items() if node in known}
        free = iter(sorted(set(range(self.size)) - set(self.number_of.values())))
        for node in connected:
            if node not in self.number_of and (number := next(free, None)) is not None:
                self.number_of[node] = number
        self.node_of = {number: node for node, number in self.number_of.items()}
        if len(connected) > self.size:
            logger.warning("%d nodes are connected and the plan has %d clients", len(connected), self.size)


def to_records(payload: Payload) -> RecordDict:
    """Write a payload as a message's content."""
    arrays = ArrayRecord({name: Array(array) for name, array in payload.arrays.items()})
    return RecordDict({_ARRAYS: arrays, _VALUES: ConfigRecord(dict(payload.values))})


def from_records(content: RecordDict) -> Payload:
    """Read what `to_records` wrote."""
    arrays = {name: array.numpy() for name, array in content.array_records[_ARRAYS].items()}
    return Payload(arrays, dict(content.config_records[_VALUES]))


def read_answer(content: RecordDict) -> Tensor | str:
    """Read an update, or why there is none. Nothing that a client can send makes it raise."""
    try:
        payload = from_records(content)
        if _REASON in payload.values:
            return _in_one_line(str(payload.values[_REASON]))
        return torch.from_numpy(payload.arrays[_UPDATE].copy())
    except Exception as error:
        return f"its answer cannot be read ({type(error).__name__})"


def _in_one_line(words: str) -> str:
    return " ".join(words.split())[:LONGEST]


def _refuse_private_mods(mods: Sequence[Any]) -> None:
    """Refuse Flower's mods that clip or noise what a client sends: clipping and noise have one place each."""
    private = [
        mod for mod in mods if isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod)
    ]
    if private:
        names = [getattr(mod, "__name__", type(mod).__name__) for mod in private]
        raise PrivacyError(
            f"mods: got {names}, which change updates by rules that no ledger knows; leave them out. sparsedp clips "
            "at the client and again at the server, and adds the noise at the server"
        )
