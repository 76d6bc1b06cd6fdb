"""Gradient deviations on random planes, and how lopsided they are (RS, Fig. 6 to 9)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import make_engine
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.figures.cost import Costs
from sparsedp_experiments.figures.runs import LOSS, open_trainer, train_until, unit_gradients
from sparsedp_experiments.theory.oracle import asymmetry_p_value
from sparsedp_experiments.theory.symmetry import lopsidedness, lopsidedness_by_chance, symmetry_error

_AXES = 2


def measure(study: Study, point: Point) -> dict[str, Any]:
    """A run, looked at after some epochs."""
    options, costs, seed = study.measure, Costs(), int(point["seed"])
    trainer, bundle = open_trainer(study.run_settings(point))
    per_epoch = trainer.plan.steps_per_epoch
    clip_norm = trainer.plan.phases[-1].clip_norm
    stops: list[dict[str, Any]] = []
    for epoch in options["after_epochs"]:
        if epoch:
            train_until(trainer, epoch * per_epoch)
        model = copy.deepcopy(trainer.model).eval()
        with costs.of(f"gradients of {options['units']} units, one by one"):
            gradients = unit_gradients(make_engine(model, LOSS), bundle.test, options["units"], seed)
        with costs.of("projections, lopsidedness and sign flips"):
            stops.append(_look(gradients, FlatClip(clip_norm or 1.0), options, PublicRandomness(seed), epoch))
    trainer.close()
    return {"units": options["units"], "d": gradients.shape[1], "stops": stops, "costs": costs.to_json()}


def _look(
    gradients: Tensor, clip: FlatClip, options: Mapping[str, Any], public: PublicRandomness, epoch: int
) -> dict[str, Any]:
    mean = gradients.mean(0)
    deviations = gradients - mean
    planes = [_project(deviations, public, plane) for plane in range(options["planes"])]
    shown = planes[0][: options["shown"]]
    scale = float(torch.linalg.vector_norm(planes[0], dim=1).median())
    factors = clip.factors(torch.linalg.vector_norm(gradients, dim=1))
    progress = float((factors * (gradients @ mean)).mean())
    chances = [lopsidedness_by_chance(plane, public) for plane in planes]
    return {
        "epoch": epoch,
        "points": [[round(float(v) / scale, 2) for v in row] for row in shown],
        "lopsidedness": [lopsidedness(plane) for plane in planes],
        "by_chance": [float(chance.mean()) for chance in chances],
        "by_chance_95": [float(chance[int(0.95 * len(chance))]) for chance in chances],
        "p_values": [asymmetry_p_value(plane, public) for plane in planes],
        "symmetry_error": symmetry_error(mean, deviations, clip),
        "progress": progress,
        "near": float((torch.linalg.vector_norm(deviations, dim=1) < 0.75 * clip.norm).double().mean()),
    }


def _project(deviations: Tensor, public: PublicRandomness, plane: int) -> Tensor:
    directions = torch.stack(
        [public.normal(deviations.shape[1], (10, plane, axis)) for axis in range(_AXES)], 1
    )
    found: Tensor = deviations @ (directions / torch.linalg.vector_norm(directions, dim=0))
    return found
