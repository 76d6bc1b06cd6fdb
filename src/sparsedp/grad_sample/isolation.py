"""Runs a model and its loss one example at a time, vectorised, so that no operation can see two examples.

`torch.func.vmap` gives the model a batch of one, and PyTorch computes all examples together below. What reduces,
sorts or indexes over the batch does so over one example; reading a value (`.item()`, `if tensor:`), shapes that
depend on values, and writes to buffers are errors of PyTorch's own.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import _add_batch_dim
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import unwrap_batched
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sparsedp.batch import PerSampleLoss, Rows, check_losses
from sparsedp.randomness import SEED_BYTES, PublicRandomness, own_generators

NO_SAVED_TENSOR_HOOKS = (
    "the model hooks the tensors that autograd saves (checkpointing, saved_tensors_hooks), and such a hook would see "
    "all examples at once"
)


def isolated_losses(
    model: nn.Module, loss: PerSampleLoss, rows: Rows, values: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Compute the loss of every example alone: [n], with the graph of the vectorised operations.

    Args:
        model: Given a batch of one; its parameters are closed over.
        loss: `loss(model, rows)`, given a batch of one; one number.
        rows: Tensors with a leading axis of examples, in any structure. What is no tensor is given as it is.
        values: Values [n, ...] in the place of named parameters, one for each example.

    Formal guarantees: the loss of an example is a function of the example, the parameters and the random numbers
    drawn for it; no operation of the model's has another example among its operands.
    Edge cases: random numbers differ by example. What PyTorch cannot vectorise raises PyTorch's own error.
    """

    def loss_of_one(one: Rows, own: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        return check_losses(losses_at(model, own, loss, one) if own else loss(model, one), 1)[0]

    losses: Tensor = isolated(model, loss_of_one, rows, *([] if values is None else [dict(values)]))
    return losses


def isolated(model: nn.Module, function: Callable[..., Any], rows: Rows, *more: Any) -> Any:
    """What a function gives for every example alone, vectorised: tensors [n, ...] in the structure it returns.

    Args:
        model: What the function calls.
        function: Given a batch of one, and of every further argument what belongs to that example.
        rows: As for `isolated_losses`.
        more: Structures of tensors [n, ...].
    """
    leaves, tree = pytree.tree_flatten(rows)
    batched = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    def of_one(example: Mapping[int, Tensor], *its_own: Any) -> Any:
        alone = [example[i].unsqueeze(0) if i in example else leaf for i, leaf in enumerate(leaves)]
        return function(pytree.tree_unflatten(alone, tree), *its_own)

    with isolation(model):
        return vmap(of_one, randomness="same" if _SAME_DRAWS else "different")(batched, *more)


def why_not_isolated(model: nn.Module, loss: PerSampleLoss, rows: Rows) -> str | None:
    """Say why PyTorch cannot vectorise a model and its loss, or None; forward and backward on made-up examples.

    Args:
        model: Left as it is, but for what its own forward writes.
        loss: `loss(model, rows)`.
        rows: Their structure, shapes and dtypes alone are looked at.

    Raises:
        Exception: the model's own, where it cannot run on single made-up examples either.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    first: Exception | None = None
    with own_draws(None, parameters[0].device):
        for kind in MADE_UP:
            made = made_up(rows, 2, kind)
            try:
                single = pytree.tree_map_only(Tensor, lambda leaf: leaf[:1], made)
                check_losses(loss(model, single), 1)
            except Exception as error:  # whatever a model may do with such an example
                first = first or error
                continue
            try:
                losses = isolated_losses(model, loss, made)
                torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
            except Exception as error:  # whatever PyTorch cannot vectorise
                return re.split(r"\.\s|\n", str(error))[0].strip() or type(error).__name__
            return None
    assert first is not None
    raise first


def slow_operators(model: nn.Module, loss: PerSampleLoss, rows: Rows) -> list[str]:
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


def made_up(rows: Rows, count: int, kind: str = "mixed") -> Rows:
    """Examples with the structure, shapes and dtypes of others, and nothing of their values.

    Mixed: normal numbers, zeros and ones among integers, the first of an example always one. Ones, zeros: all so.
    """
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


@contextmanager
def own_draws(seed: bytes | None, device: torch.device) -> Iterator[None]:
    """Fork the global generators for one micro-batch, so that nothing drawn later depends on how much it draws.

    Args:
        seed: Secret, of 32 bytes; without one they go on from where they stand.
        device: Whose generator is forked besides.
    """
    if seed is None:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    else:
        with own_generators(seed, device):
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
    if not _SAME_DRAWS:
        yield
    else:
        with own_generators(bytes(SEED_BYTES), device):
            yield


_SAME_DRAWS: list[bool] = []


@contextmanager
def isolation(model: nn.Module) -> Iterator[None]:
    """What the vectorised run of a model needs: compiled parts run as written, Transformers takes it for a trace."""
    parts = list(model.modules())
    with ExitStack() as stack, fixed_draws(next(model.parameters()).device):
        stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(NO_SAVED_TENSOR_HOOKS))
        stack.enter_context(_slow_loops_are_silent())
        if any(map(_is_compiled, parts)):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(type(part).__module__.startswith("transformers.") for part in parts):
            stack.enter_context(_traced())
        yield


def _is_compiled(part: nn.Module) -> bool:
    """Whether it came out of `torch.compile` or was compiled in place."""
    return part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule"


@contextmanager
def _traced() -> Iterator[None]:
    """Transformers looks at the values of attention masks to save work, unless it is traced. A vectorised run is."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def _slow_loops_are_silent() -> Iterator[None]:
    """No message during a step: operators that PyTorch runs in a loop are announced before training."""
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(not _SILENT[-1])
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


class _InItsPlace(nn.Module):
    """Holds a model, so that a loss is given the model itself, its class and all, while other values are in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: PerSampleLoss, rows: Rows) -> Tensor:
        return loss(self.model, rows)


def losses_at(model: nn.Module, values: Mapping[str, Tensor], loss: PerSampleLoss, rows: Rows) -> Tensor:
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


# Rules for operators that PyTorch does not vectorise. A rule is given all examples' operands and computes below vmap,
# so it is part of what keeps examples apart: tests compare each with single examples.

_LIBRARY: Any = torch.library.Library("aten", "IMPL")

Rule = Callable[..., Tensor | tuple[Tensor, ...]]
"""From the number of examples, the operands' axes of examples and the operands to results with the examples first."""


def _rule(*names: str) -> Callable[[Callable[..., Rule]], Callable[..., Rule]]:
    """Register what a rule makes of the operands below the vectorised level."""

    def register(make: Callable[..., Rule]) -> Callable[..., Rule]:
        for name in names:
            _LIBRARY.impl(name, _kernel(make(name)), "FuncTorchBatched", with_keyset=True)
        return make

    return register


def _kernel(rule: Rule) -> Callable[..., Any]:
    below_vmap = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)

    def kernel(keys: Any, *operands: Any, attn_mask: Tensor | None = None, scale: float | None = None) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        level, count = interpreter.level(), interpreter.batch_size()
        if rule.__name__ == "attention":  # its schema has a tensor that is given by name alone
            operands = (*operands, *[0.0, False][len(operands) - 3 :], attn_mask, scale)
        whole, axes = unwrap_batched(operands, level)
        with torch._C._ExcludeDispatchKeyGuard(below_vmap):
            found = rule(count, axes, *whole)
        if isinstance(found, Tensor):
            return _add_batch_dim(found, 0, level)
        return tuple(_add_batch_dim(result, 0, level) for result in found)

    return kernel


def _first(operand: Any, axis: Any, count: int) -> Any:
    """Operands with the axis of the examples first."""
    if isinstance(operand, Tensor):
        return operand.expand(count, *operand.shape) if axis is None else operand.movedim(axis, 0)
    return tuple(_first(one, a, count) for one, a in zip(operand, axis, strict=True))


def _linear(data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, also where every example has a weight of its own."""
    if weight.dim() == 2:
        return F.linear(data, weight, bias)
    found = (data.flatten(1, -2) @ weight.mT).reshape(*data.shape[:-1], -1)
    return found if bias is None else found + bias.view(len(bias), *[1] * (found.dim() - 2), -1)


States = tuple[Tensor, ...]
Cell = Callable[[Tensor, States, Sequence[Tensor | None]], States]
"""From what came in from the input, the states before and the state's weight and bias to the states after."""


def _lstm_cell(gates: Tensor, states: States, weights: Sequence[Any]) -> States:
    hidden, cell = states
    i, f, g, o = (gates + _linear(hidden, *weights)).chunk(4, -1)
    cell = torch.addcmul(torch.sigmoid(f) * cell, torch.sigmoid(i), torch.tanh(g))
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_cell(gates: Tensor, states: States, weights: Sequence[Any]) -> States:
    r, z, n = gates.chunk(3, -1)
    of_r, of_z, of_n = _linear(states[0], *weights).chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + of_r) * of_n)
    return (new + torch.sigmoid(z + of_z) * (states[0] - new),)


def _rnn_cell(
    squash: Callable[[Tensor], Tensor], gates: Tensor, states: States, weights: Sequence[Any]
) -> States:
    return (squash(gates + _linear(states[0], *weights)),)


_CELLS: dict[str, Cell] = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": functools.partial(_rnn_cell, torch.tanh),
    "rnn_relu": functools.partial(_rnn_cell, torch.relu),
}


def _run_layers(
    cell: Cell,
    data: Tensor,
    start: Sequence[States],
    parameters: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
) -> tuple[Tensor, list[States]]:
    """Run recurrent layers step by step over [..., t, f]: outputs [..., t, width], and every layer's last states."""
    directions = 1 + both_ways
    each = len(parameters) // (layers * directions)
    last: list[States] = []
    for layer in range(layers):
        if layer and dropout:
            data = torch.dropout(data, dropout, train)
        found = []
        for direction in range(directions):
            of_input, of_state, *more = parameters[len(last) * each : (len(last) + 1) * each]
            biases, projection = (more[:2], more[2:]) if biased else ([None, None], more)
            steps = _linear(data, of_input, biases[0]).unbind(-2)
            states, outputs = start[len(last)], []
            for gates in reversed(steps) if direction else steps:
                states = cell(gates, states, (of_state, biases[1]))
                if projection:
                    states = (_linear(states[0], projection[0], None), *states[1:])
                outputs.append(states[0])
            found.append(torch.stack(outputs[::-1] if direction else outputs, -2))
            last.append(states)
        data = found[0] if len(found) == 1 else torch.cat(found, -1)
    return data, last


@_rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def _recurrent(name: str) -> Rule:
    cell = _CELLS[name.split(".")[0]]

    def rule(count: int, axes: Any, data: Tensor, start: Any, parameters: Any, *settings: Any) -> Any:
        *settings, batch_first = settings  # type: ignore[assignment]
        data = _first(data, axes[0], count)
        data = data if batch_first else data.transpose(1, 2)
        states = (
            _first([start], [axes[1]], count) if isinstance(start, Tensor) else _first(start, axes[1], count)
        )
        start = list(zip(*(state.unbind(1) for state in states), strict=True))
        shared = all(axis is None for axis in axes[2])
        inner = data.shape[1]
        if shared:  # rows of one axis, for plain matrix products
            data, start = data.flatten(0, 1), [tuple(s.flatten(0, 1) for s in layer) for layer in start]
        else:
            parameters = _first(parameters, axes[2], count)
        found, last = _run_layers(cell, data, start, parameters, *settings)
        if shared:
            found = found.reshape(count, inner, *found.shape[1:])
            last = [tuple(s.reshape(count, inner, *s.shape[1:]) for s in layer) for layer in last]
        ends = [torch.stack(layers, 1) for layers in zip(*last, strict=True)]
        return (found if batch_first else found.transpose(1, 2), *ends)

    return rule


@_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _one_step(name: str) -> Rule:
    cell = _CELLS[name.removesuffix("_cell")]

    def rule(count: int, axes: Any, data: Tensor, start: Any, *weights: Any) -> Any:
        data, states = _first(data, axes[0], count), _first(start, axes[1], count)
        axes = axes[2:]
        if any(axis is not None for axis in axes):
            pairs = zip(weights, axes, strict=True)
            weights = tuple(None if w is None else _first(w, axis, count) for w, axis in pairs)
        of_input, of_state, b_input, b_state = (*weights, None, None)[:4]
        found = cell(
            _linear(data, of_input, b_input),
            (states,) if isinstance(start, Tensor) else states,
            (of_state, b_state),
        )
        return found[0] if isinstance(start, Tensor) else found

    return rule


@_rule("embedding_bag.padding_idx", "embedding_bag")
def _bags(name: str) -> Rule:
    def rule(
        count: int,
        axes: Any,
        weight: Tensor,
        indices: Tensor,
        offsets: Tensor,
        scale_by_frequency: bool = False,
        mode: int = 0,
        sparse: bool = False,
        weights: Tensor | None = None,
        include_last: bool = False,
        padding: int | None = None,
    ) -> Any:
        indices = _first(indices, axes[1], count)
        bags = len(offsets) - include_last if axes[2] is None else 0
        length = indices.shape[1] // max(bags, 1)
        if not bags or not bool((offsets.diff() == length).all()) or length * bags != indices.shape[1]:
            raise RuntimeError("embedding_bag: bags of different lengths cannot be vectorised")
        own = None if weights is None else _first(weights, axes[6], count).reshape(count, bags, length)
        table = indices.reshape(count, bags, length)
        kept = None if padding is None or padding < 0 else table != padding
        if axes[0] is not None:  # every example has a table of its own, and `_reduce_bags` leaves padding out
            weight = _first(weight, axes[0], count)
            table = table + (torch.arange(count, device=table.device) * weight.shape[1]).view(-1, 1, 1)
            weight = weight.flatten(0, 1)
        found = _reduce_bags(F.embedding(table, weight), mode, own, kept)
        unused = found.new_empty(count, 0)
        return found, unused, unused, unused

    return rule


def _reduce_bags(vectors: Tensor, mode: int, weights: Tensor | None, kept: Tensor | None) -> Tensor:
    """What `nn.EmbeddingBag` makes of a bag's vectors [..., entries, f]: 0 sum, 1 mean, 2 the largest."""
    if weights is not None:
        vectors = vectors * weights.unsqueeze(-1)
    if kept is None:
        return vectors.max(-2).values if mode == 2 else vectors.mean(-2) if mode == 1 else vectors.sum(-2)
    kept = kept.unsqueeze(-1)
    if mode == 2:
        largest = vectors.masked_fill(~kept, -torch.inf).max(-2).values
        return torch.where(kept.any(-2), largest, torch.zeros_like(largest))
    total = vectors.masked_fill(~kept, 0.0).sum(-2)
    return total / kept.sum(-2).clamp(min=1) if mode == 1 else total


@_rule("bincount", "repeat_interleave.Tensor", "_pack_padded_sequence")
def _refused(name: str) -> Rule:
    """PyTorch would run these in a loop, and fail in the step where examples come out in different sizes."""

    def rule(count: int, axes: Any, *operands: Any) -> Any:
        raise RuntimeError(f"the shape of what {name.split('.')[0]} gives depends on the example's values")

    return rule


@_rule("_scaled_dot_product_flash_attention_for_cpu")
def _attention(name: str) -> Rule:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(
        count: int,
        axes: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float,
        causal: bool,
        mask: Tensor | None,
        scale: float | None,
    ) -> tuple[Tensor, ...]:
        """Fused attention attends inside each entry of its first axis, so examples go there."""
        query, key, value = (
            _first(one, axis, count) for one, axis in zip((query, key, value), axes, strict=False)
        )
        if mask is not None:
            mask = _first(mask, axes[5], count)
            mask = mask.reshape(count, *[1] * (query.dim() - mask.dim()), *mask.shape[1:])
            mask = mask.expand(*query.shape[:2], *mask.shape[2:]).flatten(0, 1)
        parts = (one.flatten(0, 1) for one in (query, key, value))
        found = fused(*parts, dropout, causal, attn_mask=mask, scale=scale)
        return tuple(one.reshape(*query.shape[:2], *one.shape[1:]) for one in found)

    return attention
