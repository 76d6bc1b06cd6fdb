"""Running settings: from a few names and numbers to a trained model."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from sparsedp._serialization import FrozenMap
from sparsedp.batch import PerExampleLoss
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.evaluation import Evaluator, Metrics, classification_metrics, score_ranks
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.optimizers.factory import MOMENTUM, OptimizerChoice, Rate, table_rate
from sparsedp.privacy.plan import Plan
from sparsedp.randomness import PublicRandomness
from sparsedp.results import CallbackLike, Result
from sparsedp.runs.record import RunMetadata
from sparsedp.training.fit import fit, public_weights
from sparsedp.training.normalization import Normalised
from sparsedp_experiments import data as datasets
from sparsedp_experiments.data.bundle import DataBundle, Split, rows_of_some_units
from sparsedp_experiments.data.registry import public_checksum
from sparsedp_experiments.models import MODELS
from sparsedp_experiments.models.least_squares import LeastSquares, keep_noise_down, moments_loss
from sparsedp_experiments.models.networks import parameter_count
from sparsedp_experiments.models.noise_aware import AdamBC, LowPassSGD
from sparsedp_experiments.runs.settings import Settings

_SPLIT_SEED = 0
_SUBSET_KEY = (1,)


def load_data(settings: Settings) -> DataBundle:
    """The data set the settings name: its validation split in place of the test set, and a subset, if asked for."""
    return _load(settings.dataset, settings.data_options, settings.validation, settings.subset)


@lru_cache(maxsize=2)
def _load(name: str, options: FrozenMap, validation: float | None, subset: int | None) -> DataBundle:
    bundle = datasets.load(name, **options.plain())
    if validation is not None:
        bundle = bundle.validated(validation, _SPLIT_SEED)
    if subset is None:
        return bundle
    notes = (*bundle.notes, f"a public random subset of at most {subset} {bundle.unit}s a side")
    train, test = _some(bundle.train, subset), _some(bundle.test, subset)
    return replace(bundle, train=train, test=test, notes=notes, fingerprint=None)


def _some(split: Split, count: int) -> Split:
    """The rows of at most `count` units, in their old order."""
    chosen = rows_of_some_units(split, count, PublicRandomness(_SPLIT_SEED), _SUBSET_KEY)
    return split.select(chosen.nonzero().squeeze(1))


_INITIAL_WEIGHTS = (0, 0, 1)
"""Key of the public randomness; the trainer's keys have two numbers."""


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a model that is not in the table, or options it does not take."""
    if name not in MODELS:
        raise ModelError(f"no model named {name!r}; there are {', '.join(MODELS)}")
    known = sorted(set(inspect.signature(MODELS[name]).parameters) - {"input_shape", "classes"})
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ModelError(f"model_options: {name} knows no {unknown}; expected some of {known}")


def build_model(
    name: str,
    options: Mapping[str, Any],
    input_shape: tuple[int, ...],
    classes: int,
    seed: int | None,
    vocabulary: int | None = None,
) -> nn.Module:
    """A fresh model. Its initial weights are public: from the seed, or from a new public one.

    A model that looks ids up gets the data's `vocabulary`, unless its options name one.
    """
    check_model(name, options)
    if vocabulary is not None and "vocabulary" in inspect.signature(MODELS[name]).parameters:
        options = {"vocabulary": vocabulary, **options}
    public = PublicRandomness.fresh() if seed is None else PublicRandomness(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(public.torch_seed(_INITIAL_WEIGHTS))
        try:
            arguments = {key: tuple(one) if isinstance(one, list) else one for key, one in options.items()}
            return MODELS[name](input_shape, classes, **arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"model_options: {name} cannot be built with {dict(options)} ({error})"
            ) from error


_EVALUATED_AT_ONCE = 1024
SPECIFICITY = 0.9
"""Where `recall_at_90_specificity` is read off."""


def evaluator(split: Split, *, ranked: bool = False) -> Evaluator:
    """Loss and accuracy on a split; two classes add AUC, average precision and the threshold metrics.

    Sensitivity, specificity and balanced accuracy are at the fixed threshold of 1/2. `ranked` adds `recall_at_10`:
    each unit's records are ranked among each other.
    """

    def evaluate(model: nn.Module) -> Metrics:
        parts = torch.split(torch.arange(len(split)), _EVALUATED_AT_ONCE)
        logits = torch.cat([model(split.rows_at(part)[0]) for part in parts])
        loss = float(functional.cross_entropy(logits.double(), split.targets))
        metrics = {"loss": loss, **classification_metrics(logits, split.targets)}
        if "auc" in metrics:
            scores = logits[:, 1] - logits[:, 0]
            metrics |= ranking_metrics(scores, split.targets == 1)
            if ranked and split.units is not None:
                metrics["recall_at_10"] = recall_at(10, scores, split.targets == 1, split.units)
        return metrics

    return evaluate


def ranking_metrics(scores: Tensor, positive: Tensor) -> dict[str, float]:
    """Average precision, and the recall at two thresholds, each the lowest that does not go too far.

    One keeps 90 % of the negatives out; the other flags no more records than are positive: with their share, the
    prevalence, for a public number, it can be set without labels.
    **Edge cases.** Both classes must be there. Tied scores are taken together.
    """
    from sklearn.metrics import average_precision_score, roc_curve

    actual, ranks = positive.cpu().numpy(), score_ranks(scores)
    false_alarms, recall, _ = roc_curve(actual, ranks, drop_intermediate=False)
    positives = float(actual.sum())
    flagged = recall * positives + false_alarms * (len(actual) - positives)
    return {
        "average_precision": float(average_precision_score(actual, ranks)),
        "recall_at_90_specificity": float(recall[false_alarms <= 1 - SPECIFICITY + 1e-12][-1]),
        "recall_at_prevalence": float(recall[flagged <= positives + 1e-6][-1]),
    }


def recall_at(most: int, scores: Tensor, positive: Tensor, units: Tensor) -> float:
    """The share of a unit's positives among its `most` best-scored records, of as many as could be there.

    The mean over units with a positive; of tied scores the earlier record is taken first.
    """
    _, owner = torch.unique(units, return_inverse=True)
    best = torch.argsort(scores, descending=True, stable=True)
    order = best[torch.argsort(owner[best], stable=True)]
    owner, hits = owner[order], positive[order].double()
    place = torch.arange(len(owner)) - torch.searchsorted(owner, owner)
    found = torch.bincount(owner, weights=hits * (place < most))
    there = torch.bincount(owner, weights=hits)
    some = there > 0
    return float((found[some] / there[some].clamp(max=most)).mean())


_OPTIMIZERS: Mapping[str, Callable[[Settings, float], OptimizerChoice]] = {
    "sgd": lambda s, lr: functools.partial(
        torch.optim.SGD, lr=lr, momentum=s.momentum or 0.0, weight_decay=s.weight_decay
    ),
    "adam": lambda s, lr: functools.partial(torch.optim.Adam, lr=lr, weight_decay=s.weight_decay),
    "adam-bc": lambda _, lr: functools.partial(AdamBC, lr=lr),
    "low-pass": lambda _, lr: functools.partial(LowPassSGD, lr=lr),
}

_SCHEDULERS: Mapping[str, Callable[[Optimizer, int], LRScheduler] | None] = {
    "constant": None,
    "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
    "linear": lambda optimizer, steps: LinearLR(optimizer, 1.0, 1.0 / steps, steps),
}


def new_model(settings: Settings, bundle: DataBundle) -> nn.Module:
    """The model of the settings, for the shapes of the data."""
    shape, classes = bundle.input_shape, len(bundle.classes)
    return build_model(
        settings.model or "", settings.model_options, shape, classes, settings.seed, bundle.vocabulary
    )


def check(settings: Settings) -> Settings:
    """Settings with recipe and every name checked, before any data is loaded."""
    found = settings.resolved()
    check_model(found.model or "", found.model_options)
    return found


def execute(
    settings: Settings,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    callbacks: Sequence[CallbackLike] = (),
    watch: Callable[[nn.Module], Sequence[CallbackLike]] = lambda _: (),
    progress: bool = False,
) -> Result:
    """Load, build, train, evaluate; `watch` makes further callbacks, which look at the model's public weights.

    **Privacy.** Where the data set knows whose rows are whose, people are protected, unless `unit="row"` says rows.
    """
    found = check(settings)
    found.configured_method()  # refuses an ablation
    bundle = load_data(found)
    by_row = found.unit == "row"
    model = new_model(found, bundle)
    found = suited_to(model, found, bundle)
    if isinstance(model, LeastSquares):
        callbacks = (*callbacks, keep_noise_down(model))
    optimizer = optimizer_of(found)
    named = about(found, bundle)
    return fit(
        model,
        bundle.train,
        loss_of(model),
        method=found.configured_method(),
        optimizer=optimizer,
        lr=rate_of(found, bundle, model) if optimizer is None else None,
        lr_scheduler=_SCHEDULERS[found.scheduler],
        evaluate=evaluator(bundle.test, ranked=bundle.ranked),
        run_dir=out,
        resume=resume,
        seed=found.seed,
        unit_ids=None if by_row else bundle.train.units,
        callbacks=(*callbacks, *watch(model)),
        progress=progress,
        **found.training(
            None if by_row or bundle.train.units is None else bundle.unit,
            replace(named, schema={**(named.schema or {}), **public_weights(model)}),
        ),
        **found.of_the_plan(),
    )


def loss_of(model: nn.Module) -> nn.Module | PerExampleLoss:
    """What a model of the table is trained with; it may stand behind private constants."""
    return nn.CrossEntropyLoss(reduction="none") if moments_in(model) is None else moments_loss()


def moments_in(model: nn.Module) -> LeastSquares | None:
    """The least squares that a model is, alone or behind private constants; None if it is something else."""
    inside = model.model if isinstance(model, Normalised) else model
    return inside if isinstance(inside, LeastSquares) else None


def model_of(settings: Settings, bundle: DataBundle) -> nn.Module:
    """A fresh model of a run's architecture."""
    model = new_model(settings, bundle)
    return Normalised(model, bundle.input_shape[0]) if settings.normalise else model


def suited_to(model: nn.Module, settings: Settings, bundle: DataBundle) -> Settings:
    """The settings that `fit` gets, where what the model wants and nobody asked for is filled in."""
    moments = moments_in(model)
    if moments is None:
        return settings
    if settings.optimizer != "sgd" or settings.weight_decay or settings.momentum:
        raise SparseDPError(
            f"least squares: got optimizer {settings.optimizer}, momentum {settings.momentum or 0:g} and weight "
            f"decay {settings.weight_decay:g}, expected plain sgd, as its moments are the sum of what is released; "
            "leave all three out"
        )
    train = bundle.train
    return replace(  # all units in one dense step, and nothing clipped
        settings,
        method="dp-sgd" if settings.method == AUTO_METHOD else settings.method,
        batch_size=settings.batch_size or (len(train) if settings.unit == "row" else train.unit_count),
        clip_norm=settings.clip_norm or moments.record_norm,
    )


def about(settings: Settings, bundle: DataBundle) -> RunMetadata:
    """Names for the record: what is declared, and how many held-out rows each class has; of training rows nothing."""
    schema: dict[str, Any] = {
        "classes": list(bundle.classes),
        "input_shape": list(bundle.input_shape),
        "data_variant": bundle.variant,
        "notes": list(bundle.notes),
        "evaluated_on": "test" if settings.validation is None else "validation",
        "held_out_counts": bundle.test.class_counts(len(bundle.classes)),
    }
    source = datasets.DATASETS[settings.dataset].source
    return RunMetadata(
        dataset=settings.dataset,
        model=settings.model,
        schema=schema,
        checksum=None if source is None else public_checksum(source.name),
        config=settings.to_json(),
    )


def optimizer_of(settings: Settings) -> OptimizerChoice | None:
    """The optimizer asked for; None leaves it, and its rate, to `fit`."""
    if settings.lr is not None:
        return _OPTIMIZERS[settings.optimizer](settings, settings.lr)
    if settings.momentum != MOMENTUM or settings.weight_decay:
        raise SparseDPError(
            f"lr: not given, and there is no default for momentum {settings.momentum} and weight decay "
            f"{settings.weight_decay:g}; give one"
        )
    return None


def rate_for_table(coordinates: int, features: int, *, unit_norm: bool) -> Callable[[Plan], float]:
    """`table_rate` of a plan, for records of so many features, scaled to length one (`unit_norm`) or as they are.

    Features lie between -1 and 1, so a record's length is at most sqrt(p), and about 1 if one of them is present. The
    guess is in the middle on a logarithmic scale; one-hot tables of 100 to 2,000 features have lengths of 3 to 5.
    """
    length = 1.0 if unit_norm else math.sqrt(math.sqrt(features))
    return lambda plan: table_rate(plan, coordinates, length)


def rate_of(settings: Settings, bundle: DataBundle, model: nn.Module) -> Rate | None:
    """The rule for logistic regression on tables, as the scikit-learn estimator has it; None leaves it to `fit`."""
    if settings.model != "logistic" or bundle.unit_norm is None:
        return None
    return rate_for_table(parameter_count(model), math.prod(bundle.input_shape), unit_norm=bundle.unit_norm)
