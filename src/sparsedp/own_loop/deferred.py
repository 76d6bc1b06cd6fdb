"""Values that are not computed: what a model would give on a private batch, and what is made of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from sparsedp.errors import PrivacyError

MODEL = "model"
"""Stands for the model as the function of an expression."""

_VALUES = frozenset({"item", "tolist", "numpy", "grad", "register_hook", "retain_grad", "grad_fn"})
"""Names that give a number, or a way to a gradient, at once."""

_SAYABLE = (str, bool, torch.dtype, torch.device, type(None))
"""What a loop can hardly put the size of a batch into."""


@final
class Deferred:
    """An expression over the outputs of a model on a private batch. It is written down, never computed.

    `loss_fn(model(x), y).mean()` and its like work as on tensors, for functions of torch, operators, methods,
    attributes and indices, so that a loop can be compared with what it should say. The step computes the loss itself.

    **Privacy.** Nothing in it depends on the weights, and whatever asks for a number is refused.
    """

    __slots__ = ("_args", "_function", "_kwargs", "_on_backward")

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        on_backward: Callable[[Deferred], None],
    ) -> None:
        self._function, self._args, self._kwargs, self._on_backward = function, args, kwargs, on_backward

    def backward(
        self,
        gradient: None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: None = None,
    ) -> None:
        """Say that this is the loss; gradients are computed, clipped and noised in the optimizer's step."""
        if gradient is not None or create_graph or inputs is not None:
            raise PrivacyError(
                "backward: got gradient, create_graph or inputs, expected none of them: what leaves a private batch "
                "is one noisy sum of clipped gradients, in optimizer.step()"
            )
        self._on_backward(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Deferred:
        if "autograd" in (getattr(func, "__module__", None) or ""):
            _refuse("a gradient")
        return next(_deferred_in((args, kwargs or {})))._then(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Deferred:
        if name in _VALUES:
            _refuse(f".{name}")
        if name.startswith("__"):
            raise AttributeError(name)
        return self._then(getattr, (self, name), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Deferred:
        """A call of what this expression gives, such as `losses.mean()`."""
        return self._then(operator.call, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Deferred:
        return self._then(operator.getitem, (self, index), {})

    def __neg__(self) -> Deferred:
        return self._then(operator.neg, (self,), {})

    def __repr__(self) -> str:
        return f"<{describe(self)}, on a private batch: not computed>"

    def _then(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Deferred:
        return Deferred(function, args, kwargs, self._on_backward)

    def _refused(self, *_: Any) -> NoReturn:
        _refuse("a number or a length")

    __bool__ = __int__ = __float__ = __len__ = __iter__ = __index__ = __array__ = __format__ = _refused
    __hash__ = None  # type: ignore[assignment]


def _operator(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Deferred, Any], Deferred]:
    def apply(self: Deferred, other: Any) -> Deferred:
        return self._then(function, (other, self) if swapped else (self, other), {})

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(Deferred, f"__{_name}__", _operator(getattr(operator, _name), swapped=False))
    setattr(Deferred, f"__r{_name}__", _operator(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Deferred, f"__{_name}__", _operator(getattr(operator, _name), swapped=False))


def model_calls(value: Deferred) -> int:
    """How often an expression calls the model."""
    return sum(1 for one in _walk(value) if one._function is MODEL)


def same(one: Any, other: Any, known: set[tuple[int, int]] | None = None) -> bool:
    """Whether two expressions say the same, their tensors compared by value."""
    known = set() if known is None else known
    if one is other or (id(one), id(other)) in known:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Deferred):
        mine, theirs = ((x._function, x._args, dict(x._kwargs)) for x in (one, other))
        equal = same(mine, theirs, known)
        if equal:
            known.add((id(one), id(other)))
        return equal
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(same(a, b, known) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], known) for key in one)
    if isinstance(one, Tensor):
        return _same_tensors(one, other)
    return bool(one == other)


def without_reduction(value: Deferred, parts: int) -> Deferred:
    """The losses inside their mean or sum over rows, the division by the number of parts of a batch taken off too."""
    inner = _divided(value, parts)
    reduced = _reduced(inner)
    return inner if reduced is None else _divided(reduced, parts)


def describe(value: Any) -> str:
    """An expression in words, without any number or size in it: they may tell how many rows were drawn."""
    if not isinstance(value, Deferred):
        return str(value)[:20] if isinstance(value, _SAYABLE) else type(value).__name__.lower()
    if value._function is getattr:
        return f"{describe(value._args[0])}.{value._args[1]}"
    args = [describe(one) for one in value._args]
    args += [f"{name}={describe(one)}" for name, one in value._kwargs.items() if one is not None]
    if value._function is operator.call:
        return f"{args[0]}({', '.join(args[1:])})"
    name = MODEL if value._function is MODEL else getattr(value._function, "__name__", "function")
    return f"{name}({', '.join(args)})"


def _divided(value: Deferred, parts: int) -> Deferred:
    inner: Deferred = value
    function, args = value._function, value._args
    if function is operator.truediv and isinstance(args[1], (int, float)) and args[1] == parts:
        inner = args[0]
    elif function is operator.mul and any(isinstance(one, float) and one == 1 / parts for one in args):
        inner = next(one for one in args if isinstance(one, Deferred))
    return inner


def _reduced(value: Deferred) -> Deferred | None:
    """What is averaged or summed, if that is what the expression does and nothing else."""
    if value._kwargs or len(value._args) != 1:
        return None
    inner: Deferred = value._args[0]
    if value._function in (torch.mean, torch.sum):
        return inner
    method = value._function is operator.call and inner._function is getattr
    of: Deferred | None = inner._args[0] if method and inner._args[1] in ("mean", "sum") else None
    return of


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _walk(value: Any, seen: set[int] | None = None) -> Iterator[Deferred]:
    seen = set() if seen is None else seen
    for one in _deferred_in(value):
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            yield from _walk((one._args, dict(one._kwargs)), seen)


def _deferred_in(value: Any) -> Iterator[Deferred]:
    if isinstance(value, Deferred):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _deferred_in(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _deferred_in(one)


def _refuse(what: str) -> NoReturn:
    raise PrivacyError(
        f"{what} of a private batch was asked for before it is released: outputs and losses on training rows are not "
        "private, so make_private never computes them outside the step. Log held-out losses, computed under "
        "torch.no_grad(), or what optimizer.step() gives back"
    )
