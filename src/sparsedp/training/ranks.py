"""What ranks compare before a run and while it goes on, and which units each of them takes."""

from __future__ import annotations

import re
import secrets
from hashlib import blake2b
from itertools import combinations
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from sparsedp import distributed
from sparsedp._files import Json
from sparsedp.batch import Batch
from sparsedp.errors import DataError
from sparsedp.loading import Collate, DataConfig, rows_in_order
from sparsedp.parameters import Support
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import PublicRandomness, fork_generators
from sparsedp.runs.checkpoint import Checkpoint
from sparsedp.runs.record import versions
from sparsedp.sampling import UnitPartition
from sparsedp.validation.state import tensor_digest

COMPARED_ROWS = 64
"""Rows that ranks compare, of a data set that all of them hold."""
COMPARED_ROWS_OF_A_SHARD = 256
"""Rows that ranks compare, from the first on, of data sets that they hold each for itself."""
_ITS_OWN = re.compile(r"0x[0-9a-f]+|GPU \d+|cuda:\d+")


def partition_of(dataset: Dataset[Any], loading: DataConfig, saved: Checkpoint | None) -> UnitPartition:
    """Which units this rank draws; a run begun by several ranks is cut in the same way by one."""
    units = None if loading.unit_ids is None else np.unique(np.asarray(loading.unit_ids))
    if loading.sharded and units is None:
        refuse_shared_rows(dataset, loading.collate_fn)
    for (one, held_there), (other, held_here) in combinations(
        enumerate(distributed.gather(units) if loading.sharded and units is not None else ()), 2
    ):
        if len(np.intersect1d(held_there, held_here)):
            raise DataError(
                f"ranks {one} and {other} both hold rows of one unit, which would be drawn twice; put all rows "
                "of a unit on one rank"
            )
    held = len(cast("Any", dataset)) if units is None else len(units)
    if not distributed.is_distributed():
        return UnitPartition(in_blocks=saved is not None and saved.state.get("cut") == "blocks")
    return UnitPartition(
        distributed.rank(),
        distributed.world_size(),
        in_blocks=True,
        shard_sizes=tuple(distributed.gather(held)) if loading.sharded else None,
    )


def refuse_shared_rows(dataset: Dataset[Any], collate: Collate | None) -> None:
    """Refuse shards, whose rows are the units, that are copies of each other.

    Ranks compare digests of their first rows, under a key that is drawn for this and kept nowhere.
    Edge cases: Two equal rows may be two people. So two shards are refused if all compared rows are the same, in
    whatever order, or if more than half of the rows that one has only once are in the other.
    """
    if distributed.world_size() == 1:
        return
    key = distributed.broadcast_from_main(lambda: secrets.token_bytes(32))
    held = distributed.gather(distributed.all_or_raise(lambda: _row_digests(dataset, collate, key)))
    for one, other in combinations(range(len(held)), 2):
        if _are_copies(held[one], held[other]):
            raise DataError(
                f"ranks {one} and {other} hold the same rows, which would be drawn twice; with sharded=True each "
                "rank gives its own rows alone. Cut the data first, or give all on every rank and leave sharded out"
            )


def _row_digests(dataset: Dataset[Any], collate: Collate | None, key: bytes) -> list[bytes]:
    found: list[bytes] = []
    size = min(len(cast("Any", dataset)), COMPARED_ROWS_OF_A_SHARD)
    with fork_generators(PublicRandomness(0).generator_seed(()), torch.device("cpu")):
        for rows in rows_in_order(dataset, size, COMPARED_ROWS_OF_A_SHARD, collate):
            plain = [
                leaf.detach().to_dense().cpu().contiguous().view(len(leaf), -1).view(torch.uint8).numpy()
                for leaf in pytree.tree_leaves(rows)
                if isinstance(leaf, Tensor) and leaf.numel()
            ]
            for parts in zip(*plain, strict=True):
                content = b"".join(part.tobytes() for part in parts)
                found.append(blake2b(content, key=key, digest_size=8).digest())
    return found


def _are_copies(one: list[bytes], other: list[bytes]) -> bool:
    if not one or not other:
        return False
    once = [{row for row in rows if rows.count(row) == 1} for rows in (one, other)]
    return sorted(one) == sorted(other) or 2 * len(once[0] & once[1]) > min(len(one), len(other))


def first_facts(
    plan: Plan, model: nn.Module, dataset: Dataset[Any], loss: Any, loading: DataConfig, seed: int | None
) -> dict[str, Json]:
    """What must be the same before anything can be sent: plan, model, loss, amount of data, versions.

    What a weight does depends on the model's tensors, on which of them are trained, and on its parts.
    """
    units = None
    if not loading.sharded and loading.unit_ids is not None:
        ids = np.ascontiguousarray(np.asarray(loading.unit_ids))
        units = blake2b(ids.tobytes(), digest_size=16).hexdigest()
    return {
        "plan": plan.fingerprint,
        "model": {
            name: [*value.shape, str(value.dtype)]
            for name, value in [*model.named_parameters(), *model.named_buffers()]
        },
        "trained": [name for name, value in model.named_parameters() if value.requires_grad],
        # Class and settings, without what each process has its own of: addresses and devices.
        "parts": {
            name: f"{type(part).__qualname__}({_ITS_OWN.sub('', part.extra_repr())})"
            for name, part in model.named_modules()
        },
        "training": [name for name, part in model.named_modules() if part.training],
        "loss": getattr(loss, "__qualname__", type(loss).__qualname__),
        "rows": None if loading.sharded else len(cast("Any", dataset)),
        "units": units,
        "sharded": loading.sharded,
        "max_physical_batch": loading.max_physical_batch,
        "seed": seed,
        "threads": None if seed is None else torch.get_num_threads(),
        "versions": dict(versions()),
    }


def data_facts(rows: Batch, loading: DataConfig) -> dict[str, Json]:
    """A digest of some rows that all ranks hold; nothing where each has its own."""
    if loading.sharded:
        return {}
    leaves = [leaf for leaf in pytree.tree_leaves(rows) if isinstance(leaf, Tensor)]
    return {"data": blake2b(b"".join(tensor_digest(leaf) for leaf in leaves), digest_size=16).hexdigest()}


def weight_facts(model: nn.Module, support: Support, position: int) -> dict[str, Json]:
    """Digests of the weights and of the support, and how far the run has got."""
    state = [*model.named_parameters(), *model.named_buffers()]
    return {
        "step": position,
        "weights": blake2b(b"".join(tensor_digest(value) for _, value in state), digest_size=16).hexdigest(),
        "support": tensor_digest(support.indices).hex(),
    }
