"""Running settings: from a few names and numbers to a trained model."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from sparsedp.batch import PerExampleLoss
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.optimizers.factory import MOMENTUM, OptimizerChoice, Rate, rate_for_table
from sparsedp.optimizers.noise_aware import AdamBC, LowPassSGD
from sparsedp.results import Callback, Result
from sparsedp.runs.record import RunMetadata
from sparsedp.training.data import extract_features
from sparsedp.training.fit import fit, public_weights
from sparsedp.training.normalization import Normalised
from sparsedp_experiments.data import DATASETS
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.data.cache import Arrays, cached_arrays
from sparsedp_experiments.data.download import public_checksum
from sparsedp_experiments.data.features import Dense
from sparsedp_experiments.models.heads import parameter_count
from sparsedp_experiments.models.least_squares import LeastSquares, keep_noise_down, moments_loss
from sparsedp_experiments.runs.datasets import check_dataset, load_data
from sparsedp_experiments.runs.evaluation import evaluator
from sparsedp_experiments.runs.networks import build_model, check_model
from sparsedp_experiments.runs.scores import read_scores
from sparsedp_experiments.runs.settings import Settings

_OPTIMIZERS: Mapping[str, Callable[[Settings, float], OptimizerChoice]] = MappingProxyType(
    {
        "sgd": lambda s, lr: functools.partial(
            torch.optim.SGD, lr=lr, momentum=s.momentum or 0.0, weight_decay=s.weight_decay
        ),
        "adam": lambda s, lr: functools.partial(torch.optim.Adam, lr=lr, weight_decay=s.weight_decay),
        "adamw": lambda s, lr: functools.partial(torch.optim.AdamW, lr=lr, weight_decay=s.weight_decay),
        "adam-bc": lambda _, lr: functools.partial(AdamBC, lr=lr),
        "low-pass": lambda _, lr: functools.partial(LowPassSGD, lr=lr),
    }
)

_SCHEDULERS: Mapping[str, Callable[[Optimizer, int], LRScheduler] | None] = MappingProxyType(
    {
        "constant": None,
        "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
        "linear": lambda optimizer, steps: LinearLR(optimizer, 1.0, 1.0 / steps, steps),
    }
)


def check(settings: Settings) -> Settings:
    """Settings with recipe and every name checked, before any data is loaded."""
    check_dataset(settings.dataset)
    found = settings.resolved()
    check_model(found.model or "", found.model_options)
    return found


def execute(
    settings: Settings,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    watch: Callable[[nn.Module], Sequence[Callback]] = lambda _: (),
    progress: bool = False,
) -> Result:
    """Load, build, train, evaluate; `watch` makes further callbacks, which look at the model's public weights.

    **Privacy.** Where the data set knows whose rows are whose, people are protected, unless `unit="row"` says rows.
    """
    found = check(settings)
    bundle = load_data(found)
    by_row = found.unit == "row"
    model = build_model(
        found.model or "",
        found.model_options,
        bundle.input_shape,
        len(bundle.classes),
        found.seed,
        bundle.vocabulary,
    )
    found = suited_to(model, found, bundle)
    if isinstance(model, LeastSquares):
        callbacks = (*callbacks, keep_noise_down(model))
    optimizer = optimizer_of(found)
    whole, named = model, about(found, bundle)
    if found.cache_features:
        model, bundle = _head_on_features(model, bundle)
    result = fit(
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
        unit_name=None if by_row or bundle.train.units is None else bundle.unit,
        public_scores=None if found.public_scores is None else read_scores(Path(found.public_scores)),
        callbacks=(*callbacks, *watch(model)),
        progress=progress,
        metadata=replace(named, schema={**(named.schema or {}), **public_weights(whole)}),
        **found.training(),
        **found.of_the_plan(),
    )
    return replace(result, model=whole.eval()) if found.cache_features else result


def loss_of(model: nn.Module) -> nn.Module | PerExampleLoss:
    """What a model of the table is trained with; it may stand behind private constants."""
    return nn.CrossEntropyLoss(reduction="none") if moments_in(model) is None else moments_loss()


def moments_in(model: nn.Module) -> LeastSquares | None:
    """The least squares that a model is, alone or behind private constants; None if it is something else."""
    inside = model.model if isinstance(model, Normalised) else model
    return inside if isinstance(inside, LeastSquares) else None


def suited_to(model: nn.Module, settings: Settings, bundle: DataBundle) -> Settings:
    """The settings that `fit` gets, where what the model wants and nobody asked for is filled in.

    Raises:
        SparseDPError: least squares, and an optimizer that adds up no releases.
    """
    moments = moments_in(model)
    if moments is None:
        return settings
    train = bundle.train
    return _in_one_release(settings, moments, len(train) if settings.unit == "row" else train.unit_count)


def _in_one_release(settings: Settings, model: LeastSquares, units: int) -> Settings:
    """What least squares wants where nothing else is asked for: all units in one dense step, and nothing clipped."""
    if settings.optimizer != "sgd" or settings.weight_decay or settings.momentum:
        raise SparseDPError(
            f"least squares: got optimizer {settings.optimizer}, momentum {settings.momentum or 0:g} and weight "
            f"decay {settings.weight_decay:g}, expected plain sgd, as its moments are the sum of what is released; "
            "leave all three out"
        )
    return replace(
        settings,
        method="dp-sgd" if settings.method == AUTO_METHOD else settings.method,
        batch_size=settings.batch_size or units,
        clip_norm=settings.clip_norm or model.record_norm,
    )


def _head_on_features(model: nn.Module, bundle: DataBundle) -> tuple[nn.Module, DataBundle]:
    """The part of a network that is trained, and the data as the frozen part below it gives them."""
    parts = list(model.named_children()) if isinstance(model, nn.Sequential) else []
    trained = [any(p.requires_grad for p in part.parameters()) for _, part in parts]
    cut = trained.index(True) if any(trained) else 0
    if not any(True for _, part in parts[:cut] for _ in part.parameters()):
        raise ModelError(
            f"cache_features: got a {type(model).__name__}, expected an nn.Sequential whose first parts are frozen"
        )
    body, head = (nn.Sequential(OrderedDict(some)) for some in (parts[:cut], parts[cut:]))
    return head, replace(
        bundle,
        train=replace(bundle.train, features=Dense(_features(body, bundle, "train"))),
        test=replace(bundle.test, features=Dense(_features(body, bundle, "test"))),
    )


def _features(body: nn.Module, bundle: DataBundle, side: str) -> Tensor:
    """Of one side; on disk for data that has a fingerprint."""
    split = bundle.train if side == "train" else bundle.test

    def make() -> Arrays:
        return {"features": extract_features(body, split).tensors[0].float().numpy()}

    if bundle.fingerprint is None:
        return torch.from_numpy(make()["features"])
    weights = b"".join(value.cpu().numpy().tobytes() for value in body.state_dict().values())
    key = f"{bundle.fingerprint}|{side}|{body}|{hashlib.sha256(weights).hexdigest()}"
    return torch.from_numpy(cached_arrays(key, ("features",), make)["features"])


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
    return RunMetadata(
        dataset=settings.dataset,
        model=settings.model,
        schema=schema,
        checksum=_checksum(settings.dataset),
        config=settings.to_json(),
    )


def _checksum(dataset: str) -> str | None:
    """Of a public data set by name; nothing is hashed of a user's own files."""
    public = DATASETS.get(dataset)
    return None if public is None or public.source is None else public_checksum(public.source.name)


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


def rate_of(settings: Settings, bundle: DataBundle, model: nn.Module) -> Rate | None:
    """The rule for logistic regression on tables, as the scikit-learn estimator has it; None leaves it to `fit`."""
    if settings.model != "logistic" or bundle.unit_norm is None:
        return None
    return rate_for_table(parameter_count(model), math.prod(bundle.input_shape), unit_norm=bundle.unit_norm)
