"""Runs a model and its loss one example at a time, vectorised, so that no operation can see two examples.

`torch.func.vmap` gives the model a batch of one, and PyTorch computes all examples together below. What reduces,
sorts or indexes over the batch does so over one example; reading a value (`.item()`, `if tensor:`), shapes that
depend on values, and writes to buffers are errors of PyTorch's own.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call, has_overridden_vmap_rule
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparsedp.batch import Batch, LossFunction, example_count, slice_batch, validate_losses
from sparsedp.errors import ModelError
from sparsedp.randomness import SEED_BYTES, GeneratorMonitor, PublicRandomness, fork_generators

NO_SAVED_TENSOR_HOOKS = (
    "the model hooks the tensors that autograd saves (checkpointing, saved_tensors_hooks), and such a hook would see "
    "all examples at once"
)


class Isolated:
    """A model and its loss on one example at a time: vectorised, or in turn, as made-up examples tell."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self._model, self._loss = model, loss
        self._known: dict[tuple[bool, ...], bool] = {}

    def in_turn(self, rows: Batch) -> bool:
        modes = modes_of(self._model)
        if modes not in self._known:
            self._known[modes] = why_not_isolated(self._model, self._loss, rows) is not None
        return self._known[modes]

    def losses_in_turn(self, rows: Batch) -> Iterator[Tensor]:
        for one in singles(rows):
            with fixed_draws(next(self._model.parameters()).device):
                yield validate_losses(self._loss(self._model, one), 1)


def singles(rows: Batch) -> Iterator[Batch]:
    """One example after the other, as batches of one."""
    return (slice_batch(rows, slice(i, i + 1)) for i in range(example_count(rows)))


def isolated_losses(
    model: nn.Module, loss: LossFunction, rows: Batch, values: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Compute the loss of every example alone: [n], with the graph of the vectorised operations.

    `values` [n, ...] take the place of named parameters, one for each example. What is no tensor is given as it is.

    Formal guarantees: the loss of an example is a function of the example, the parameters and the random numbers
    drawn for it; no operation of the model's has another example among its operands.
    Edge cases: random numbers differ by example. What PyTorch cannot vectorise raises PyTorch's own error.
    """

    def loss_of_one(one: Batch, own: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        return validate_losses(losses_at(model, own, loss, one) if own else loss(model, one), 1)[0]

    losses: Tensor = isolated(model, loss_of_one, rows, *([] if values is None else [dict(values)]))
    return losses


def isolated(model: nn.Module, function: Callable[..., Any], rows: Batch, *more: Any) -> Any:
    """What a function of a batch of one, and its part of `more`, gives for every example alone: [n, ...]."""
    leaves, tree = pytree.tree_flatten(rows)
    batched = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    def of_one(example: Mapping[int, Tensor], *its_own: Any) -> Any:
        alone = [example[i].unsqueeze(0) if i in example else leaf for i, leaf in enumerate(leaves)]
        return function(pytree.tree_unflatten(alone, tree), *its_own)

    with isolation(model):
        return vmap(of_one, randomness="same" if _SAME_DRAWS else "different")(batched, *more)


def why_not_isolated(model: nn.Module, loss: LossFunction, rows: Batch) -> str | None:
    """Say why PyTorch cannot vectorise a model and its loss, or None; forward and backward on made-up examples.

    Of `rows`, structure, shapes and dtypes alone are looked at. Raises the model's own error where it cannot run on
    single made-up examples either.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]

    def single_of(kind: str) -> tuple[str, Batch]:
        single = slice_batch(made_up(rows, 2, kind), slice(1))
        validate_losses(loss(model, single), 1)
        return kind, single

    with torch.enable_grad(), fork_draws(None, parameters[0].device):
        kind, single = on_made_up(single_of)
        if (reason := _looks_below(model, loss, single, parameters[0].device)) is not None:
            return reason
        try:
            losses = isolated_losses(model, loss, made_up(rows, 2, kind))
            torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        except Exception as error:  # whatever PyTorch cannot vectorise
            return re.split(r"\.\s|\n", str(error))[0].strip() or type(error).__name__
    return None


class _OperatorNames(TorchDispatchMode):
    """Notes operators outside PyTorch with a batching rule of their own, and the generator's state at every draw."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self.states: set[bytes] = set()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            raise ModelError(
                f"{func.name()} draws from a torch.Generator of the model's own, so what an example draws depends on "
                "the examples before it; draw from torch's global generator, which is seeded in secret for every step"
            )
        name = func.name()
        has_rule = torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched")
        if has_rule and func.namespace not in ("aten", "prim", "prims"):
            self.found.add(name)
        if torch.Tag.nondeterministic_seeded in func.tags:
            cuda = self._device.type == "cuda"
            state = torch.cuda.get_rng_state(self._device) if cuda else torch.get_rng_state()
            self.states.add(state.numpy().tobytes())
        return func(*args, **kwargs)


def modes_of(model: nn.Module) -> tuple[bool, ...]:
    """Which modules are in training mode: what is known of a model is known of it in these modes."""
    return tuple(module.training for module in model.modules())


def _looks_below(model: nn.Module, loss: LossFunction, single: Batch, device: torch.device) -> str | None:
    """What of a model would be given or would draw for all examples at once, below the vectorised level, or None."""
    modes: list[str] = []
    enter: Any = TorchDispatchMode.__enter__

    def noted(mode: TorchDispatchMode) -> Any:
        modes.append(type(mode).__name__)
        return enter(mode)

    def run(seed: int) -> tuple[_OperatorNames, str | None]:
        with fork_generators(bytes([seed] * SEED_BYTES), device):
            monitor = GeneratorMonitor(device)
            with _OperatorNames(device) as names, torch.no_grad():
                TorchDispatchMode.__enter__ = noted  # type: ignore[method-assign]
                try:
                    loss(model, single)
                finally:
                    TorchDispatchMode.__enter__ = enter  # type: ignore[method-assign]
            return names, monitor.moved()

    names, drawn = run(0)
    if names.states and names.states & run(1)[0].states:
        raise ModelError(
            "the model seeds torch's generator in its forward pass, so what an example draws depends on its place in "
            "the batch; draw fixed numbers once, in __init__, and keep them in a buffer"
        )
    if modes:
        return f"it runs operators under a dispatch mode ({modes[0]})"
    if drawn not in (None, "torch's"):
        return f"it draws from {drawn} generator, and vectorised examples would share its numbers"
    return f"{sorted(names.found)[0]} has a batching rule of its own" if names.found else None


def _refuse_own_rules() -> None:
    """A function's own `vmap` would be given all examples: inside isolation it is an error."""
    rule = custom_function_call.functorch_table[TransformType.Vmap]

    def guarded(interpreter: Any, function: Any, *operands: Any, **more: Any) -> Any:
        if _ISOLATED and has_overridden_vmap_rule(function):
            raise RuntimeError(f"{function.__name__}.vmap would be given all examples at once")
        return rule(interpreter, function, *operands, **more)

    custom_function_call.functorch_table[TransformType.Vmap] = guarded


_ISOLATED: list[bool] = []
_refuse_own_rules()


def slow_operators(model: nn.Module, loss: LossFunction, rows: Batch) -> list[str]:
    """Name the operators of a model that PyTorch runs in a loop over the examples."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _SILENT.append(False)
        try:
            isolated_losses(model, loss, rows)
        finally:
            _SILENT.pop()
    found = (re.search(r"batching rule for (aten::\w+)", str(one.message)) for one in caught)
    return sorted({match[1] for match in found if match})


_SILENT = [True]
"""Whether PyTorch is to say that it runs an operator in a loop; the last entry counts."""

MADE_UP = ("mixed", "ones", "zeros")
"""Kinds of made-up examples, in the order in which they are tried: not every model takes all."""


def made_up(rows: Batch, count: int, kind: str = "mixed") -> Batch:
    """Examples with the structure, shapes and dtypes of others, and nothing of their values."""
    public = PublicRandomness(0)

    def made(leaf: Tensor) -> Tensor:
        shape = (count, *leaf.shape[1:])
        if kind != "mixed" or not math.prod(shape):
            return torch.full(shape, int(kind == "ones"), dtype=leaf.dtype, device=leaf.device)
        numbers = public.normal(math.prod(shape), key=(len(shape), shape[-1])).reshape(shape)
        if leaf.is_floating_point() or leaf.is_complex():
            return numbers.to(leaf)
        bits = numbers.gt(0).reshape(count, -1)
        bits[:, 0] = True if leaf.dim() > 1 else torch.arange(count) % 2 == 1
        return bits.reshape(shape).to(leaf)

    return pytree.tree_map_only(Tensor, made, rows)


Found = TypeVar("Found")


def on_made_up(run: Callable[[str], Found]) -> Found:
    """What a run on made-up examples gives, of the first kind that the model takes; else its error on the first."""
    errors = []
    for kind in MADE_UP:
        try:
            return run(kind)
        except Exception as error:  # whatever a model may do with such examples
            errors.append(error)
    raise errors[0]


@contextmanager
def fork_draws(seed: bytes | None, device: torch.device) -> Iterator[None]:
    """Fork the global generators for one micro-batch; without a secret seed they go on from where they stand."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices) if seed is None else fork_generators(seed, device):
        yield


@contextmanager
def same_draws() -> Iterator[None]:
    """Every example draws the same random numbers, whoever else is in the batch: for checks of sensitivity.

    A step's release is a mixture over random numbers that do not depend on the data, so its guarantee follows from
    that of every choice of them (docs/privacy.md). This is one choice.
    """
    _SAME_DRAWS.append(True)
    try:
        yield
    finally:
        _SAME_DRAWS.pop()


@contextmanager
def fixed_draws(device: torch.device) -> Iterator[None]:
    """Around every run of the model: starts the same random numbers anew if `same_draws` asks for it."""
    with fork_generators(bytes(SEED_BYTES), device) if _SAME_DRAWS else nullcontext():
        yield


_SAME_DRAWS: list[bool] = []


@contextmanager
def isolation(model: nn.Module) -> Iterator[None]:
    """What the vectorised run of a model needs: compiled parts run as written, Transformers takes it for a trace."""
    functorch: Any = torch._C._functorch
    parts = list(model.modules())
    with ExitStack() as stack, fixed_draws(next(model.parameters()).device):
        stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(NO_SAVED_TENSOR_HOOKS))
        # No message during a step: operators that PyTorch runs in a loop are announced before training.
        functorch._set_vmap_fallback_warning_enabled(not _SILENT[-1])
        stack.callback(functorch._set_vmap_fallback_warning_enabled, True)
        if any(p._compiled_call_impl is not None or type(p).__name__ == "OptimizedModule" for p in parts):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(type(part).__module__.startswith("transformers.") for part in parts):
            # It looks at the values of attention masks to save work, unless it is traced. A vectorised run is.
            stack.callback(setattr, torch.compiler, "_is_compiling_flag", torch.compiler._is_compiling_flag)
            torch.compiler._is_compiling_flag = True
        _ISOLATED.append(True)
        stack.callback(_ISOLATED.pop)
        yield


class _InItsPlace(nn.Module):
    """Holds a model, so that a loss is given the model itself, its class and all, while other values are in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: LossFunction, rows: Batch) -> Tensor:
        return loss(self.model, rows)


def losses_at(model: nn.Module, values: Mapping[str, Tensor], loss: LossFunction, rows: Batch) -> Tensor:
    """The losses with other values for some parameters, by their first names, in every place they are held."""
    first_name = {id(p): name for name, p in model.named_parameters()}
    swapped = {
        f"model.{prefix}.{name}" if prefix else f"model.{name}": values[first_name[id(p)]]
        for prefix, part in model.named_modules()
        for name, p in part.named_parameters(recurse=False, remove_duplicate=False)
        if first_name[id(p)] in values
    }
    with _PaddingIsConstant():
        # PyTorch's own tying would swap a module met under two names twice, and leave the second value behind.
        losses: Tensor = functional_call(_InItsPlace(model), swapped, (loss, rows), tie_weights=False)
    return losses


class _PaddingIsConstant(TorchFunctionMode):
    """Keeps `padding_idx` without gradient: PyTorch forgets it where every example has a table of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not F.embedding:
            return found
        given = dict(zip(("input", "weight", "padding_idx"), args, strict=False), **(kwargs or {}))
        padding = given.get("padding_idx")
        if padding is None:
            return found
        is_padding = given["input"] == padding % given["weight"].shape[0]
        return torch.where(is_padding.unsqueeze(-1), found.detach(), found)
