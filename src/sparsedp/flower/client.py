"""The `ClientApp`: takes a task, trains at home, sends integers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from sparsedp.errors import SparseDPError
from sparsedp.federated import Client, Task
from sparsedp.federated.task import Wire
from sparsedp.flower.records import from_records, refusal_wire, to_records, update_wire
from sparsedp.flower.refusals import check_mods

logger = logging.getLogger("sparsedp")


def client_app(make_client: Callable[[Context], Client], mods: Sequence[Any] = ()) -> ClientApp:
    """A `ClientApp` whose clients are made by a function of Flower's context (`context.node_config["partition-id"]`).

    Args:
        make_client: called for every round a client takes part in.
        mods: Flower's. Those that clip or add noise are refused.

    **Privacy.** The client clips before it sends. An error of its training is told to the server by its type alone:
    an error's words may quote the data.
    """
    check_mods(mods)
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(to_records(_answer(from_records(message.content), context)), reply_to=message)

    def _answer(wire: Wire, context: Context) -> Wire:
        try:
            return update_wire(make_client(context).answer(Task.from_wire(wire)))
        except SparseDPError as error:
            return refusal_wire(str(error))
        except Exception as error:
            return refusal_wire(_without_words(error))

    return app


def _without_words(error: Exception) -> str:
    """What the server may hear of an error; all of it is in the client's own log, if that shows debug messages."""
    logger.debug("training failed", exc_info=error)
    return f"its training failed ({type(error).__name__})"
