"""The two ablations of random sparsification (RS, Alg. 2 and 3), as plain loops. They protect nobody.

`noisy-sgd` adds noise of a given standard deviation to a sum that is not clipped; `clipped-sgd` clips and adds no
noise. Both train the supports of `on-rand`, and a coordinate that leaves coasts on its velocity.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp._validate import exact_ratio
from sparsedp.batch import per_sample_loss
from sparsedp.clipping import FlatClip
from sparsedp.errors import SparseDPError
from sparsedp.evaluation import Evaluator
from sparsedp.grad_sample import make_engine
from sparsedp.grad_sample.query import ClippedSumQuery
from sparsedp.loading import DataConfig
from sparsedp.methods.phases import steps_of_an_epoch
from sparsedp.methods.schedules import GradualCooling, active_count
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.privacy.queries import ChannelStatisticsSum
from sparsedp.randomness import PublicRandomness, SeededRandomness
from sparsedp.runs.record import versions
from sparsedp.sampling import PoissonSampler
from sparsedp.training.normalization import Normalised
from sparsedp_experiments.runs.execute import (
    about,
    check,
    evaluator,
    load_data,
    loss_of,
    model_of,
    optimizer_of,
)
from sparsedp_experiments.runs.settings import NOISY, Settings
from sparsedp_experiments.theory.oracle import UNCLIPPED

_NOISE_KEY = 11


def train_ablation(given: Settings) -> dict[str, Any]:
    """The record of one run, with the keys that `make_record` takes over; its noise stands in `noise`."""
    began = time.monotonic()
    settings = check(given)
    seed = settings.seed or 0
    bundle = load_data(settings)
    by_row = settings.unit == "row" or bundle.train.units is None
    loading = DataConfig(
        unit_ids=None if by_row else bundle.train.units,
        rows_per_unit=settings.rows_per_unit,
        max_physical_batch=settings.max_physical_batch,
    )

    def sampler_of(rate: float) -> PoissonSampler:
        return PoissonSampler(
            bundle.train, sampling_rate=rate, randomness=SeededRandomness(seed), loading=loading
        )

    model = model_of(settings, bundle)
    sampler = sampler_of(_rate(settings, units := len(bundle.train) if by_row else bundle.train.unit_count))
    if isinstance(model, Normalised):
        _normalise(model, sampler_of(1.0), settings.normalise)
    metrics, support = _loop(model, sampler, settings, seed, evaluator(bundle.test, ranked=bundle.ranked))
    epochs, batch = settings.epochs or 1, settings.batch_size or 1
    steps = epochs * steps_of_an_epoch(units, batch, epochs)
    named = about(settings, bundle)
    return {
        "dataset": settings.dataset, "model": settings.model, "method": settings.method, "variant": named.variant,
        "seed": seed, "publishable": False, "private": False, "target_epsilon": None, "epsilon": None,
        "epsilon_spent": None, "delta": settings.delta, "accountant": None,
        "unit": "row" if by_row else bundle.unit, "units": units, "d": support.dimension, "k": support.size,
        "active_ratio": support.active_ratio, "batch_size": float(batch), "epochs": epochs, "steps": steps,
        "steps_charged": 0, "test_accuracy": metrics.get("accuracy"), "metrics": metrics, "plan": None,
        "versions": dict(versions()), "schema": named.schema, "noise": {"train": settings.noise_std or 0.0},
        "timing": {"seconds": round(time.monotonic() - began, 3)},
    }  # fmt: skip


def _rate(settings: Settings, units: int) -> float:
    if settings.batch_size is None or settings.epochs is None or settings.lr is None:
        raise SparseDPError(f"{settings.method}: give batch_size, epochs and lr")
    told = (settings.clip_norm is not None, settings.noise_std is not None)
    if told != (settings.method != NOISY, settings.method == NOISY):
        raise SparseDPError(
            f"{settings.method}: noisy-sgd takes noise_std, clipped-sgd takes clip_norm, none both"
        )
    return settings.batch_size / units


def _normalise(model: Normalised, everybody: PoissonSampler, asked: Mapping[str, Any]) -> None:
    """Centre and scale the inputs by the clipped statistics of all units, without the noise of a private run."""
    clip = FlatClip(PrivateNormalisation.from_json(asked).clip_norm)
    batches = everybody.batches(0, 2)

    def mean(centre: Tensor | None) -> Tensor:
        query = ChannelStatisticsSum(next(batches), model.centre.numel(), clip, centre)
        return torch.stack(list(query.partial_sums(query.sensitivity))).sum(0) / everybody.unit_count

    model.centre.copy_(centre := mean(None))
    model.scale.copy_(mean(centre).clamp_min(torch.finfo(torch.float32).eps))


def _loop(
    model: nn.Module, sampler: PoissonSampler, settings: Settings, seed: int, evaluate: Evaluator
) -> tuple[dict[str, float | None], Support]:
    """RS Alg. 2 and 3: a sum on the epoch's support, over the expected batch, into SGD whose velocity runs on."""
    engine = make_engine(model, per_sample_loss(loss_of(model)), settings.engine)
    layout, public = engine.layout, PublicRandomness(seed)
    choice: Any = optimizer_of(replace(settings, momentum=settings.momentum or 0.0))
    optimizer: Optimizer = choice(layout.parameters(model))
    clip = UNCLIPPED if settings.method == NOISY else FlatClip(float(settings.clip_norm))  # type: ignore[arg-type]
    epochs, units = settings.epochs or 1, sampler.unit_count
    per_epoch = steps_of_an_epoch(units, settings.batch_size or 1, epochs)
    noise = torch.Generator().manual_seed(public.torch_seed((_NOISE_KEY,)))
    support = Support.full(layout.dimension)
    for step, batch in enumerate(sampler.batches(0, epochs * per_epoch)):
        if step % per_epoch == 0:
            support = support_of(layout, public, step // per_epoch, epochs, settings.active_ratio)
        total = engine.clipped_sum(batch, ClippedSumQuery(support, clip)).cpu()
        if settings.noise_std:
            total += settings.noise_std * torch.randn(support.size, generator=noise, dtype=torch.float64)
        _set_gradients(layout, model, support.scatter(total / sampler.expected_batch_size))
        optimizer.step()
    with torch.no_grad():
        return dict(evaluate(model.eval())), support


def support_of(
    layout: ParameterLayout, public: PublicRandomness, epoch: int, epochs: int, ratio: float | str | None
) -> Support:
    """The support of an epoch of `on-rand`: fresh and random, gradually smaller."""
    target = exact_ratio(1.0 if ratio is None else float(ratio))
    if target == 1:
        return Support.full(layout.dimension)
    count = active_count(GradualCooling().ratio(epoch, epochs, target), layout.dimension)
    return Support(public.permutation(layout.dimension, (0, epoch))[:count], layout.dimension)


def _set_gradients(layout: ParameterLayout, model: nn.Module, gradient: Tensor) -> None:
    for slot, parameter in zip(layout, layout.parameters(model), strict=True):
        part = gradient[slot.span].view(parameter.shape).to(parameter.dtype)
        if not math.isfinite(float(part.sum())):
            raise SparseDPError("the gradient is not finite; give a smaller lr")
        parameter.grad = part
