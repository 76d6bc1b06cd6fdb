"""Refuses models that clipping cannot protect, or that mean something else one example at a time; before training.

All runs here are on made-up examples, which have the structure, shapes and dtypes of the data and none of its values.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sparsedp.batch import Batch, LossFunction, example_count, slice_batch, to_device, validate_losses
from sparsedp.errors import ModelError
from sparsedp.grad_sample.embedding import refuse_embedding
from sparsedp.grad_sample.isolation import (
    isolated_losses,
    losses_at,
    made_up,
    modes_of,
    on_made_up,
    slow_operators,
    why_not_isolated,
)
from sparsedp.grad_sample.trace import Graph
from sparsedp.parameters import ParameterLayout
from sparsedp.randomness import PublicRandomness, fork_generators

EXAMPLES = 3
"""Made-up examples in the batch whose results are compared with those of single examples."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.15}
"""Relative difference between an example in a batch and alone that rounding in a dtype explains."""
REMEDY = (
    "use a layer that looks at one example at a time, such as nn.GroupNorm, nn.LayerNorm or nn.InstanceNorm"
)
LOSS = "<loss>"
"""Stands for the loss where a module's name is expected."""

logger = logging.getLogger("sparsedp")


@final
class ModelValidation:
    """Validates a model before its first step, and again whenever a module was switched between `train` and `eval`.

    Formal guarantees: nothing depends on the values of the rows that are given, only on their shapes and dtypes.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, rows: Batch) -> None:
        self._model, self._loss, self._rows = model, loss, rows
        self._modes: tuple[bool, ...] | None = None
        self._said: set[str] = set()

    @functools.cached_property
    def kind(self) -> str:
        """The kind of made-up examples that the model takes."""
        device = next(self._model.parameters()).device
        with fork_generators(PublicRandomness(0).generator_seed(()), device):
            return _kind_it_takes(self._model, self._loss, to_device(self._rows, device))

    @property
    def examples(self) -> Batch:
        """Made-up examples that the model takes."""
        return made_up(to_device(self._rows, next(self._model.parameters()).device), EXAMPLES, self.kind)

    def check(self) -> None:
        """Validate the model if it is not in the modes it was last validated in; say once what will be slow."""
        modes = modes_of(self._model)
        if modes != self._modes:
            for note in validate_model(self._model, self._loss, self._rows):
                if note not in self._said:
                    self._said.add(note)
                    logger.warning("%s", note)
            self._modes = modes


def validate_model(model: nn.Module, loss: LossFunction, rows: Batch) -> tuple[str, ...]:
    """Refuse what isolation cannot make private or would change the meaning of; give notes on what will be slow.

    What PyTorch cannot vectorise is no reason to refuse: it goes one example after the other.

    Edge cases: where results are random beyond dropout, in evaluation mode too, meaning is not compared.

    Raises:
        ModelError: the module at fault by name, and the remedy.
        SparseDPError: the loss is not one number per example.
    """
    parameters = ParameterLayout.of(model).parameters(model)
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ModelError(f"parameter {name!r} holds NaN or infinite values; re-initialise the model")
    refuse_known_layers(model)
    refuse_hooks(model)
    device = parameters[0].device
    here = to_device(rows, device)
    with (
        fork_generators(PublicRandomness(0).generator_seed(()), device),
        torch.enable_grad(),
        _put_back(model) as before,
    ):
        made = made_up(here, EXAMPLES, _kind_it_takes(model, loss, here))
        _refuse_writes_and_functions(model, loss, made, before)
        _refuse_other_meaning(model, loss, made)
        if (reason := why_not_isolated(model, loss, here)) is not None:
            return (
                f"the model goes through one example after the other, as PyTorch cannot vectorise it: {reason}",
            )
        loops = slow_operators(model, loss, made)
    return tuple(
        f"PyTorch runs {name} in a loop over the examples: it has no batching rule" for name in loops
    )


def refuse_known_layers(model: nn.Module) -> None:
    """Refuse layers that use or remember the whole batch, in the modes they are in."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            raise ModelError(
                f"{describe(name, module)} normalises with the statistics of the whole batch, so one example changes "
                "the gradients of all others and clipping protects nobody; a pretrained network keeps what it has "
                "learned by sparsedp.batch_norm.freeze_batch_norm(model), which makes it a fixed affine map. To "
                f"train from scratch, {REMEDY}: nn.GroupNorm(num_groups, {module.num_features}) in its place"
            )
        if (reason := refuse_embedding(module)) is not None:
            raise ModelError(f"{describe(name, module)}: {reason}")


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients: a vectorised run skips them, or they would be given all examples' at once."""
    for name in ("forward", "forward_pre", "backward", "backward_pre"):
        if getattr(torch_module, f"_global_{name}_hooks"):
            raise _hook_refused(f"all modules ({name})")
    for name, part in model.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise _hook_refused(f"the backward pass of {describe(name, part)}")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise _hook_refused(f"parameter {name!r}")


def _hook_refused(where: str) -> ModelError:
    return ModelError(
        f"a hook is registered on {where}, but per-example gradients are computed all at once and are private until "
        "they are clipped and noised; remove the hook, and change outputs or the loss in the forward pass instead"
    )


def describe(name: str, module: nn.Module) -> str:
    """A module in words."""
    kind = type(module).__name__
    return f"module {name!r} ({kind})" if name else f"the model itself ({kind})"


def _kind_it_takes(model: nn.Module, loss: LossFunction, rows: Batch) -> str:
    """The first kind of made-up examples that the model runs on, one at a time."""

    def run(kind: str) -> str:
        made = made_up(rows, EXAMPLES, kind)
        for i in range(EXAMPLES):
            loss(model, slice_batch(made, slice(i, i + 1)))
        return kind

    return on_made_up(run)


def _refuse_writes_and_functions(
    model: nn.Module, loss: LossFunction, made: Batch, before: dict[str, Tensor]
) -> None:
    with _tensor_hooks() as noted:
        losses = validate_losses(loss(model, made), example_count(made))
    if noted:
        raise _hook_refused("a tensor in the forward pass")
    for name, value in _values(model).items():
        if name not in before or not _same(before[name], value):
            owner = name.rpartition(".")[0]
            raise ModelError(
                f"{describe(owner, model.get_submodule(owner))} updates {name!r} in the forward pass: what it "
                "remembers of the data is released without noise. Freeze it (for example "
                f"track_running_stats=False), or {REMEDY}"
            )
    for node in Graph.of(losses).nodes:
        if isinstance(node, BackwardCFunction):
            raise ModelError(
                f"the model's graph holds a backward of its own, {node.name()}: a torch.autograd.Function would be "
                "given the gradients of all examples at once. Write it with torch operations; for checkpointing, "
                "use checkpoint(..., use_reentrant=False)"
            )
        if node.next_functions and _has_hook(node):
            raise _hook_refused(f"the node {node.name()} of the autograd graph")


@contextmanager
def _put_back(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Leave modes, parameters and buffers as they were, in whatever tensors hold them; gives their values."""
    before = _values(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield before
    finally:
        for module, training in modes:
            module.training = training
        for name, value in _tensors(model):
            if name in before and not _same(before[name], value):
                value.data.copy_(before[name])


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in _tensors(model)}


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    if a.shape != b.shape:
        return False
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


def _has_hook(node: Node) -> bool:
    """The dictionary a new hook joins tells of those already there."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        others = len(handle.hooks_dict_ref() or ()) > 1
        handle.remove()
        if others:
            return True
    return False


@contextmanager
def _tensor_hooks() -> Iterator[list[str]]:
    """The list fills as hooks are registered on tensors; the autograd graph itself keeps them out of sight."""
    noted: list[str] = []
    original: Callable[[Tensor, Any], Any] = Tensor.register_hook

    def register(tensor: Tensor, hook: Any) -> Any:
        noted.append("hook")
        return original(tensor, hook)

    Tensor.register_hook = register  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        Tensor.register_hook = original  # type: ignore[method-assign]


class _Results(NamedTuple):
    """Losses, outputs of modules in the order of calls, and the tolerance of the coarsest numbers among them."""

    losses: Tensor
    outputs: dict[tuple[str, int, int], Tensor]
    """By the module's name, the number of its call, and the place among the tensors it returned."""
    tolerance: float


def _refuse_other_meaning(model: nn.Module, loss: LossFunction, made: Batch) -> None:
    """Compare a batch with its examples one by one, with the model's parameters and with others nearby."""
    with WithoutDropout():
        if _is_random(model, loss, made):
            model.eval()
            if _is_random(model, loss, made):
                return
        for values in ({}, _nearby(model)):
            try:
                together = _run(model, loss, made, values)
            except RuntimeError:
                return  # one example at a time is the only way that such a model runs
            examples = (slice_batch(made, slice(i, i + 1)) for i in range(example_count(made)))
            alone = [_run(model, loss, one, values) for one in examples]
            if (name := _first_difference(together, alone)) is not None:
                where = "the loss" if name == LOSS else describe(name, model.get_submodule(name))
                raise ModelError(
                    f"{where} mixes examples, or is handed mixed ones: it gives an example in a batch another result "
                    "than the example alone. Training runs the model one example at a time, so it would mean "
                    f"something else; {REMEDY}, and write the loss so that each example is computed by itself"
                )
            if not values and not _is_vectorised_alike(model, loss, made, alone):
                raise ModelError(
                    "the vectorised loss of an example is not its loss alone, so training would mean something else; "
                    "look for what the model does differently under torch.func.vmap"
                )


def _is_vectorised_alike(model: nn.Module, loss: LossFunction, made: Batch, alone: list[_Results]) -> bool:
    """Whether the vectorised losses are those of single examples, where PyTorch can vectorise the model."""
    try:
        isolated = isolated_losses(model, loss, made).detach()
    except Exception:  # whatever PyTorch cannot vectorise
        return True
    return not _differ(isolated, torch.cat([one.losses for one in alone]), max(x.tolerance for x in alone))


def _nearby(model: nn.Module) -> dict[str, Tensor]:
    """The parameters moved a little by public noise: a branch that starts at zero may mix examples later."""
    found = {}
    for place, (name, parameter) in enumerate(model.named_parameters()):
        size = max(0.1 * float(parameter.detach().float().square().mean().sqrt()), 0.02)
        move = PublicRandomness(0).normal(parameter.numel(), key=(place,)).reshape(parameter.shape)
        found[name] = (parameter.detach() + size * move.to(parameter)).to(parameter.dtype)
    return found


def _is_random(model: nn.Module, loss: LossFunction, made: Batch) -> bool:
    return not _same(loss(model, made).detach(), loss(model, made).detach())


def _run(model: nn.Module, loss: LossFunction, rows: Batch, values: dict[str, Tensor]) -> _Results:
    outputs: dict[tuple[str, int, int], Tensor] = {}
    calls: dict[str, int] = {}
    coarsest = [TOLERANCES.get(p.dtype, 1e-3) for p in model.parameters()]

    def record(name: str, output: Any) -> None:
        number = calls[name] = calls.get(name, -1) + 1
        for place, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor) and leaf.dim() and not is_functorch_wrapped_tensor(leaf):
                outputs[name, number, place] = leaf.detach()
                if leaf.is_floating_point():
                    coarsest.append(TOLERANCES.get(leaf.dtype, 1e-3))

    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: record(name, output))
        for name, module in model.named_modules()
    ]
    try:
        losses = losses_at(model, values, loss, rows) if values else loss(model, rows)
    finally:
        for handle in handles:
            handle.remove()
    return _Results(validate_losses(losses, example_count(rows)).detach(), outputs, max(coarsest))


def _first_difference(together: _Results, alone: list[_Results]) -> str | None:
    """Where loss or output of the model differ, the first module, in the order of calls, whose output does.

    Inside, examples may stand in another order, as long as all comes out right.
    """
    allowed = max(together.tolerance, *(one.tolerance for one in alone))
    differing = []
    for place, output in together.outputs.items():
        each = [found for one in alone if (found := one.outputs.get(place, output[:0])).shape[:1] == (1,)]
        joined = torch.cat(each or [output[:0]])
        if joined.shape == output.shape and _differ(output, joined, allowed):
            differing.append(place[0])
    if _differ(together.losses, torch.cat([one.losses for one in alone]), allowed):
        return differing[0] if differing else LOSS
    return differing[0] if "" in differing else None


def _differ(a: Tensor, b: Tensor, allowed: float) -> bool:
    """Whether examples' results differ by more than rounding; NaN in the same places is no difference."""
    if a.numel() == 0:
        return False
    x, y = (t.double().nan_to_num().reshape(len(t), -1) for t in (a, b))
    scale = torch.maximum(x.abs().amax(1), y.abs().amax(1)).clamp(min=1e-6)
    return bool(((x - y).abs().amax(1) > allowed * scale).any())


class WithoutDropout(TorchFunctionMode):
    """Lets dropout pass everything on, so that results are a function of the example: a choice of all masks."""

    _DROPOUTS = (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs |= {"dropout_p": 0.0} if len(args) < 5 else {}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        elif func is F.multi_head_attention_forward:
            kwargs["training"] = False
        elif func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
            # dropout is the last number but for the flags train, bidirectional and batch_first
            at = next(i for i in reversed(range(len(args))) if type(args[i]) is float)
            args = (*args[:at], 0.0, *args[at + 1 :])
        return func(*args, **kwargs)
