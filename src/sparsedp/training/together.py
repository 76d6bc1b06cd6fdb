"""What the ranks of a run compare before the first charge, and at every checkpoint."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from sparsedp._files import Json
from sparsedp.batch import Rows
from sparsedp.parameters import Support
from sparsedp.privacy.plan import Plan
from sparsedp.ranks.one import Ranks
from sparsedp.ranks.shards import refuse_shared_rows, refuse_shared_units
from sparsedp.runs.checkpoint import Checkpoint
from sparsedp.runs.record import versions
from sparsedp.runs.state import is_cut_in_blocks
from sparsedp.sampling.loading import Loading
from sparsedp.sampling.sharing import EVERYTHING, Blocks, Share
from sparsedp.validation.state import tensor_digest

LOOKED_AT = 64
"""Rows of a data set that ranks compare, of those that all of them hold."""
_ITS_OWN = re.compile(r"0x[0-9a-f]+|GPU \d+|cuda:\d+")


def share_of(ranks: Ranks, dataset: Dataset[Any], loading: Loading, saved: Checkpoint | None) -> Share:
    """Which units this rank draws; a run begun by several ranks is cut in the same way by one.

    Raises:
        DataError: two ranks hold rows of one unit, or the same rows, which would be drawn twice.
    """
    units = None if loading.units is None else np.unique(np.asarray(loading.units))
    if loading.sharded and units is not None:
        refuse_shared_units(ranks, units)
    elif loading.sharded:
        refuse_shared_rows(ranks, dataset, loading.collate)
    held = len(cast("Any", dataset)) if units is None else len(units)
    share = ranks.share(held, sharded=loading.sharded)
    goes_on_in_blocks = saved is not None and is_cut_in_blocks(saved)
    return Blocks(0, 1) if share is EVERYTHING and goes_on_in_blocks else share


def same_model(ranks: Ranks, model: nn.Module) -> None:
    """Give all ranks the leader's weights, once they have the same model."""
    ranks.alike(lambda: _model_facts(model))
    ranks.align(model)


def _model_facts(model: nn.Module) -> dict[str, Json]:
    """Its tensors, which of them are trained, and its parts in words: what a weight does depends on those."""
    return {
        "model": {
            name: [*value.shape, str(value.dtype)]
            for name, value in [*model.named_parameters(), *model.named_buffers()]
        },
        "trained": [name for name, value in model.named_parameters() if value.requires_grad],
        "parts": {name: _in_words(part) for name, part in model.named_modules()},
        "training": [name for name, part in model.named_modules() if part.training],
    }


def _in_words(part: nn.Module) -> str:
    """Class and settings, as PyTorch shows them, without what each process has its own of: addresses and devices."""
    return f"{type(part).__qualname__}({_ITS_OWN.sub('', part.extra_repr())})"


def first_facts(
    plan: Plan, model: nn.Module, dataset: Dataset[Any], loss: Any, loading: Loading, seed: int | None
) -> dict[str, Json]:
    """What must be the same before anything can be sent: plan, model, loss, amount of data, versions."""
    return {
        "plan": plan.fingerprint,
        **_model_facts(model),
        "loss": getattr(loss, "__qualname__", type(loss).__qualname__),
        "rows": None if loading.sharded else len(cast("Any", dataset)),
        "units": None if loading.sharded or loading.units is None else _hash_of(np.asarray(loading.units)),
        "sharded": loading.sharded,
        "max_physical_batch": loading.max_physical_batch,
        "seed": seed,
        "threads": None if seed is None else torch.get_num_threads(),
        "versions": dict(versions()),
    }


def data_facts(rows: Rows, loading: Loading) -> dict[str, Json]:
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


def _hash_of(values: np.ndarray[Any, Any]) -> str:
    return blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()
