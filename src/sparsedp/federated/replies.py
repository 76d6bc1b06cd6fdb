"""What came back from the clients: what is an update, and what is refused, by client and with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from sparsedp.federated.rounds import Refusal, Round
from sparsedp.federated.task import Task
from sparsedp.privacy.queries import is_within

Answers = Mapping[int, Tensor | str]
"""By client: its update, or why it has none."""


class SortedOut(NamedTuple):
    """The updates that count, and what was wrong with the others. Private."""

    updates: dict[int, Tensor]
    refused: tuple[Refusal, ...]


def sort_out(round_: Round, answers: Answers) -> SortedOut:
    """Tell updates from what is none. One that is too long counts, shortened by the mechanism, and is named.

    **Privacy.** Whether a client's answer counts depends on that answer alone.
    """
    updates: dict[int, Tensor] = {}
    refused: list[Refusal] = []
    for client, answer in sorted(answers.items()):
        why = "it was not picked" if client not in round_.clients else _wrong(answer, round_.task)
        if why is not None:
            refused.append(Refusal(client, f"refused: {why}"))
            continue
        assert isinstance(answer, Tensor)
        updates[client] = answer
        if not is_within(answer, round_.task.grid):
            refused.append(
                Refusal(
                    client, f"shortened: its update is longer than the clip norm {round_.task.clip.norm:g}"
                )
            )
    return SortedOut(updates, tuple(refused))


def _wrong(answer: Tensor | str, task: Task) -> str | None:
    if not isinstance(answer, Tensor):
        return str(answer)
    if answer.shape != (task.size,):
        return f"got an update of shape {tuple(answer.shape)}, expected ({task.size},)"
    if answer.dtype != task.integers:
        found = "numbers that are not integers" if answer.is_floating_point() else f"{answer.dtype}"
        return f"got {found}, expected {task.integers}"
    return None
