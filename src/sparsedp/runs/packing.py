"""Nested Python state as named tensors plus JSON, and back to the same values. No pickle."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from sparsedp._files import Json
from sparsedp.errors import DataError, SparseDPError

Tensors = dict[str, Tensor]


def pack(value: Any, tensors: Tensors, path: str) -> Json:
    """A JSON tree for `value`, whose tensors are put into `tensors` under names starting with `path`.

    Raises:
        SparseDPError: the state holds something that is not plain data.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"$tensor": path}
    if isinstance(value, list):
        return [pack(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": pack(list(value), tensors, path)}
    if isinstance(value, Counter):
        return {"$counter": pack(dict(value), tensors, path)}
    if isinstance(value, dict):
        return _pack_dict(value, tensors, path)
    raise SparseDPError(
        f"cannot save {path}: it holds a {type(value).__name__}, and checkpoints keep only tensors, numbers, "
        "strings, lists and dicts (never pickle)"
    )


def unpack(tree: Json, tensors: Tensors) -> Any:
    """The value `pack` was given."""
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (tag, content), *_ = tree.items()
        if tag == "$tensor":
            if content not in tensors:
                raise DataError(f"the checkpoint lacks the tensor {content!r}; it is damaged")
            return tensors[content]
        if tag == "$float":
            return float(content)
        if tag == "$tuple":
            return tuple(unpack(content, tensors))
        if tag == "$counter":
            return Counter(unpack(content, tensors))
        if tag == "$items":
            return {_scalar_key(key): unpack(item, tensors) for key, item in content}
    return {key: unpack(item, tensors) for key, item in tree.items()}


def same_tensors(one: Tensors, other: Tensors) -> bool:
    """Whether two sets of named tensors are equal to the bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def _pack_dict(value: dict[Any, Any], tensors: Tensors, path: str) -> Json:
    packed = [(key, pack(item, tensors, f"{path}/{key}")) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in packed):
        return dict(packed)
    return {"$items": [[_scalar_key(key), item] for key, item in packed]}


def _scalar_key(key: Any) -> Any:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise SparseDPError(f"cannot save a dict with the key {key!r}; keys must be strings or whole numbers")
    return key
