"""What needs more than a run of the library: RS's Table 3 (sampling by partition) and AdaDPIGU's (its noise).

`python -m sparsedp_experiments sweep rs-table3` trains what has no record yet. The library's plans are for Poisson
sampling, so partitions are trained here, outside ledger and run directory, and their epsilon is what the Gaussian
mechanism costs without amplification.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import track
from scipy.optimize import brentq
from scipy.special import log_ndtr
from torch import nn

from sparsedp._serialization import FrozenMap, canonical, sha256
from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import ClippedSumQuery, make_engine
from sparsedp.loading import DataConfig
from sparsedp.methods import OffSupport, SupportScheduler, build_plan, get_method
from sparsedp.optimizers.sparse import SupportOptimizer
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.mechanism import GaussianMechanism
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import PublicRandomness, SeededRandomness
from sparsedp.sampling import LogicalBatch, PoissonSampler
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.runs.execute import build_model, evaluator, load_data
from sparsedp_experiments.runs.grid import CONFIGS, RESULTS, Contrast, read_toml
from sparsedp_experiments.runs.papers import label, read_paper
from sparsedp_experiments.runs.results import Record, append_row, commit, make_rows, read_rows
from sparsedp_experiments.runs.settings import Settings
from sparsedp_experiments.runs.tables import NONE, difference_text, markdown_table, mean_text

NAME = "rs-table3"
POISSON, PARTITION = "Poisson", "partition"
DELTA = 1e-5
ACCOUNTANTS = {"rdp-classic": "RDP, classic conversion", "rdp": "RDP, tight conversion", "pld": "PLD"}
_NOISE_RECORDS = RESULTS / "adadpigu.jsonl"
_RECORDS = RESULTS / "rs.jsonl"
_SHARED = ("model", "delta", "epochs", "batch_size", "clip_norm", "lr", "momentum")
_ORDER_KEY = 7
_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Steps:
    """How long DP-SGD trains, and on how many units."""

    units: int
    batch_size: int
    epochs: int


ADADPIGU: Mapping[str, Steps] = {"mnist": Steps(60_000, 1000, 200), "cifar10": Steps(50_000, 500, 200)}
"""Numbers AdaDPIGU does not state, found by inverting its Table 3 with the classic RDP accountant."""
RS = Steps(50_000, 1000, 48)
"""CIFAR-10 with the batch and the epochs of RS's published command."""


def noise_multiplier(steps: Steps, epsilon: float, accountant: str) -> float:
    """The least noise that keeps DP-SGD with these numbers within epsilon."""
    plan = build_plan(
        get_method("dp-sgd"),
        **asdict(steps),
        epsilon=epsilon,
        delta=DELTA,
        max_grad_norm=1.0,
        accountant=accountant,
    )
    return plan.phases[0].noise_multiplier


def noise_table() -> list[str]:
    """AdaDPIGU's Table 3, the noise for its epsilons, from records; what has none is computed and appended."""
    rows = (row for row in read_rows(_NOISE_RECORDS) if row["experiment"] == "adadpigu-table3")
    found: dict[str, float] = {row["config_hash"]: row["noise"] for row in rows}

    def ours(dataset: str, epsilon: float, accountant: str) -> float:
        steps = ADADPIGU[dataset]
        question = {**asdict(steps), "epsilon": epsilon, "delta": DELTA, "accountant": accountant}
        name = sha256(canonical(question))
        if name not in found:
            found[name] = round(noise_multiplier(steps, epsilon, accountant), 6)
            head = {"experiment": "adadpigu-table3", "config_hash": name}
            append_row(_NOISE_RECORDS, {**head, "question": question, "noise": found[name]})
        return found[name]

    lines = []
    for (dataset, epsilon), number in read_paper("adadpigu").table("table3").rows.items():
        steps = f"batch {ADADPIGU[dataset].batch_size:,}, {ADADPIGU[dataset].epochs} epochs"
        noises = [f"{ours(dataset, float(epsilon), name):.2f}" for name in ACCOUNTANTS]
        lines.append([dataset, steps, epsilon, f"{number.value:.2f}", *noises])
    return markdown_table(["data set", "steps", "epsilon", "paper", *ACCOUNTANTS.values()], lines)


def gaussian_epsilon(noise_multiplier: float, compositions: int, delta: float = DELTA) -> float:
    """Epsilon of so many Gaussian mechanisms of sensitivity one (Balle and Wang 2018, Theorem 8).

    With zero-out neighbours a record is in one batch of every epoch, so `compositions` is the number of epochs.
    """
    mu = math.sqrt(compositions) / noise_multiplier

    def excess(epsilon: float) -> float:
        first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        second = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
        return first - second - delta

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, mu * mu / 2 + mu * 40, xtol=1e-10))


def price_table() -> list[str]:
    """What partitions cost with the noise of Poisson sampling, at RS's epsilons. Needs no training."""
    rows = []
    for epsilon in (3.0, 1.0):
        for accountant in ("rdp", "pld"):
            noise = noise_multiplier(RS, epsilon, accountant)
            true = gaussian_epsilon(noise, RS.epochs)
            rows.append([f"{epsilon:g}", accountant.upper(), f"{noise:.2f}", f"{true:.1f}"])
    headings = ["epsilon, Poisson", "accountant", "noise multiplier", "epsilon of partitions with that noise"]
    return markdown_table(headings, rows)


@dataclass(frozen=True, slots=True)
class Partitions:
    """The trainings of RS's Table 3, as a claim can be tested on them."""

    axes: Mapping[str, Sequence[str]]
    records: tuple[Record, ...]
    name: str = NAME


def read_partitions() -> Partitions:
    """Every record of them there is."""
    axes: dict[str, list[str]] = {"epsilon": [], "method": [], "sampling": []}
    records = []
    for row in (row for row in read_rows(_RECORDS) if row["experiment"] == NAME):
        settings = row["settings"]
        cell = {axis: label(settings[axis]) for axis in axes}
        for axis, found in cell.items():
            axes[axis] += [] if found in axes[axis] else [found]
        seed, ratio = settings["seed"], settings["active_ratio"]
        metrics, spent = {"accuracy": row["accuracy"]}, row["epsilon"]
        known = {
            "cell": cell,
            "seed": seed,
            "metrics": metrics,
            "epsilon_spent": spent,
            "active_ratio": ratio,
        }
        records.append({**known, "settings": settings})
    return Partitions(axes, tuple(records))


def trained_table(found: Partitions) -> list[str]:
    """Accuracy with both kinds of batches at the same noise, and the epsilon each really has."""
    if not found.records:
        return []
    first = found.records[0]["settings"]
    rows = [
        [
            *row.cell.values(),
            str(row.score.count),
            mean_text(row.score, "accuracy"),
            difference_text(row.difference, "accuracy"),
            NONE if row.epsilon is None else f"{row.epsilon:.4g}",
        ]
        for row in make_rows(found.records, "accuracy", Contrast("sampling", POISSON))
    ]
    said = (
        f"Trained with both (`{first['model']}` on `{first['dataset']}`, {first['epochs']} epochs, batch "
        f"{first['batch_size']:,}), test accuracy, final epoch, at the noise Poisson sampling needs for the epsilon "
        "named:"
    )
    headings = ["epsilon named", "method", "sampling", "seeds", "accuracy, %", "less Poisson", "true epsilon"]
    return [said, "", *markdown_table(headings, rows), ""]


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


def read_config() -> dict[str, Any]:
    """The experiment."""
    found: dict[str, Any] = read_toml(CONFIGS / "partition.toml")[NAME]
    return found


def trainings(config: Mapping[str, Any]) -> Iterator[Training]:
    """Every training, seeds outermost."""
    shared = {name: config[name] for name in _SHARED}
    cells = itertools.product(config["seeds"], config["epsilon"], config["method"], config["sampling"])
    for seed, epsilon, (method, ratio), sampling in cells:
        yield Training(
            **shared, epsilon=epsilon, method=method, active_ratio=ratio, sampling=sampling, seed=seed
        )


def train_missing() -> None:
    """Train what has no record yet, one line of JSON per training."""
    torch.set_num_threads(1)
    config = read_config()
    done = {row["config_hash"] for row in read_rows(_RECORDS)}
    asked = [(one, {"dataset": config["dataset"], **asdict(one)}) for one in trainings(config)]
    left = [(one, settings) for one, settings in asked if sha256(canonical(settings)) not in done]
    bundle = load_data(Settings(dataset=config["dataset"]))
    for training, settings in track(left, description=config["title"]):
        began = time.monotonic()
        found = train(training, bundle)
        record = {
            "format": 1,
            "experiment": NAME,
            "config_hash": sha256(canonical(settings)),
            "settings": settings,
            "data_variant": bundle.variant,
            **asdict(found),
            "commit": commit(),
            "seconds": round(time.monotonic() - began, 1),
        }
        append_row(_RECORDS, record)


def train(training: Training, bundle: DataBundle) -> Trained:
    """Train with the library's step and either kind of batches, then evaluate."""
    method = get_method(training.method, active_ratio=training.active_ratio)
    plan = build_plan(
        method,
        units=len(bundle.train),
        batch_size=training.batch_size,
        epochs=training.epochs,
        epsilon=training.epsilon,
        delta=training.delta,
        max_grad_norm=training.clip_norm,
    )
    model = build_model(training.model, FrozenMap({}), bundle.input_shape, len(bundle.classes), training.seed)
    layout, (phase,) = ParameterLayout.of(model), plan.phases
    engine = make_engine(model, from_criterion(nn.CrossEntropyLoss(reduction="none")))
    controller = SupportScheduler(plan, layout, PublicRandomness(training.seed))
    learn = SupportOptimizer(
        model,
        layout,
        torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum),
        coasts=method.off_support is OffSupport.COASTS,
    )
    randomness = SeededRandomness(training.seed)
    for batch in _BATCHES[training.sampling](bundle, plan, randomness):
        setting = controller.begin_step(batch.step)
        query = ClippedSumQuery(setting.support, FlatClip(training.clip_norm), setting.geometry)
        released = GaussianMechanism(ChargeLog(), randomness).release(
            GradientSum(engine, batch, query),
            Charge(phase.name, batch.step, phase.sampling_rate, phase.noise_multiplier),
            expected_batch_size=plan.expected_batch_size(phase),
        )
        learn.apply(released)
        controller.update(released)
    model.eval()
    with torch.no_grad():
        accuracy = float(evaluator(bundle.test)(model)["accuracy"] or 0.0)
    partitioned = training.sampling == PARTITION
    noise = phase.noise_multiplier
    true = gaussian_epsilon(noise, training.epochs, training.delta) if partitioned else training.epsilon
    return Trained(accuracy, noise, true)


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
        loading=DataConfig(max_physical_batch=_AT_ONCE),
    )
    return sampler.batches(0, phase.steps)


_BATCHES: Mapping[str, Callable[[DataBundle, Plan, SeededRandomness], Iterator[LogicalBatch]]] = {
    POISSON: _poisson_batches,
    PARTITION: lambda bundle, plan, randomness: partition_batches(bundle, plan, randomness.seed),
}
