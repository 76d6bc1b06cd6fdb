"""What a loop of `make_private` holds: model, optimizer, loader and criterion that take private steps only."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from sparsedp._private_values import WRITE_IT_AS, PrivateLoss, PrivateOutput, RefusedGradient
from sparsedp.batch import Batch, PerExampleLoss, concat_batches, tensors_of, to_device
from sparsedp.errors import ModelError, PrivacyError, SparseDPError
from sparsedp.randomness import fork_generators
from sparsedp.results import Result, StepReport
from sparsedp.sampling import LogicalBatch
from sparsedp.training.trainer import Trainer


@final
class Loop:
    """Where a user's loop stands, and the trainer that takes its steps.

    Formal guarantees: The step is the trainer's own, on the rows it drew. What the loop does with its copies of them
    decides whether the step is taken, and nothing else.
    """

    def __init__(self, trainer: Trainer, criterion: Any, no_rows: Batch) -> None:
        self.trainer, self.criterion, self.model = trainer, criterion, trainer.model
        self._no_rows = no_rows
        self._parameters = {
            name: (p, p.dtype, p.device) for name, p in self.model.named_parameters() if p.requires_grad
        }
        self._placeholders = {name: RefusedGradient(p) for name, (p, _, _) in self._parameters.items()}
        self._drawn: Iterator[LogicalBatch] | None = None
        self._batch: LogicalBatch | None = None
        self._rows: Batch = None
        self._versions: list[int] = []
        self._next, self._failed = "forward", False

    @property
    def finished(self) -> bool:
        return self.trainer.position >= self.trainer.plan.total_steps

    @property
    def epoch(self) -> int:
        return bisect_right(self.trainer.plan.epoch_ends(), self.trainer.position)

    def batches(self) -> Iterator[Batch]:
        if self.finished:
            raise SparseDPError(
                f"all {self.trainer.plan.total_steps} steps of the plan are taken; for a longer run give "
                "make_private more epochs from the start, as the noise depends on them"
            )
        self._drawn = iter(self.trainer) if self._drawn is None else self._drawn
        ends, end = self.trainer.plan.epoch_ends(), None
        while end is None or self.trainer.position < end:
            if self._batch is not None:
                raise self._unfinished("the next batch was requested")
            batch = next(self._drawn)
            end = end or ends[bisect_right(ends, batch.step)]
            self._batch, self._rows, self._next = batch, self._copied(batch), "forward"
            self._versions = [tensor._version for tensor in tensors_of(self._rows)]
            yield self._rows

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PrivateOutput:
        """A stand-in for the model's output on the batch that is out."""
        if self._batch is None or not self._shares_memory((args, kwargs)):
            raise SparseDPError(
                "the model was called, with gradients on, on something else than a batch that the private loader has "
                "just given. To evaluate, write `with torch.no_grad(): model(x)`, as model.eval() leaves gradients "
                "on; to train, take batches from private.loader, not from the loader that make_private was given"
            )
        self._check_unchanged()
        if isinstance(self.criterion, PerExampleLoss):
            raise SparseDPError(
                "a PerExampleLoss calls the model itself; call private.criterion(private.model, batch)"
            )
        inputs = self._rows[0] if isinstance(self._rows, (tuple, list)) and len(self._rows) == 2 else None
        if kwargs or len(args) != 1 or inputs is None or not _same_objects(args[0], inputs):
            raise SparseDPError(
                "the model was called with other arguments than the inputs of the batch as the loader gave them, the "
                "x of `for x, y in loader`; expected model(x). Convert, reshape or slice inputs in the data set or "
                f"in the model's forward. Where the model takes more than the inputs: {WRITE_IT_AS}"
            )
        return PrivateOutput(self._batch)

    def loss(self, first: Any, second: Any) -> PrivateLoss:
        """A stand-in for the loss of the batch that is out, once it is known to be that."""
        batch = self._out("private.criterion")
        self._check_unchanged()
        if isinstance(self.criterion, PerExampleLoss):
            if not isinstance(first, nn.Module) or not _same_objects(second, self._rows):
                raise SparseDPError(
                    "private.criterion: the loss is a PerExampleLoss; expected private.criterion(private.model, "
                    "batch) with the batch as the loader gave it"
                )
        elif not isinstance(first, PrivateOutput) or first._batch is not batch:
            raise SparseDPError(
                f"private.criterion: got {type(first).__name__}, expected the output of private.model(x) on the "
                "batch that the loader has just given"
            )
        elif not _same_objects(second, self._rows[1]):
            raise SparseDPError(
                "private.criterion: got other targets than those of the batch as the loader gave them, the y of "
                "`for x, y in loader`; convert them (.float(), .view(-1), ...) in the data set or inside the "
                f"criterion. For a loss of another form: {WRITE_IT_AS}"
            )
        self._next = "backward" if self._next == "forward" else self._next
        return PrivateLoss(self.backward)

    def backward(self) -> None:
        """Note that the loop asks for the gradient, and put placeholders where it would be."""
        self._out("loss.backward()")
        if self._next == "step":
            raise SparseDPError(
                "backward was called twice for one batch; every batch counts once in the guarantee"
            )
        self._check_unchanged()
        self._check_parameters()
        for name, placeholder in self._placeholders.items():
            self._parameters[name][0].grad = placeholder
        self._next = "step"

    def zero_grad(self) -> None:
        """Forget gradients of the user's own code, unless the loop is about to throw away the batch's."""
        if self._batch is not None and self._next == "step":
            raise SparseDPError(
                "zero_grad was called between backward and step, so the step would have no gradient; call it before "
                "the forward pass, or after the step"
            )
        self.model.zero_grad()

    def step(self) -> StepReport:
        if self._failed:
            raise SparseDPError("optimizer.step: the last step failed; resume the run from its checkpoint")
        batch = self._out("optimizer.step()")
        if self._next != "step":
            raise self._unfinished("optimizer.step() was called")
        self._check_unchanged()
        for name, (p, _, _) in self._parameters.items():
            if p.grad is self._placeholders[name]:
                p.grad = None
        self._check_parameters()
        self._batch, self._rows, self._failed = None, None, True
        report = self.trainer.step(batch)
        self._failed = False
        if self.finished:
            self.finish()
        return report

    def finish(self) -> Result:
        """The run's result; modules stay in the modes they are in."""
        modes = {module: module.training for module in self.model.modules()}
        result = self.trainer.finish()
        for module, mode in modes.items():
            module.training = mode
        return result

    def check_not_private(self, values: object) -> None:
        """Refuse the rows that are out where the model is computed."""
        if self._batch is not None and self._shares_memory(values):
            raise PrivacyError(
                "the model was called on the private batch under torch.no_grad(): its output would be seen without "
                "noise. Evaluate on held-out data"
            )

    def _copied(self, batch: LogicalBatch) -> Batch:
        """The batch's rows for the loop to hold: writing to them does not reach the step."""
        device = next(self.model.parameters()).device
        with fork_generators(batch.secret.seed(), device):
            loaded = [micro.rows for micro in batch.load_ahead()]
        rows = concat_batches(loaded) if loaded else self._no_rows
        return to_device(pytree.tree_map_only(Tensor, torch.clone, rows), device)

    def _shares_memory(self, values: object) -> bool:
        own = tensors_of(self._rows)
        mine = {tensor.untyped_storage().data_ptr() for tensor in own if tensor.numel()}
        return any(
            leaf.untyped_storage().data_ptr() in mine if leaf.numel() else any(leaf is one for one in own)
            for leaf in tensors_of(values)
        )

    def _check_unchanged(self) -> None:
        if torch.is_autocast_enabled(next(self.model.parameters()).device.type):
            raise SparseDPError(
                "autocast around the loop does not reach the step; put it into the model's forward"
            )
        if self._versions != [tensor._version for tensor in tensors_of(self._rows)]:
            raise PrivacyError(
                "the batch was changed in place after the loader gave it; transform examples in the data set, one by "
                "one"
            )

    def _out(self, what: str) -> LogicalBatch:
        if self._batch is None:
            raise SparseDPError(
                f"{what}: no batch is out; take batches from private.loader, and step each of them once"
            )
        return self._batch

    def _unfinished(self, what: str) -> SparseDPError:
        missing = {"forward": "forward pass", "backward": "backward", "step": "step"}[self._next]
        return SparseDPError(
            f"{what} before the {missing} of the batch that is out; every batch of the loader is passed forward, "
            "backward and stepped, once each. Batches are not accumulated: give the loader the batch size that a "
            "step is to have, and bound memory by max_physical_batch"
        )

    def _check_parameters(self) -> None:
        """Refuse a model that holds other tensors by now, which the optimizer would not move, or gradients."""
        now = dict(self.model.named_parameters())
        others = [
            name
            for name, (p, dtype, device) in self._parameters.items()
            if now.get(name) is not p or (p.dtype, p.device) != (dtype, device)
        ]
        if others:
            raise ModelError(
                f"the model's parameters {others[:6]} are not the ones that make_private was given: they were "
                "replaced (load_state_dict(..., assign=True), a new layer) or moved to another dtype or device. Copy "
                "values into the parameters that are there, or call make_private again for the changed model"
            )
        found = [name for name, (p, _, _) in self._parameters.items() if p.grad is not None]
        if found:
            raise SparseDPError(
                f"the parameters {found[:6]} hold a .grad, from a backward() of something else than "
                "private.criterion, which the private step would throw away. Decay weights by the optimizer's "
                "weight_decay; put any other penalty into a PerExampleLoss; model.zero_grad() clears what is there"
            )


def _same_objects(given: object, expected: object) -> bool:
    """Whether two trees hold the very same tensors."""
    mine, theirs = pytree.tree_leaves(given), pytree.tree_leaves(expected)
    return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))


@final
class PrivateCriterion:
    """The criterion of a private loop: `private.criterion(private.model(x), y).backward()`.

    It takes the output of the private model and the targets, both of the batch that is out; for a `PerExampleLoss`
    the private model and the batch. A mean or sum over the batch is taken apart per example.
    """

    def __init__(self, loop: Loop) -> None:
        self.__loop = loop

    def __call__(self, output: Any, targets: Any) -> Any:
        """A loss that has `backward()` alone; of held-out outputs, under `torch.no_grad()`, the number."""
        loop = self.__loop
        private = isinstance(output, (PrivateOutput, PrivateModel))
        if not private and not torch.is_grad_enabled() and not isinstance(loop.criterion, PerExampleLoss):
            return loop.criterion(output, targets)
        return loop.loss(output, targets)


@final
class PrivateModel(nn.Module):
    """The model of a private loop: on the loader's batch its output is opaque, elsewhere it is computed.

    Attributes, `state_dict` and `load_state_dict` are those of the model inside, `module`; a copy of it, or what is
    read from its pickle, is the model inside alone.

    Formal guarantees: With gradients on, only the batch that the loader has just given is taken, and nothing is
    computed on it here. Under `torch.no_grad()` it is the plain model, for held-out data; the batch that is out is
    refused.
    """

    def __init__(self, module: nn.Module, loop: Loop) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.__dict__["_loop"] = loop
        self.register_load_state_dict_pre_hook(_under_the_module)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output: not computed on the loader's batch."""
        loop: Loop = self.__dict__["_loop"]
        if torch.is_grad_enabled() and not loop.finished:
            return loop.forward(args, kwargs)
        loop.check_not_private((args, kwargs))
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model inside."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Into the model inside."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        return _as_it_is, (self.module,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _under_the_module(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Where a module around this one loads its state: names in it are those of the model inside."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


@final
class PrivateOptimizer(Optimizer):
    """The optimizer of a private loop: `step` releases and applies the noisy gradient of the batch that is out.

    Groups and state are those of the optimizer inside, so learning-rate schedulers work as usual.
    """

    def __init__(self, optimizer: Optimizer, loop: Loop) -> None:
        # Optimizer's own __init__ would make groups and state of its own.
        self._inner, self._loop = optimizer, loop

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __reduce__(self) -> NoReturn:
        raise SparseDPError("optimizer: it belongs to its run and is not copied; copy optimizer.state_dict()")

    def step(self, closure: None = None) -> StepReport:  # type: ignore[override]
        """Take the private step; gives back what was released."""
        if closure is not None:
            raise SparseDPError(
                "optimizer.step: got a closure, which computes the loss again; every computation on private rows is "
                "paid for, so call forward, backward and step() in turn"
            )
        return self._loop.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in any loop; of the private step there is no gradient to forget."""
        self._loop.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer inside has it over all coordinates; those off the support have fresh state."""
        return self._loop.trainer.learner.optimizer_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the state that `state_dict` gave, here or in another run; state off the support is dropped."""
        self._loop.trainer.learner.load_optimizer_state_dict(state_dict)

    def add_param_group(self, param_group: Mapping[str, Any]) -> NoReturn:
        """Refused: what is trained was planned."""
        raise SparseDPError(
            "optimizer.add_param_group: what is trained is part of the run; give make_private an optimizer over all "
            "parameters, and freeze the others with requires_grad_(False)"
        )

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name != "step":  # learning-rate schedulers wrap step
            raise SparseDPError(
                f"optimizer.{name} = ...: nothing reads it, and what the guarantee rests on is fixed by the plan; "
                "give make_private max_grad_norm, noise_multiplier, epsilon and the like before training"
            )
        super().__setattr__(name, value)


@final
class PrivateLoader:
    """The loader of a private loop: each pass gives the Poisson batches of one epoch, in order, each once.

    Rows and their number are private: what your own code makes of them is not protected. A batch may be empty.
    """

    def __init__(self, loop: Loop, dataset: Any) -> None:
        self._loop, self.dataset = loop, dataset

    def __iter__(self) -> Iterator[Batch]:
        return self._loop.batches()

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._loop.trainer.plan.steps_per_epoch

    @property
    def batch_size(self) -> float:
        """The expected size of a batch."""
        plan = self._loop.trainer.plan
        return plan.expected_batch_size(plan.phases[-1])

    @property
    def epoch(self) -> int:
        """The epoch at work, from 0: a resumed loop is `for epoch in range(loader.epoch, epochs)`."""
        return self._loop.epoch
