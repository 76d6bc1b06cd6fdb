"""The `ClientApp`: takes a task, trains at home, sends integers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from sparsedp.core.errors import SparseDPError
from sparsedp.federated import Client, Task
from sparsedp.federated.task import Wire
from sparsedp.flower.records import from_records, keep, kept, refusal_wire, to_records, update_wire
from sparsedp.flower.refusals import check_mods
from sparsedp.flower.secure import COVER, SECURE, masked_answer

logger = logging.getLogger("sparsedp")


def client_app(make_client: Callable[[Context], Client], mods: Sequence[Any] = ()) -> ClientApp:
    """A `ClientApp` whose clients are made by a function of Flower's context (`context.node_config["partition-id"]`).

    Args:
        make_client: called for every round a client takes part in.
        mods: Flower's; `secaggplus_mod` for secure aggregation. Those that clip or add noise are refused.

    **Privacy.** The client clips before it sends. An error of its training is told to the server by its type alone:
    an error's words may quote the data.
    """
    check_mods(mods)
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        wire = from_records(message.content)
        answer = _masked(wire, context) if SECURE in wire.values else to_records(_answer(wire, context))
        return Message(answer, reply_to=message)

    def _update(wire: Wire, context: Context) -> tuple[Task, Tensor]:
        task = Task.from_wire(wire)
        update, held = make_client(context).answer(task, kept(context.state))
        keep(context.state, held)
        return task, update

    def _answer(wire: Wire, context: Context) -> Wire:
        try:
            return update_wire(_update(wire, context)[1])
        except SparseDPError as error:
            return refusal_wire(str(error))
        except Exception as error:
            return refusal_wire(_without_words(error))

    def _masked(wire: Wire, context: Context) -> RecordDict:
        """For secure aggregation, where a client that cannot answer drops out."""
        if COVER in wire.values:
            task = Task.from_wire(wire)
            return masked_answer(torch.zeros(task.size, dtype=torch.int64), task)
        try:
            task, update = _update(wire, context)
        except Exception as error:
            raise SparseDPError(_without_words(error)) from None  # Flower would tell the server its words
        return masked_answer(update, task)

    return app


def _without_words(error: Exception) -> str:
    """What the server may hear of an error; all of it is in the client's own log, if that shows debug messages."""
    logger.debug("training failed", exc_info=error)
    return f"its training failed ({type(error).__name__})"
