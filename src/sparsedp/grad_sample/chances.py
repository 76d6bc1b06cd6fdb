"""Finding what a model draws in its forward pass: which random operations, and which axis of each is the samples'."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparsedp.batch import PerSampleLoss, Rows, tensors_of
from sparsedp.errors import ModelError
from sparsedp.grad_sample.distributions import KNOWN, drawn_shape
from sparsedp.randomness import SEED_BYTES, GeneratorWatch, own_generators

logger = logging.getLogger("sparsedp")

SIZES = (2, 3)
"""Numbers of rows that are tried: an axis that is not the samples' may be as long as one of them, but not as both."""
TRIALS = 3
"""Seeds for each: what is drawn may depend on what was drawn before."""


@final
@dataclass(frozen=True, slots=True)
class Draw:
    """One random operation of a forward: its shape without the samples' axis, which is None if all rows share it."""

    operation: str
    shape: tuple[int, ...]
    axis: int | None

    def expected(self, rows: int) -> tuple[int, ...]:
        """The shape it has for so many rows."""
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], rows, *self.shape[self.axis :])


@dataclass(slots=True)
class _Seen:
    """What one forward drew, in order, and whether it drew in other ways too."""

    operations: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    unknown: str | None = None


@final
class Chances:
    """Knows what a model draws, for each kind of rows and each setting of its modules; finds out when asked first."""

    def __init__(self, model: nn.Module, loss: PerSampleLoss) -> None:
        self._model, self._loss = model, loss
        self._known: dict[object, tuple[Draw, ...] | None] = {}

    def of(self, rows: Rows) -> tuple[Draw, ...] | None:
        """What a forward of such rows draws; None if that is not a fixed sequence of operations known here.

        The model is run on copies of the first row; nothing is learnt but shapes.

        Raises:
            ModelError: it draws from a `torch.Generator` of its own.
        """
        key = (_kind_of_rows(rows), _settings(self._model))
        if key not in self._known:
            self._known[key] = self._find(rows)
        return self._known[key]

    def _find(self, rows: Rows) -> tuple[Draw, ...] | None:
        seen = {size: [self._try(rows, size, seed) for seed in range(TRIALS)] for size in SIZES}
        runs = [run for many in seen.values() for run in many]
        small, large = (many[0] for many in seen.values())
        unknown = next((run.unknown for run in runs if run.unknown is not None), None)
        if unknown is None and any(run.operations != small.operations for run in runs):
            unknown = "which random numbers it draws depends on those it drew before"
        if unknown is None and any(run.shapes != many[0].shapes for many in seen.values() for run in many):
            unknown = "how many random numbers it draws depends on those it drew before"
        draws = []
        for operation, a, b in zip(small.operations, small.shapes, large.shapes, strict=False):
            draw = _draw(operation, a, b)
            if draw is None:
                unknown = unknown or f"{operation} draws {a} numbers for {SIZES[0]} rows, {b} for {SIZES[1]}"
                break
            draws.append(draw)
        if unknown is not None:
            logger.warning("rows are taken one by one, each under random numbers of its own: %s", unknown)
            return None
        return tuple(draws)

    def _try(self, rows: Rows, size: int, seed: int) -> _Seen:
        copies = pytree.tree_map_only(Tensor, lambda leaf: torch.cat([leaf[:1]] * size), rows)
        device = next(self._model.parameters()).device
        with own_generators(bytes([seed] * SEED_BYTES), device), torch.enable_grad():
            watch = GeneratorWatch(device)
            with _Observer(self._model) as observer, observer.naming():
                self._loss(self._model, copies)
            seen: _Seen = observer.seen
            if seen.unknown is None and not seen.operations and watch.moved() is not None:
                seen.unknown = f"the forward pass draws from {watch.moved()} generator unseen"
            elif seen.unknown is None and watch.moved() in ("NumPy's", "Python's"):
                seen.unknown = f"the forward pass draws from {watch.moved()} generator"
        return seen


class _Observer(TorchDispatchMode):
    """Notes every random operation and lets it through."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: _Seen = _Seen()
        self._model = model
        self._inside: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random(func):
            if kwargs.get("generator") is not None:
                raise ModelError(
                    f"{self._place()} draws from a torch.Generator of its own ({func.name()}), so what a row draws "
                    "depends on the rows before it; draw from torch's global generator, which is seeded for every row"
                )
            name = operation_name(func)
            if name not in KNOWN:
                return self._unknown(func, args, kwargs)
            self.seen.operations.append(name)
            self.seen.shapes.append(drawn_shape(name, args, kwargs))
        return func(*args, **kwargs)

    def _unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that may draw, as attention may; whether it does is seen from the generator."""
        result, drew = run_and_watch(func, args, kwargs)
        if drew:
            self.seen.unknown = self.seen.unknown or f"{self._place()} uses {func.name()}"
        return result

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Keep track of which module is at work."""

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: self._inside.append(name)

        def leave(*_: object) -> None:
            self._inside.pop()

        handles = []
        for name, part in self._model.named_modules():
            handles.append(part.register_forward_pre_hook(enter(name)))
            handles.append(part.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _place(self) -> str:
        if not self._inside:
            return "the loss"
        name = self._inside[-1]
        kind = type(self._model.get_submodule(name)).__name__
        return f"module {name!r} ({kind})" if name else f"the model itself ({kind})"


def is_random(func: Any) -> bool:
    """Whether an operation of PyTorch's draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def run_and_watch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The result of an operation, and whether it drew random numbers."""
    tensor = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    watch = GeneratorWatch(torch.device("cpu") if tensor is None else tensor.device)
    return func(*args, **kwargs), watch.moved() is not None


def operation_name(func: Any) -> str:
    """Such as "bernoulli_.float"."""
    return str(func.name()).removeprefix("aten::")


def _draw(operation: str, small: tuple[int, ...], large: tuple[int, ...]) -> Draw | None:
    """Which axis is the samples'; None if that cannot be told."""
    if small == large:
        return Draw(operation, small, None)
    differing = [i for i, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
    if len(small) != len(large) or len(differing) != 1:
        return None
    axis = differing[0]
    if (small[axis], large[axis]) != SIZES:
        return None
    return Draw(operation, small[:axis] + small[axis + 1 :], axis)


def _kind_of_rows(rows: Rows) -> object:
    return tuple((leaf.shape[1:], leaf.dtype) for leaf in tensors_of(rows))


def _settings(model: nn.Module) -> object:
    """What a user may change between steps that decides on drawing: modes, and numbers such as rates of dropout."""
    return tuple(
        (part.training, *(v for v in vars(part).values() if type(v) is float)) for part in model.modules()
    )
