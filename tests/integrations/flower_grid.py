"""Flower's own messages, records and apps, without its network: every message is handled in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """Hands each message to the `ClientApp` of its node; `drops` says which nodes do not answer in which round."""

    def __init__(
        self, app: ClientApp, nodes: int, drops: Callable[[int, str], bool] = lambda node, group: False
    ):
        self._app, self._drops = app, drops
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as Flower does for a process
        self.contexts = {
            1000 + i: Context(1, 1000 + i, {"partition-id": i, "num-partitions": nodes}, RecordDict(), {})
            for i in range(nodes)
        }
        self.bytes: list[tuple[int | None, int | None]] = []
        self.contents: list[RecordDict] = []
        self.errors: list[str] = []

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        return [reply for message in messages if (reply := self._handle(message)) is not None]

    def _handle(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if self._drops(node, message.metadata.group_id):
            return None
        message.content = recorddict_from_proto(recorddict_to_proto(message.content))
        sent = counted(message.content)
        try:
            reply = self._app(message, self.contexts[node])
        except Exception as error:
            self.errors.append(str(error))
            return Message(Error(code=0, reason=str(error)), reply_to=message)
        self.bytes.append((sent, counted(reply.content)))
        self.contents.append(reply.content)
        return reply


def counted(content: RecordDict) -> int:
    """Flower's own count of bytes."""
    return sum(record.count_bytes() for record in content.values())
