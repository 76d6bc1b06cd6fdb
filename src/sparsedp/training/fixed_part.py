"""The fixed first part of a model: where it ends, what it is, that it mixes no records and remembers none."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from sparsedp.core.errors import ModelError
from sparsedp.evaluation.evaluate import evaluation_mode
from sparsedp.grad_sample.alone import generators_put_back
from sparsedp.grad_sample.check import refuse_known_layers
from sparsedp.guards.attributes import AttributeGuard, marks_of
from sparsedp.guards.guard import StateGuard, digest

TOLERANCE = 1e-4
"""Of a record's largest feature: what rounding in other company may change. Mixing changes far more."""

FIRST_LOOK, _STRIDE = 8, 97
"""Records looked at alone in the first batch; the one in each further batch moves by a number prime to its size."""

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))
_TORCHS_OWN = frozenset(vars(nn.Module()))
"""What PyTorch keeps in every module."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def split_at_lowest_trained(model: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """A model in a row, cut below its first part that has something to train: what is fixed, and what is trained.

    Raises:
        ModelError: it is not a row of parts, or nothing fixed comes first.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise ModelError(
            f"cache_features: got a {type(model).__name__}, expected an nn.Sequential, so that what is frozen is a "
            "first part of it; put the frozen body and the trained head in one: nn.Sequential(body, head)"
        )
    if around := _around_the_row(model):
        raise ModelError(
            f"cache_features: the model itself has {around}, which kept features would go without; expected a plain "
            "nn.Sequential: put what it does in a module inside the row, or leave cache_features out"
        )
    parts = [(name, part) for name, part in model._modules.items() if part is not None]  # repeats count
    trained = [any(p.requires_grad for p in part.parameters()) for _, part in parts]
    cut = trained.index(True) if any(trained) else 0
    if not any(True for _, part in parts[:cut] for _ in part.parameters()):
        raise ModelError(
            "cache_features: the model's first parts are all trained, expected frozen ones to run once; freeze them "
            "with requires_grad_(False), or leave cache_features out"
        )
    return nn.Sequential(OrderedDict(parts[:cut])), nn.Sequential(OrderedDict(parts[cut:]))


def _around_the_row(model: nn.Sequential) -> str | None:
    """What acts on a whole row of parts, and so on no piece of it; None if nothing does."""
    if "forward" in vars(model) or type(model).__call__ is not nn.Module.__call__:
        return "a forward pass of its own"
    return next((name.strip("_").replace("_", " ") for name in _HOOKS if getattr(model, name)), None)


def describe_below(below: nn.Module) -> str:
    """SHA-256 of the structure, every tensor and every plain setting of the fixed part. Public, as the part is."""
    found = hashlib.sha256(repr(below).encode())
    for name, module in below.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}
        settings.pop("training", None)
        found.update(f"{name} {type(module).__qualname__} {sorted(settings.items())}".encode())
    for name, value in [*below.named_parameters(), *below.named_buffers()]:
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@final
class HeldBefore:
    """What the modules of a model hold beside their parameters, to be put back after a look at records.

    **Edge cases.** If any attribute has changed, all are put back, as copies; one that cannot be copied stays.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._marks = marks_of(model, by_value=True)
        shared = {id(each): each for each in [*model.modules(), *model.parameters(), *model.buffers()]}
        self._attributes = {
            module: {
                name: _copied(value, shared)
                for name, value in vars(module).items()
                if name not in _TORCHS_OWN
            }
            for module in model.modules()
        }
        self._buffers = {module: dict(module._buffers) for module in model.modules()}
        self._values = {buffer: buffer.detach().clone() for buffer in model.buffers()}

    def put_back(self) -> None:
        """Buffers and attributes as they were; what is new goes."""
        with torch.no_grad():
            for buffer, value in self._values.items():
                if digest(buffer) != digest(value):
                    buffer.copy_(value)
        for module, buffers in self._buffers.items():
            module._buffers.clear()
            module._buffers.update(buffers)
        if marks_of(self._model, by_value=True) == self._marks:
            return
        for module, attributes in self._attributes.items():
            for name in vars(module).keys() - _TORCHS_OWN - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)


@final
class MemoryWatch:
    """Refuses a fixed part that keeps something of the records it is run over, and puts back what it held before.

    Made before the part sees the first of them. What it keeps of any record alike (a mask by its length) may stay.

    **Privacy.** No trainer looks below kept features, and the model is given back whole: what a buffer or an
    attribute there keeps of a record is released without noise.
    **Edge cases.** A parameter that was written to is found and not put back, as no second copy is held.
    """

    def __init__(self, below: nn.Module, some: Tensor) -> None:
        self._before = HeldBefore(below)
        self._state = StateGuard(below)
        self._attributes = AttributeGuard(_with_a_parameter(below), _look_at, lambda: some[:1])

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Watch the part while it runs.

        Raises:
            PrivacyError: it has kept something, and under which name.
        """
        try:
            with self._state.untouched(last_of_epoch=True):
                yield
                self._attributes.check()
        except BaseException:
            self._before.put_back()
            raise


@final
class FixedPart:
    """A frozen part as the function it is in evaluation mode, watched while it runs.

    **Privacy.** Features may stand for records only if each is made of its own record alone: else one person changes
    the features of others, and clipping protects nobody. In every block that is computed, some records are computed
    alone as well.
    """

    def __init__(self, below: nn.Module) -> None:
        self._below = below
        self._batches = 0

    def refuse_if_not_fixed(self, inputs: Tensor) -> None:
        """Look at its layers, and at what it makes of some records in the modes it is in.

        Raises:
            ModelError: it mixes records, or is another function while training than in evaluation mode.
        """
        refuse_known_layers(self._below)
        device = inputs.device
        with torch.no_grad(), generators_put_back(device):
            in_training = _features(self._below(inputs))
        if not _alike(in_training, self.features(inputs)):
            raise ModelError(
                "cache_features: the frozen part gives something else in training mode than in evaluation mode "
                "(dropout, for one), and kept features are those of the latter; call .eval() on that part, or leave "
                "cache_features out"
            )

    def features(self, inputs: Tensor) -> Tensor:
        """Of some records, in evaluation mode; some of them are looked at alone, in each batch another.

        Raises:
            ModelError: a record's features depend on the records beside it.
        """
        with evaluation_mode(self._below):
            found = _features(self._below(inputs))
            if found.dim() < 1 or len(found) != len(inputs):
                raise ModelError(
                    f"cache_features: the frozen part made {tuple(found.shape)} of {len(inputs)} records, expected "
                    "one row of features for each"
                )
            if len(inputs) > 1:
                for row in self._next_rows(len(inputs)):
                    if not _alike(_features(self._below(inputs[row : row + 1])), found[row : row + 1]):
                        raise ModelError(
                            "cache_features: the frozen part makes other features of a record when other records are "
                            "in the batch, so clipping would protect nobody; compute each record's features from it "
                            "alone"
                        )
        return found

    def _next_rows(self, count: int) -> list[int]:
        """Several in the first batch, one in each further."""
        self._batches += 1
        if self._batches == 1:
            return list(range(0, count, max(1, count // FIRST_LOOK)))
        return [self._batches * _STRIDE % count]

    def made(self, inputs: Tensor, kept: Tensor) -> bool:
        """Whether kept features are what it makes of these records."""
        found = self.features(inputs)
        return found.shape == kept.shape and _alike(found, kept.to(found.dtype))


def _copied(value: Any, shared: Mapping[int, Any]) -> Any:
    """A copy that shares the model's own parts; the value itself if there can be none."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return value
    try:
        return deepcopy(value, dict(shared))
    except Exception:  # a lock, a file, a tensor with a graph: whatever deepcopy cannot do
        return value


def _with_a_parameter(part: nn.Module) -> nn.Module:
    """The part; in something that has a parameter if it has none, as a guard asks that for the device."""
    if any(True for _ in part.parameters()):
        return part
    around = nn.Sequential(part)
    around.register_parameter("device", nn.Parameter(torch.empty(0), requires_grad=False))
    return around


def _look_at(part: Callable[..., Any], inputs: Tensor) -> Tensor:
    """In the modes it is in, as in its trial; then in evaluation mode, as for its features."""
    part(inputs)
    with evaluation_mode(cast("nn.Module", part)):
        return _features(part(inputs))


def _features(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise ModelError(
            f"cache_features: the frozen part gives a {type(output).__name__}, expected one tensor, records first; "
            "put a module that picks it at its end"
        )
    return output


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding, record by record, measured by the record's largest feature; NaN equals NaN."""
    if not found.is_floating_point():
        return torch.equal(found, expected)
    a, b = found.double().flatten(1), expected.double().flatten(1)
    size = torch.nan_to_num(b.abs(), nan=0.0, posinf=0.0).amax(1, keepdim=True)
    return bool((((a - b).abs() <= TOLERANCE * size) | (a == b) | (a.isnan() & b.isnan())).all())
