"""What the ranks of a run compare before the first charge, and at every checkpoint."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from sparsedp.core.batch import Rows
from sparsedp.core.errors import DataError
from sparsedp.core.files import Json
from sparsedp.core.support import Support
from sparsedp.guards.guard import digest
from sparsedp.privacy.plan import Plan
from sparsedp.ranks.one import Ranks
from sparsedp.runs.checkpoint import Checkpoint
from sparsedp.runs.record import versions
from sparsedp.sampling.sharing import EVERYTHING, Blocks, Share
from sparsedp.training.batches import Loading

LOOKED_AT = 64
"""Rows of a data set that ranks compare, of those that all of them hold."""
CUT, IN_BLOCKS = "cut", "blocks"
"""Under which name a checkpoint says that batches are cut for several ranks; a run goes on as it was begun."""


def share_of(ranks: Ranks, dataset: Dataset[Any], loading: Loading, saved: Checkpoint | None) -> Share:
    """Which units this rank draws; a run begun by several ranks is cut in the same way by one.

    Raises:
        DataError: two ranks hold rows of one unit, so it would be drawn twice.
    """
    units = None if loading.units is None else np.unique(np.asarray(loading.units))
    if loading.sharded and units is not None:
        _refuse_shared_units(ranks.gather(units))
    held = len(cast("Any", dataset)) if units is None else len(units)
    share = ranks.share(held, sharded=loading.sharded)
    goes_on_in_blocks = saved is not None and saved.state.get(CUT) == IN_BLOCKS
    return Blocks(0, 1) if share is EVERYTHING and goes_on_in_blocks else share


def _refuse_shared_units(held: list[np.ndarray[Any, Any]]) -> None:
    for rank, units in enumerate(held):
        for other in range(rank):
            if len(np.intersect1d(units, held[other])):
                raise DataError(
                    f"ranks {other} and {rank} both hold rows of one unit, which would be drawn twice; put all rows "
                    "of a unit on one rank"
                )


def first_facts(
    plan: Plan, model: nn.Module, dataset: Dataset[Any], loading: Loading, seed: int | None
) -> dict[str, Json]:
    """What must be the same before anything can be sent: plan, shapes of the model, amount of data, versions."""
    return {
        "plan": plan.fingerprint,
        "model": {
            name: list(value.shape) for name, value in [*model.named_parameters(), *model.named_buffers()]
        },
        "trained": [name for name, value in model.named_parameters() if value.requires_grad],
        "rows": None if loading.sharded else len(cast("Any", dataset)),
        "units": None if loading.sharded or loading.units is None else _hash_of(np.asarray(loading.units)),
        "sharded": loading.sharded,
        "max_physical_batch": loading.max_physical_batch,
        "seed": seed,
        "versions": dict(versions()),
    }


def data_facts(rows: Rows, loading: Loading) -> dict[str, Json]:
    """A digest of some rows that all ranks hold; nothing where each has its own."""
    if loading.sharded:
        return {}
    leaves = [leaf for leaf in pytree.tree_leaves(rows) if isinstance(leaf, Tensor)]
    return {"data": blake2b(b"".join(digest(leaf) for leaf in leaves), digest_size=16).hexdigest()}


def weight_facts(model: nn.Module, support: Support, position: int) -> dict[str, Json]:
    """Digests of the weights and of the support, and how far the run has got."""
    state = [*model.named_parameters(), *model.named_buffers()]
    return {
        "step": position,
        "weights": blake2b(b"".join(digest(value) for _, value in state), digest_size=16).hexdigest(),
        "support": digest(support.indices).hex(),
    }


def _hash_of(values: np.ndarray[Any, Any]) -> str:
    return blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()
