"""The order of an ordinary loop, kept: a batch is given, passed forward and backward, and stepped, once each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsedp.batch import PerSampleLoss, Rows, join_rows, row_count, select_rows, to_device
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.own_loop.deferred import MODEL, Deferred, describe, model_calls, same, without_reduction
from sparsedp.own_loop.trained import TrainedParameters
from sparsedp.randomness import own_generators
from sparsedp.results import Result, StepReport
from sparsedp.sampling import LogicalBatch
from sparsedp.training.trainer import Trainer


@final
class Loop:
    """Where a user's loop stands, and the trainer that takes its steps.

    **Privacy.** The step is the trainer's own, on the rows it drew: what the loop does with the copies it was given
    decides whether the step is taken, and nothing else. A loop that says anything but the step is refused.
    """

    def __init__(self, trainer: Trainer, loss: PerSampleLoss, no_rows: Rows, parts: int) -> None:
        self.trainer, self.parts = trainer, parts
        self._loss, self._no_rows = loss, no_rows
        self._device = next(trainer.model.parameters()).device
        self._trained = TrainedParameters(trainer.model)
        self._drawn: Iterator[LogicalBatch] | None = None
        self._batch: LogicalBatch | None = None
        self._part: Part | None = None
        self._seen, self._failed = 0, False

    @property
    def finished(self) -> bool:
        """Whether every step of the plan is taken."""
        return self.trainer.position >= self.trainer.plan.total_steps

    def epoch(self, model: Callable[..., Any]) -> Iterator[Rows]:
        """The batches of the epoch at work, each in its parts."""
        if self.finished:
            raise SparseDPError(
                f"all {self.trainer.plan.total_steps} steps of the plan are taken; a longer run needs a plan of its "
                "own: give make_private more epochs from the start"
            )
        ends = self.trainer.plan.epoch_ends()
        end = None
        while end is None or self.trainer.position < end:
            batch = self._next_batch()
            end = end or ends[bisect_right(ends, batch.step)]
            for rows in self._cut(batch):
                self._part = Part(rows, self._loss, model, self.parts)
                self._seen += 1
                yield rows
                self._check_used()
            if self._batch is not None:
                raise self._unfinished("the next batch was asked for")

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Deferred:
        """The model's output on the rows that are out, not computed."""
        if self._part is None:
            raise SparseDPError(
                "the model was called with gradients on, but no batch is out; take a batch from the loader first, "
                "and evaluate under torch.no_grad(). fit and other loops take the model inside: model.module"
            )
        return self._part.forward(args, kwargs)

    def check_not_private(self, values: object) -> None:
        """Refuse the rows that are out where nothing defers the computation."""
        if self._part is not None and self._part.holds(values):
            raise PrivacyError(
                "the model was called on the private batch under torch.no_grad(): its output would be seen without "
                "noise. Evaluate on held-out data"
            )

    def zero(self) -> None:
        """Forget what the user's own code has left, unless the loop is about to throw away what it has computed."""
        if self._part is not None and (self._part.done or self._seen > 1):
            raise SparseDPError(
                "zero_grad was called between backward and step, so the step would have no gradient; call it before "
                "the forward pass, or after the step"
            )
        self.trainer.model.zero_grad()

    def step(self) -> StepReport:
        """The private step of the batch that is out."""
        batch, part = self._batch, self._part
        if self._failed or batch is None or part is None:
            raise SparseDPError(
                "optimizer.step: the last step failed; resume the run from its checkpoint"
                if self._failed
                else "optimizer.step: no batch is out; the step of each batch of the loader is taken once"
            )
        if not part.done or self._seen < self.parts:
            raise self._unfinished("optimizer.step() was called")
        part.check_unchanged()
        self._trained.check_same()
        self._trained.check_no_gradient()
        self._batch, self._part, self._failed = None, None, True
        report = self.trainer.step(batch)
        self._failed = False
        if self.finished:
            self.finish()
        return report

    def finish(self) -> Result:
        """The run's result; modules stay in the modes they are in."""
        modes = {module: module.training for module in self.trainer.model.modules()}
        result = self.trainer.finish()
        for module, mode in modes.items():
            module.training = mode
        return result

    def _next_batch(self) -> LogicalBatch:
        if self._batch is not None:
            raise self._unfinished("another batch was asked for")
        if self._drawn is None:
            self._drawn = iter(self.trainer)
        batch = next(self._drawn)
        self._batch, self._part, self._seen = batch, None, 0
        return batch

    def _cut(self, batch: LogicalBatch) -> Iterator[Rows]:
        """Copies of the batch's rows in as many parts as the loop accumulates; some may be empty."""
        with own_generators(batch.secret.seed(), self._device):
            loaded = [micro.rows for micro in batch.load_ahead()]
        rows = join_rows(loaded) if loaded else self._no_rows
        rows = to_device(pytree.tree_map_only(Tensor, torch.clone, rows), self._device)
        bounds = [row_count(rows) * i // self.parts for i in range(self.parts + 1)]
        for first, last in pairwise(bounds):
            yield rows if self.parts == 1 else select_rows(rows, slice(first, last))

    def _check_used(self) -> None:
        if self._part is not None and not self._part.done:
            raise self._unfinished("the next batch was asked for")

    def _unfinished(self, what: str) -> SparseDPError:
        part = self._part
        missing = "step" if part is None or part.done else "backward" if part.calls else "forward"
        if missing == "step" and self._seen < self.parts:
            return SparseDPError(
                f"{what} after {self._seen} of the {self.parts} parts of a batch; go through all of them, as "
                f"accumulation={self.parts} says"
            )
        return SparseDPError(
            f"{what} before the {missing} of the batch that is out; every batch of the loader is passed forward, "
            "backward and stepped, once each. To step after several batches give make_private accumulation="
        )


@final
class Part:
    """Rows on their way through the loop."""

    def __init__(self, rows: Rows, loss: PerSampleLoss, model: Callable[..., Any], parts: int) -> None:
        self._tensors = [leaf for leaf in pytree.tree_leaves(rows) if isinstance(leaf, Tensor)]
        self._parts = parts
        self._rows, self._loss, self._model = rows, loss, model
        self._expected: Deferred | None = None
        self.calls, self.done = 0, False
        self._versions = [tensor._version for tensor in self._tensors]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Deferred:
        """Write down a call of the model."""
        self.check_unchanged()
        if torch.is_autocast_enabled(self._tensors[0].device.type):
            raise SparseDPError(
                "autocast around the loop does not reach the step; put it into the model's forward"
            )
        if self._expected is None:
            self._expected = self._trace()
        self.calls += 1
        if self.calls > max(model_calls(self._expected), 1):
            raise SparseDPError(
                f"the model was called {self.calls} times on one batch, and the loss calls it "
                f"{self.calls - 1} times; call it as loss_fn does"
            )
        return Deferred(MODEL, args, kwargs, self._backward)

    def holds(self, values: object) -> bool:
        """Whether any tensor in there shares memory with these rows."""
        mine = {tensor.untyped_storage().data_ptr() for tensor in self._tensors if tensor.numel()}
        leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel())
        return any(leaf.untyped_storage().data_ptr() in mine for leaf in leaves)

    def check_unchanged(self) -> None:
        """Refuse rows that were written to."""
        if self._versions != [tensor._version for tensor in self._tensors]:
            raise PrivacyError(
                "the batch was changed in place after the loader gave it; transform rows in the data set, where "
                "a row stands alone"
            )

    def _trace(self) -> Deferred:
        recorder = _Recorder(self._model, self._backward)
        expected = self._loss(recorder, self._rows)
        if not isinstance(expected, Deferred):
            raise SparseDPError(
                f"loss_fn: got {type(expected).__name__} from it, expected an expression over the model's output by "
                "torch functions; a loss that computes otherwise goes to fit or Trainer"
            )
        return expected

    def _backward(self, loss: Deferred) -> None:
        self.check_unchanged()
        if self.done:
            raise SparseDPError("backward was called twice for one batch; each batch is counted once")
        assert self._expected is not None
        if not any(same(self._expected, found) for found in (loss, without_reduction(loss, self._parts))):
            raise SparseDPError(
                f"the loop's loss is not loss_fn on the batch that the loader gave: got {describe(loss)}, expected "
                f"the mean or sum of {describe(self._expected)}. Call the loss_fn given to make_private (one loss "
                'per row, reduction="none") on the batch as it is; clipping row by row cannot undo a mean inside it'
            )
        self.done = True


class _Recorder:
    """The model as the loss function sees it while its expression is written down."""

    def __init__(self, model: Callable[..., Any], on_backward: Callable[[Deferred], None]) -> None:
        self._model, self._on_backward = model, on_backward

    def __call__(self, *args: Any, **kwargs: Any) -> Deferred:
        return Deferred(MODEL, args, kwargs, self._on_backward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
