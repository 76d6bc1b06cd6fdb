"""What a user's own loop holds: a model, an optimizer and a loader that take private steps and nothing else."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from sparsedp.batch import Rows
from sparsedp.errors import SparseDPError
from sparsedp.own_loop.loop import Loop
from sparsedp.results import Result, StepReport
from sparsedp.training.trainer import Trainer


@final
class PrivateModel(nn.Module):
    """The model of a private loop: on the loader's batch its output is written down, elsewhere it is computed.

    Attributes, `state_dict` and `load_state_dict` are those of the model inside, `module`; a copy of it, or what is
    read from its pickle, is the model inside alone.

    **Privacy.** With gradients on, only the batch that the loader has just given is taken, and nothing is computed on
    it here. Under `torch.no_grad()` it is the plain model, for held-out data; the batch that is out is refused.
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

    **Privacy.** Parameters never hold a raw gradient: `grad` is None but inside the step, where the release stands.
    """

    def __init__(self, optimizer: Optimizer, loop: Loop) -> None:
        # Optimizer's own __init__ would make groups and state of its own.
        self._inner, self._loop = optimizer, loop

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the optimizer inside."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self._inner.defaults

    def step(self, closure: None = None) -> StepReport:  # type: ignore[override]
        """Take the private step; gives back what was released."""
        if closure is not None:
            raise SparseDPError(
                "optimizer.step: got a closure, which computes the loss again; every look at private rows is paid "
                "for, so call forward, backward and step() in turn"
            )
        return self._loop.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in any loop; of the private step there is no gradient to forget."""
        self._loop.zero()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Refused: a run is resumed as a whole."""
        raise SparseDPError(
            "optimizer.load_state_dict: its state belongs to a support and a position in the ledger; resume the run "
            "with make_private(..., out=..., resume=True)"
        )

    def add_param_group(self, param_group: Mapping[str, Any]) -> NoReturn:
        """Refused: what is trained was planned."""
        raise SparseDPError(
            "optimizer.add_param_group: what is trained is part of the run; give make_private an optimizer over all "
            "parameters, and freeze the others with requires_grad_(False)"
        )

    def __repr__(self) -> str:
        return f"Private{self._inner!r}"


@final
class PrivateLoader:
    """The loader of a private loop: each pass gives the Poisson batches of one epoch, in order, each once.

    **Privacy.** Rows and their number are private: what your own code makes of them is not protected. A batch may be
    empty.
    """

    def __init__(self, loop: Loop, model: PrivateModel, dataset: Any) -> None:
        self._loop, self._model, self.dataset = loop, model, dataset

    def __iter__(self) -> Iterator[Rows]:
        return self._loop.epoch(self._model)

    def __len__(self) -> int:
        """Batches of an epoch, as the loop sees them."""
        return self._loop.trainer.plan.steps_per_epoch * self._loop.parts

    @property
    def epoch(self) -> int:
        """The epoch at work, from 0: a resumed loop is `for epoch in range(loader.epoch, epochs)`."""
        return bisect_right(self._loop.trainer.plan.epoch_ends(), self._loop.trainer.position)

    @property
    def trainer(self) -> Trainer:
        """The run: plan, position, support, history, and `save`."""
        return self._loop.trainer

    def finish(self) -> Result:
        """The run's result. After the last planned step the run is finished already; before, it is stopped here."""
        return self._loop.finish()

    def pause(self) -> None:
        """Save and close, to go on with `resume=True`."""
        self._loop.trainer.pause()
