"""One training with the library's step and either kind of batches.

Not a run of the library: its plans are for Poisson sampling, so partitions are trained here, outside ledger and run
directory, and their epsilon is what the Gaussian mechanism costs without amplification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sparsedp._serialization import FrozenMap
from sparsedp.batch import MicroBatch, supervised
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import Query, make_engine
from sparsedp.loading import Loading
from sparsedp.methods import Controller, MethodOptions, OffSupport, build_plan, get_method
from sparsedp.optimizers.sparse import support_optimizer
from sparsedp.parameters import Layout
from sparsedp.privacy.ledger import Charge, MemoryLedger
from sparsedp.privacy.mechanism import GaussianMechanism
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import PublicRandomness, SeededRandomness
from sparsedp.sampling import LogicalBatch, PoissonSampler
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.pages.partition import gaussian_epsilon
from sparsedp_experiments.runs.evaluation import evaluator
from sparsedp_experiments.runs.networks import build_model

POISSON, PARTITION = "Poisson", "partition"
_ORDER_KEY = 7
_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The settings of one training; `active_ratio` is the final one of random sparsification."""

    model: str
    epsilon: float
    delta: float
    method: str
    active_ratio: float
    epochs: int
    batch_size: int
    clip_norm: float
    lr: float
    momentum: float
    sampling: str
    seed: int


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out.

    Attributes:
        accuracy: on the test part, after the last step.
        noise_multiplier: that of Poisson sampling at the target epsilon, whatever the batches were.
        epsilon: the true one: the target for Poisson batches, one Gaussian mechanism per epoch for partitions.
    """

    accuracy: float
    noise_multiplier: float
    epsilon: float


def train(training: Training, bundle: DataBundle) -> Trained:
    """Train and evaluate."""
    method = get_method(training.method)
    options = MethodOptions(active_ratio=training.active_ratio)
    plan = build_plan(
        method,
        options,
        units=len(bundle.train),
        batch_size=training.batch_size,
        epochs=training.epochs,
        epsilon=training.epsilon,
        delta=training.delta,
        clip_norm=training.clip_norm,
    )
    model = build_model(training.model, FrozenMap({}), bundle.input_shape, len(bundle.classes), training.seed)
    layout, (phase,) = Layout.of(model), plan.phases
    engine = make_engine(model, supervised(nn.CrossEntropyLoss(reduction="none")))
    controller = Controller(plan, layout, PublicRandomness(training.seed))
    learn = support_optimizer(
        model,
        layout,
        torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum),
        coasts=method.off_support is OffSupport.COASTS,
    )
    randomness = SeededRandomness(training.seed)
    for batch in _BATCHES[training.sampling](bundle, plan, randomness):
        setting = controller.setting(batch.step)
        query = Query(setting.support, FlatClip(training.clip_norm), setting.geometry)
        released = GaussianMechanism(MemoryLedger(), randomness).release(
            GradientSum(engine, batch, query),
            Charge(phase.name, batch.step, phase.sampling_rate, phase.noise_multiplier),
            expected_batch_size=plan.expected_batch_size(phase),
        )
        learn.apply(released)
        controller.observe(released)
    return Trained(
        accuracy=_accuracy(model, bundle),
        noise_multiplier=phase.noise_multiplier,
        epsilon=_EPSILON[training.sampling](training, phase.noise_multiplier),
    )


def partition_batches(bundle: DataBundle, plan: Plan, seed: int) -> Iterator[LogicalBatch]:
    """Every epoch the rows in a new random order, cut into as many batches as the plan's epoch has steps."""
    (phase,) = plan.phases
    order, before = PublicRandomness(seed), 0
    for epoch, end in enumerate(plan.epoch_ends()):
        rows = order.permutation(len(bundle.train), key=(_ORDER_KEY, epoch))
        for step, part in enumerate(rows.chunk(end - before), start=before):
            secret = SeededRandomness(seed).secret((step,))
            batches = (
                MicroBatch(bundle.train.rows_at(some), seed=secret.model_seed(int(some[0])))
                for some in torch.split(part, _AT_ONCE)
            )
            yield LogicalBatch(step, secret, batches)
        before = end
    assert before == phase.steps


def _poisson_batches(bundle: DataBundle, plan: Plan, randomness: SeededRandomness) -> Iterator[LogicalBatch]:
    (phase,) = plan.phases
    sampler = PoissonSampler(
        bundle.train,
        sampling_rate=phase.sampling_rate,
        randomness=randomness,
        loading=Loading(max_physical_batch=_AT_ONCE),
    )
    return sampler.batches(0, phase.steps)


def _accuracy(model: nn.Module, bundle: DataBundle) -> float:
    model.eval()
    with torch.no_grad():
        return float(evaluator(bundle.test)(model)["accuracy"])


_BATCHES: Mapping[str, Callable[[DataBundle, Plan, SeededRandomness], Iterator[LogicalBatch]]] = {
    POISSON: _poisson_batches,
    PARTITION: lambda bundle, plan, randomness: partition_batches(bundle, plan, randomness.seed),
}
_EPSILON: Mapping[str, Callable[[Training, float], float]] = {
    POISSON: lambda training, noise: training.epsilon,
    PARTITION: lambda training, noise: gaussian_epsilon(noise, training.epochs, training.delta),
}
