"""One training step of each contender: everything a user pays for on a given batch.

Each takes the step with SGD and momentum; the private ones clip to norm 1 and add noise of multiplier 1.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.supports import support_of
from benchmarks.workloads import per_sample_loss, workload_of

Batch = tuple[Tensor, Tensor]
Step = Callable[[], None]

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
SAMPLING_RATE = 0.01


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the benchmark. `rows` overrides the model's batch size."""

    model: str
    contender: str
    active_ratio: float = 1.0
    support: str = "full"
    rows: int | None = None


def make_step(job: Job) -> Step:
    """A function that takes one step of the job's contender on its model's batch."""
    workload = workload_of(job.model)
    model, batch = workload.model(), workload.batch(job.rows)
    return ALL_CONTENDERS[job.contender](job, model, batch)


def _optimizer(job: Job, model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=1e-3, momentum=workload_of(job.model).momentum)


def _sgd(job: Job, model: nn.Module, batch: Batch) -> Step:
    optimizer = _optimizer(job, model)
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def _sgd_sparse(job: Job, model: nn.Module, batch: Batch) -> Step:
    """SGD that touches only the rows of the batch: PyTorch's sparse gradients."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
    return _sgd(job, model, batch)


def _opacus(mode: str, job: Job, model: nn.Module, batch: Batch) -> Step:
    """Opacus as its users set it up, but for Poisson sampling: the batch is given."""
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    warnings.filterwarnings("ignore")
    for part in model.modules():
        if hasattr(part, "places_by_row"):
            part.places_by_row = True  # Opacus takes no ids that all samples share
    if any(isinstance(part, nn.LSTM) for part in model.modules()):
        model = ModuleValidator.fix(model)  # with Opacus's own recurrent layers
    criterion: Callable[[Tensor, Tensor], Tensor] = nn.CrossEntropyLoss()
    wrapped, optimizer, *rest = PrivacyEngine().make_private(
        module=model,
        optimizer=_optimizer(job, model),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(*batch), batch_size=batch[0].shape[0]),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    if len(rest) == 2:
        criterion = rest[0]
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(inputs), targets).backward()
        optimizer.step()

    return step


def _sparsedp(job: Job, model: nn.Module, batch: Batch) -> Step:
    from sparsedp.batch import MicroBatch
    from sparsedp.clipping import FlatClip
    from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
    from sparsedp.optimizers.sparse import SupportOptimizer
    from sparsedp.privacy.charge import Charge, ChargeLog
    from sparsedp.privacy.mechanism import GaussianMechanism
    from sparsedp.privacy.queries import GradientSum
    from sparsedp.randomness import SystemRandomness

    engine = BookKeepingEngine(model, per_sample_loss)
    query = ClippedSumQuery(support_of(job.support, engine.layout, job.active_ratio), FlatClip(CLIP_NORM))
    optimizer = SupportOptimizer(model, engine.layout, _optimizer(job, model), coasts=False)
    ledger, randomness = ChargeLog(), SystemRandomness()
    steps = itertools.count()

    def step() -> None:
        released = GaussianMechanism(ledger, randomness).release(
            GradientSum(engine, [MicroBatch(batch)], query),
            Charge("train", next(steps), SAMPLING_RATE, NOISE_MULTIPLIER),
            expected_batch_size=float(batch[0].shape[0]),
        )
        optimizer.apply(released)
        if engine.notes:
            raise RuntimeError(f"not on the fast path: {engine.notes[0]}")

    return step


CONTENDERS: dict[str, Callable[[Job, nn.Module, Batch], Step]] = {
    "sgd": _sgd,
    "opacus-hooks": partial(_opacus, "hooks"),
    "opacus-ew": partial(_opacus, "ew"),
    "opacus-ghost": partial(_opacus, "ghost"),
    "sparsedp": _sparsedp,
}
ALL_CONTENDERS = {**CONTENDERS, "sgd-sparse": _sgd_sparse}
"""With the one that takes embedding tables only."""
