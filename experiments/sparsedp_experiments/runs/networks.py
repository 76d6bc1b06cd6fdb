"""The model of a run: a row of the models table with options, and public initial weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sparsedp.errors import ModelError, SparseDPError
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.models import MODELS

_ACTIVATIONS: Mapping[str, type[nn.Module]] = MappingProxyType(
    {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU, "silu": nn.SiLU}
)
_INITIAL_WEIGHTS = (0, 0, 1)
"""Key of the public randomness; the trainer's keys have two numbers."""


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a model that is not in the table, or options it does not take.

    Raises:
        ModelError: with the names there are.
    """
    if name not in MODELS:
        raise ModelError(f"no model named {name!r}; there are {', '.join(MODELS)}")
    known = sorted(set(inspect.signature(MODELS[name].build).parameters) - {"input_shape", "classes"})
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ModelError(f"model_options: {name} knows no {unknown}; expected some of {known}")
    _arguments(options)


def build_model(
    name: str,
    options: Mapping[str, Any],
    input_shape: tuple[int, ...],
    classes: int,
    seed: int | None,
    vocabulary: int | None = None,
) -> nn.Module:
    """A fresh model. Its initial weights are public: from the seed, or from a new public one.

    A model that looks ids up gets the data's `vocabulary`, unless its options name one.
    """
    check_model(name, options)
    if vocabulary is not None and "vocabulary" in inspect.signature(MODELS[name].build).parameters:
        options = {"vocabulary": vocabulary, **options}
    public = PublicRandomness.fresh() if seed is None else PublicRandomness(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(public.torch_seed(_INITIAL_WEIGHTS))
        build: Any = MODELS[name].build
        try:
            made: nn.Module = build(input_shape, classes, **_arguments(options))
        except (TypeError, ValueError, RuntimeError) as error:
            if not options:
                raise
            raise ModelError(
                f"model_options: {name} cannot be built with {dict(options)} ({error})"
            ) from error
    return made


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as Python values: activations by name, lists as tuples."""
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in dict(options).items()
    }
    if "activation" in found:
        if found["activation"] not in _ACTIVATIONS:
            raise SparseDPError(
                f"activation: got {found['activation']!r}, expected one of {', '.join(_ACTIVATIONS)}"
            )
        found["activation"] = _ACTIVATIONS[found["activation"]]
    return found
