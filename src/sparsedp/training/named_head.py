"""Whether "head" and "last=n", which go by the order of registration, mean what makes the model's output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from torch import nn

from sparsedp.core.batch import PerSampleLoss, Rows, to_device
from sparsedp.core.errors import ModelError
from sparsedp.core.generators import SEED_BYTES, own_generators
from sparsedp.core.layout import Layout
from sparsedp.grad_sample.last_used import LastUsed, used_last
from sparsedp.methods.scope import counts_from_the_end, find

logger = logging.getLogger("sparsedp")

MOST_NAMES = 6
"""Of parameters in a message."""


def check_last_modules(
    words: Iterable[str], model: nn.Module, loss: PerSampleLoss, layout: Layout, one_row: Callable[[], Rows]
) -> None:
    """Look at which parameters a loss uses last, if any of the words depends on that; say which ones they mean.

    **Privacy.** Like other trials before the first step it looks at a row; it tells names of parameters alone.

    Raises:
        ModelError: the modules registered last are not the last ones in use. Both by name.
    """
    asked = [word for word in dict.fromkeys(words) if counts_from_the_end(word)]
    if not asked:
        return
    device = next(model.parameters()).device
    with own_generators(bytes(SEED_BYTES), device):
        last = used_last(model, loss, to_device(one_row(), device))
    for word in asked:
        _check(word, frozenset(slot.name for slot in find(layout, (word,), "scope")), last, layout)


def _check(word: str, meant: frozenset[str], last: LastUsed, layout: Layout) -> None:
    def listed(names: frozenset[str]) -> list[str]:
        return [slot.name for slot in layout if slot.name in names][:MOST_NAMES]

    if beyond := last.beyond(meant):
        raise ModelError(
            f'"{word}" means what is registered last in the model, {listed(meant)}, but its output is made by '
            f"{listed(beyond)}{_of(last)}; expected the same: register that module last, or give the names of the "
            f"parameters you mean in place of the word, such as MethodOptions(scope={tuple(listed(beyond))})"
        )
    logger.info('"%s" means %s', word, listed(meant))
    beside = frozenset(name for names in last.layers.values() if not names & meant for name in names)
    if beside:
        logger.warning(
            '"%s" means %s alone, and %s also make the output; give the names of all that you mean if that is more',
            word, listed(meant), listed(beside),
        )  # fmt: skip


def _of(last: LastUsed) -> str:
    """The one last layer by name: tied weights do not tell it."""
    named = [name for name in last.layers if name]
    return f" (module {named[0]!r})" if len(last.layers) == 1 and named and not last.bare else ""
