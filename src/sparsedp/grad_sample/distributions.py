"""PyTorch's common random operations, made of given uniform words instead of a generator's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Words = Callable[[int], Tensor]
"""`words(n)`: n uniform 32-bit words for each element of what is drawn, on an axis added at the end."""

Args = tuple[Any, ...]
Options = dict[str, Any]


def uniform(words: Words, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1), with as many bits as the type has; float64 on the way for float64 alone."""
    if dtype is torch.float64:
        high, low = (words(2)[..., i].to(torch.int64) & 0xFFFFFFFF for i in (0, 1))
        return ((high << 21) | (low >> 11)).to(torch.float64).mul_(2.0**-53)
    bits = min(24, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return ((words(1)[..., 0].to(torch.int64) & 0xFFFFFFFF) >> (32 - bits)).to(torch.float32).mul_(2.0**-bits)


def _coins(words: Words, probability: Any) -> Tensor:
    """True with this probability, which may be a tensor; to 2^-32."""
    signed = words(1)[..., 0]
    if isinstance(probability, Tensor):
        return signed.to(torch.float64).add_(2.0**31).mul_(2.0**-32) < probability.to("cpu", torch.float64)
    return (
        signed <= round(probability * 2**32) - 2**31 - 1
        if probability > 0
        else torch.zeros_like(signed).bool()
    )


def _normal(words: Words) -> Tensor:
    """Box and Muller's, one number of two."""
    four = words(4)
    radius = uniform(lambda _: four[..., :2], torch.float64).neg_().log1p_().mul_(-2.0).sqrt_()
    return radius.mul_(uniform(lambda _: four[..., 2:], torch.float64).mul_(2 * math.pi).cos_())


def _between(words: Words, low: int, high: int) -> Tensor:
    return (uniform(words, torch.float64) * (high - low)).floor_().to(torch.int64).add_(low)


def _argument(args: Args, options: Options, place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else options.get(name, default)


def _in_place(values: Callable[[Words, Args, Options], Tensor]) -> Callable[[Words, Args, Options], Any]:
    return lambda words, args, options: args[0].copy_(values(words, args, options))


def _like(values: Callable[[Words, torch.dtype, Args], Tensor]) -> Callable[[Words, Args, Options], Any]:
    """Operations that make a tensor of another's shape, and type unless told."""

    def make(words: Words, args: Args, options: Options) -> Tensor:
        blank = torch.empty_like(args[0], **options)
        return blank.copy_(values(words, blank.dtype, args))

    return make


def _fresh(
    sizes: int, values: Callable[[Words, torch.dtype, Args], Tensor]
) -> Callable[[Words, Args, Options], Any]:
    """Operations that make a tensor of a shape, which is their argument number `sizes`."""

    def make(words: Words, args: Args, options: Options) -> Tensor:
        rest = {name: value for name, value in options.items() if name not in ("generator", "names")}
        blank = torch.empty(args[sizes], **rest)
        return blank.copy_(values(words, blank.dtype, args))

    return make


def _dropout(words: Words, args: Args, options: Options) -> tuple[Tensor, Tensor]:
    """`native_dropout`: what is left, scaled up, and the mask."""
    inputs, rate, training = args[0], args[1], _argument(args, options, 2, "train", True)
    if training is False:
        return inputs.clone(), torch.ones_like(inputs, dtype=torch.bool)
    kept = _coins(words, 1 - rate).to(inputs.device)
    return inputs * kept * (0.0 if rate == 1 else 1 / (1 - rate)), kept


def _uniform_(words: Words, args: Args, options: Options) -> Tensor:
    low: float
    high: float
    low, high = _argument(args, options, 1, "from", 0.0), _argument(args, options, 2, "to", 1.0)
    return uniform(words, args[0].dtype) * (high - low) + low


def _normal_(words: Words, args: Args, options: Options) -> Tensor:
    mean: float
    std: float
    mean, std = _argument(args, options, 1, "mean", 0.0), _argument(args, options, 2, "std", 1.0)
    return _normal(words) * std + mean


def _exponential_(words: Words, args: Args, options: Options) -> Tensor:
    rate = _argument(args, options, 1, "lambd", 1.0)
    return uniform(words, torch.float64).add_(2.0**-54).neg_().log1p_().neg_().div_(rate)


KNOWN: dict[str, Callable[[Words, Args, Options], Any]] = {
    "bernoulli": _like(lambda words, dtype, args: _coins(words, args[0])),
    "bernoulli.p": _like(lambda words, dtype, args: _coins(words, args[1])),
    "bernoulli_.float": _in_place(
        lambda words, args, options: _coins(words, _argument(args, options, 1, "p", 0.5))
    ),
    "bernoulli_.Tensor": _in_place(lambda words, args, options: _coins(words, args[1])),
    "native_dropout": _dropout,
    "rand": _fresh(0, lambda words, dtype, args: uniform(words, dtype)),
    "rand_like": _like(lambda words, dtype, args: uniform(words, dtype)),
    "uniform_": _in_place(_uniform_),
    "randn": _fresh(0, lambda words, dtype, args: _normal(words)),
    "randn_like": _like(lambda words, dtype, args: _normal(words)),
    "normal_": _in_place(_normal_),
    "exponential_": _in_place(_exponential_),
    "randint": _fresh(1, lambda words, dtype, args: _between(words, 0, args[0])),
    "randint.low": _fresh(2, lambda words, dtype, args: _between(words, args[0], args[1])),
}
"""By PyTorch's name; each element of the result is made of words of its own."""


def drawn_shape(operation: str, args: Args, options: Options) -> tuple[int, ...]:
    """The shape of what such an operation draws."""
    place = {"rand": 0, "randn": 0, "randint": 1, "randint.low": 2}.get(operation)
    return tuple(args[0].shape) if place is None else tuple(int(n) for n in args[place])
