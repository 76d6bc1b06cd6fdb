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
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result as FlowerResult
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.federated import Client, ClientTask, FederatedTrainer, Payload, Round, RoundReport
from sparsedp.guarantee import guarantee
from sparsedp.results import Result

logger = logging.getLogger("sparsedp")

LONGEST = 300
"""Characters of a client's words that reach the operator, in one line."""
_ARRAYS, _VALUES = "sparsedp.arrays", "sparsedp.values"
_UPDATE, _REASON = "update", "reason"


def client_app(make_client: Callable[[Context], Client], mods: Sequence[Any] = ()) -> ClientApp:
    """Make a `ClientApp` whose clients come from a function of Flower's context, called in every round.

    `context.node_config["partition-id"]` says which client it is. Flower's mods that clip or add noise are refused.

    Formal guarantees: The client clips before it sends. An error of its training is told to the server by its type
    alone: an error's words may quote the data.
    """
    for mod in mods:
        if isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod):
            raise PrivacyError(
                f"mods: got {mod}, which changes updates by rules that no ledger knows; leave it out. sparsedp clips "
                "at the client and again at the server, and adds the noise at the server"
            )
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


@final
class SparseDPStrategy(Strategy):
    """Runs a `FederatedTrainer`'s plan over Flower's grid: `strategy.start(grid)`.

    The trainer holds plan, ledger and model; its units are the clients, which it waits for `connect_timeout` seconds.
    `on_round` is called with the number of every round, from 1, and its report, which is for the operator alone.

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
        self._number_of: dict[int, int] = {}
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
        """Run all rounds that the plan still has, each for `timeout` seconds at most, and finish the run."""
        if any(given is not None for given in (initial_arrays, num_rounds, *unused.values())):
            raise SparseDPError(
                "start: got initial_arrays, num_rounds or configurations, expected grid and timeout alone: model, "
                "number of rounds and evaluation are the trainer's"
            )
        trainer = self._trainer
        self._wait_for_clients(grid)
        self._started = True
        with trainer:
            result = super().start(grid, ArrayRecord(), trainer.plan.total_steps - trainer.position, timeout)
            self.result = trainer.finish()
        result.arrays = ArrayRecord(trainer.model.state_dict())
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send a round's task to those sampled clients that are connected."""
        if not self._started:
            raise PrivacyError(
                "run the strategy by its own start(grid); Flower's DifferentialPrivacy wrappers around it must stay "
                "off: sparsedp clips and adds the noise itself, and pays for it"
            )
        self._number_nodes(grid)
        self._round = self._trainer.configure_round()
        payload = self._round.task.to_payload()
        node_of = {number: node for node, number in self._number_of.items()}
        return [
            Message(to_records(payload), node_of[number], MessageType.TRAIN, group_id=str(server_round))
            for number in self._round.clients
            if number in node_of
        ]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Complete the round from what came back."""
        assert self._round is not None
        answers: dict[int, Tensor | str] = {}
        for reply in replies:
            number = self._number_of.get(reply.metadata.src_node_id)
            if number is not None:
                wrong = f"Flower says: {_in_one_line(reply.error.reason)}" if reply.has_error() else None
                answers[number] = wrong or read_answer(reply.content)
        report = self._trainer.aggregate(self._round, answers)
        if self._on_round is not None:
            self._on_round(self._round.step + 1, report)
        return None, MetricRecord({"numbers_sent": self._round.task.support.size})

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
            "%s: %d rounds over %d clients. %s", plan.method, plan.total_steps, plan.units, guarantee(plan)
        )

    def _wait_for_clients(self, grid: Grid) -> None:
        deadline, expected = time.monotonic() + self._connect_timeout, self._trainer.plan.units
        while (found := self._number_nodes(grid)) < expected:
            if time.monotonic() > deadline:
                raise SparseDPError(
                    f"got {found} clients after {self._connect_timeout:g} s, expected {expected}: the plan's units. "
                    "Start the others, or make a plan for fewer"
                )
            time.sleep(0.5)

    def _number_nodes(self, grid: Grid) -> int:
        """Say which Flower node is which client of the plan, while it stays, and how many are.

        Formal guarantees: The number of clients is public and fixed. A node beyond it is not asked; one that comes
        for one that left takes its number, and so its coin.
        """
        connected = sorted(grid.get_node_ids())
        known = {node: self._number_of[node] for node in connected if node in self._number_of}
        free = sorted(set(range(self._trainer.plan.units)) - set(known.values()))
        coming = [node for node in connected if node not in known]
        if len(coming) > len(free):
            logger.warning("more nodes are connected than the plan has clients: %d", len(connected))
        self._number_of = known | dict(zip(coming, free, strict=False))
        return len(self._number_of)


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
