"""The `ClientApp`: takes a task, trains at home, sends integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from sparsedp.core.errors import SparseDPError
from sparsedp.federated import Client, Task
from sparsedp.federated.task import Wire
from sparsedp.flower.records import from_records, keep, kept, refusal_wire, to_records, update_wire
from sparsedp.flower.refusals import check_mods


def client_app(make_client: Callable[[Context], Client], mods: Sequence[Any] = ()) -> ClientApp:
    """A `ClientApp` whose clients are made by a function of Flower's context (`context.node_config["partition-id"]`).

    Args:
        make_client: called for every round a client takes part in.
        mods: Flower's; those that clip or add noise are refused.

    **Privacy.** The client clips before it sends. An error of its training is told to the server by its type alone:
    an error's words may quote the data.
    """
    check_mods(mods)
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        wire = _answer(message, context)
        return Message(to_records(wire), reply_to=message)

    def _answer(message: Message, context: Context) -> Wire:
        try:
            task = Task.from_wire(from_records(message.content))
            update, held = make_client(context).answer(task, kept(context.state))
        except SparseDPError as error:
            return refusal_wire(str(error))
        except Exception as error:
            return refusal_wire(f"its training failed ({type(error).__name__})")
        keep(context.state, held)
        return update_wire(update)

    return app
