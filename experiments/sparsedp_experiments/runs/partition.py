"""What needs more than a run of the library: RS's Table 3 (sampling by partition) and AdaDPIGU's (its noise).

`python -m sparsedp_experiments sweep rs-table3` trains what has no record yet. The library's plans are for Poisson
sampling, so partitions are trained here, outside ledger and run directory, and their epsilon is what the Gaussian
mechanism costs without amplification.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import track
from scipy.optimize import brentq
from scipy.special import log_ndtr
from torch import nn

from sparsedp._serialization import canonical, sha256
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
from sparsedp_experiments.runs.grid import CONFIGS, RESULTS, Contrast, label, read_toml
from sparsedp_experiments.runs.papers import read_paper
from sparsedp_experiments.runs.results import Record, commit, make_rows, measured, read_rows
from sparsedp_experiments.runs.settings import Settings
from sparsedp_experiments.runs.text import NONE, difference_text, markdown_table, mean_text

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

    def ours(dataset: str, epsilon: float, accountant: str) -> float:
        steps = ADADPIGU[dataset]
        question = {**asdict(steps), "epsilon": epsilon, "delta": DELTA, "accountant": accountant}
        key = {
            "experiment": "adadpigu-table3",
            "config_hash": sha256(canonical(question)),
            "question": question,
        }
        noise = measured(
            _NOISE_RECORDS, key, lambda: {"noise": round(noise_multiplier(steps, epsilon, accountant), 6)}
        )
        return float(noise["noise"])

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
    axes: dict[str, dict[str, None]] = {"epsilon": {}, "method": {}, "sampling": {}}
    records = []
    for row in (row for row in read_rows(_RECORDS) if row["experiment"] == NAME):
        settings = row["settings"]
        cell = {axis: label(settings[axis]) for axis in axes}
        for axis, found in cell.items():
            axes[axis][found] = None
        metrics = {"metrics": {"accuracy": row["accuracy"]}, "epsilon_spent": row["epsilon"]}
        records.append({**settings, **metrics, "cell": cell, "settings": settings})
    return Partitions({axis: list(found) for axis, found in axes.items()}, tuple(records))


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


def read_config() -> dict[str, Any]:
    """The experiment."""
    found: dict[str, Any] = read_toml(CONFIGS / "partition.toml")[NAME]
    return found


def trainings(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings of every training, seeds outermost; `active_ratio` is the final one of random sparsification."""
    shared = {name: config[name] for name in _SHARED}
    cells = itertools.product(config["seeds"], config["epsilon"], config["method"], config["sampling"])
    for seed, epsilon, (method, ratio), sampling in cells:
        own = {
            "epsilon": epsilon,
            "method": method,
            "active_ratio": ratio,
            "sampling": sampling,
            "seed": seed,
        }
        yield {**shared, **own}


def train_missing() -> None:
    """Train what has no record yet, one line of JSON per training."""
    torch.set_num_threads(1)
    config = read_config()
    bundle = load_data(Settings(dataset=config["dataset"]))
    for settings in track(list(trainings(config)), description=config["title"]):
        began = time.monotonic()

        def measure(settings: Mapping[str, Any] = settings, began: float = began) -> Record:
            found = train(settings, bundle)
            seconds = round(time.monotonic() - began, 1)
            return {"data_variant": bundle.variant, **found, "commit": commit(), "seconds": seconds}

        asked = {"dataset": config["dataset"], **settings}
        key = {"format": 1, "experiment": NAME, "config_hash": sha256(canonical(asked)), "settings": asked}
        measured(_RECORDS, key, measure)


def train(asked: Mapping[str, Any], bundle: DataBundle) -> dict[str, float]:
    """Train with the library's step and either kind of batches, then evaluate.

    Gives the accuracy on the test part after the last step, the noise multiplier of Poisson sampling at the target
    epsilon, whatever the batches were, and the true epsilon: the target for Poisson batches, that of one Gaussian
    mechanism per epoch for partitions.
    """
    seed, clip_norm = asked["seed"], asked["clip_norm"]
    method = get_method(asked["method"], active_ratio=asked["active_ratio"])
    plan = build_plan(
        method,
        units=len(bundle.train),
        max_grad_norm=clip_norm,
        **{name: asked[name] for name in ("batch_size", "epochs", "epsilon", "delta")},
    )
    model = build_model(asked["model"], {}, bundle.input_shape, len(bundle.classes), seed)
    layout, (phase,) = ParameterLayout.of(model), plan.phases
    engine = make_engine(model, from_criterion(nn.CrossEntropyLoss(reduction="none")))
    controller = SupportScheduler(plan, layout, PublicRandomness(seed))
    learn = SupportOptimizer(
        model,
        layout,
        torch.optim.SGD(model.parameters(), lr=asked["lr"], momentum=asked["momentum"]),
        coasts=method.off_support is OffSupport.COASTS,
    )
    randomness, partitioned = SeededRandomness(seed), asked["sampling"] == PARTITION
    if partitioned:
        batches = partition_batches(bundle, plan, seed)
    else:
        loading = DataConfig(max_physical_batch=_AT_ONCE)
        sampler = PoissonSampler(
            bundle.train, sampling_rate=phase.sampling_rate, randomness=randomness, loading=loading
        )
        batches = sampler.batches(0, phase.steps)
    for batch in batches:
        setting = controller.begin_step(batch.step)
        query = ClippedSumQuery(setting.support, FlatClip(clip_norm), setting.geometry)
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
    noise = phase.noise_multiplier
    true = gaussian_epsilon(noise, asked["epochs"], asked["delta"]) if partitioned else asked["epsilon"]
    return {"accuracy": accuracy, "noise_multiplier": noise, "epsilon": true}


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
