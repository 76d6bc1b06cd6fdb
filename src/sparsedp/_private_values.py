"""What stands for outputs, losses and gradients of private examples in a user's loop: nothing can be read of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, final

import torch
from torch import Tensor

from sparsedp.errors import PrivacyError
from sparsedp.sampling import LogicalBatch

NOT_COMPUTED = (
    "outputs and losses on a private batch are not private, so they are not computed outside optimizer.step(). Watch "
    "private.evaluate(held_out_data), or the release that optimizer.step() returns"
)
WRITE_IT_AS = (
    "Give make_private the loss as PerExampleLoss(lambda model, batch: ...) and call "
    "private.criterion(private.model, batch)"
)


class _Opaque:
    """Something that is not computed; whatever asks for a value of it is refused."""

    _WHAT: ClassVar[str]
    _INSTEAD: ClassVar[str]

    def _refuse(self, what: str) -> NoReturn:
        raise PrivacyError(f"{what} was requested of {self._WHAT}: {self._INSTEAD}")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any, **__: Any) -> NoReturn:
        raise PrivacyError(
            f"{getattr(func, '__name__', 'a function')}() was called on {cls._WHAT}: {cls._INSTEAD}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __repr__(self) -> str:
        return f"<{self._WHAT}: not computed>"

    __hash__ = object.__hash__


def _refusing(name: str) -> Callable[..., NoReturn]:
    return lambda self, *_: self._refuse(f"{name}()")


_VALUES = ("bool", "int", "float", "len", "iter", "index", "array", "format", "getitem")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OPERATIONS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "matmul")
for _name in (*_VALUES, *_COMPARISONS, *_OPERATIONS):
    setattr(_Opaque, f"__{_name}__", _refusing(_name))


@final
class PrivateOutput(_Opaque):
    """The model's output on a private batch, for `private.criterion` alone."""

    _WHAT = "the model's output on a private batch"
    _INSTEAD = (
        "it is for private.criterion(output, targets) alone, the criterion that make_private gave back. Reshape "
        f"outputs in the model's forward; for a loss of another form: {WRITE_IT_AS}. Remember that {NOT_COMPUTED}"
    )

    def __init__(self, batch: LogicalBatch) -> None:
        self._batch = batch


@final
class PrivateLoss(_Opaque):
    """The loss of a private batch: `backward()`, and nothing else."""

    _WHAT = "the loss of a private batch"
    _INSTEAD = (
        "it has backward() and nothing else; the mean over the batch is part of the step, penalties go into a "
        f"PerExampleLoss, and accumulation into a larger batch with max_physical_batch. Remember that {NOT_COMPUTED}"
    )

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask

    def backward(
        self,
        gradient: None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: None = None,
    ) -> None:
        """Ask for the gradient; it is computed per example, clipped and noised in `optimizer.step()`."""
        if gradient is not None or create_graph or inputs is not None:
            raise PrivacyError(
                "backward: got gradient, create_graph or inputs, expected none of them: a step releases one noisy "
                "sum of clipped gradients"
            )
        self._ask()


class RefusedGradient(Tensor):
    """Stands where `p.grad` would be between backward and step: no operation takes it."""

    @staticmethod
    def __new__(cls: Any, parameter: Tensor) -> RefusedGradient:
        made: RefusedGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise PrivacyError(
            f"{func} was called on the .grad of a parameter between backward and step, where no raw gradient exists: "
            "gradients are clipped example by example to max_grad_norm, and noised, inside optimizer.step(). Remove "
            "clip_grad_norm_ and other changes of .grad; a penalty's backward() goes into a PerExampleLoss"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return "<no gradient: it is computed, clipped and noised in optimizer.step()>"
