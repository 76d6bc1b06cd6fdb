"""Reconstruction by least squares: the closed form and the bound of RS, Theorem 5.1 against simulated attacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.attacks.reconstruction import (
    least_squares_attack,
    mean_reconstruction_error,
    reconstruction_lower_bound,
)
from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.figures.cost import Costs
from sparsedp_experiments.runs.execute import load_data


def measure(study: Study, point: Point) -> dict[str, Any]:
    """Attack a real picture through a dense layer: its gradient is `delta x'`, linear in the pixels x given delta."""
    options, costs = study.measure, Costs()
    public = PublicRandomness(int(point["seed"]))
    image = load_data(study.run_settings(point)).test.rows_at(torch.tensor([int(point["seed"])]))[0][0]
    pixels = functional.avg_pool2d(image, options["pool"]).reshape(-1).double()
    delta = public.normal(options["hidden"], (0,)) / options["hidden"] ** 0.5
    constraints = torch.kron(delta.unsqueeze(1), torch.eye(len(pixels), dtype=torch.float64))
    noise = options["noise_std"]
    rows = []
    for rate in options["rates"]:
        with costs.of("closed form, one rate"):
            closed = mean_reconstruction_error(constraints, rate, noise, public, options["masks"])
        with costs.of("simulated attacks, one rate"):
            simulated = _attacks(constraints, pixels, rate, noise, public, options["attacks"])
        rows.append(
            {
                "rate": rate,
                "bound": reconstruction_lower_bound(constraints, rate, noise),
                "closed": closed,
                "simulated": float(simulated.mean()),
                "simulated_std": float(simulated.std() / len(simulated) ** 0.5),
            }
        )
    return {"pixels": len(pixels), "d": constraints.shape[0], "rates": rows, "costs": costs.to_json()}


def _attacks(
    constraints: Tensor, pixels: Tensor, rate: float, noise: float, public: PublicRandomness, count: int
) -> Tensor:
    """Squared errors of attacks on fresh noise and fresh masks, other ones than the closed form was averaged over."""
    d, gradient, errors = constraints.shape[0], constraints @ pixels, []
    for attack in range(count):
        order = public.permutation(d, (1, attack))
        support = Support(order[: max(1, round((1 - rate) * d))], d)
        seen = support.gather(gradient) + noise * public.normal(support.size, (2, attack))
        found = least_squares_attack(constraints, seen, support)
        errors.append(float(((found - pixels) ** 2).sum()))
    return torch.tensor(errors, dtype=torch.float64)
