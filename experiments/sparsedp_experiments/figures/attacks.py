"""Measurements of inverted gradients (RS, Fig. 5), least squares (RS, Th. 5.1), misranking (TP-TopK, Prop. 5.3)."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from sparsedp._validate import exact_ratio, share_of
from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import make_engine
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.attacks.reconstruction import (
    Effort,
    invert,
    least_squares_attack,
    mean_reconstruction_error,
    mean_squared_error,
    observe,
    reconstruction_lower_bound,
)
from sparsedp_experiments.figures.study import Point, Study
from sparsedp_experiments.figures.support import LOSS
from sparsedp_experiments.runs.execute import load_data, new_model
from sparsedp_experiments.theory.misranking import (
    Pair,
    misranking_bernstein,
    misranking_chebyshev,
    misranking_chernoff,
    misranking_coherent,
    misranking_energy,
)
from sparsedp_experiments.theory.oracle import mean_gradient


def measure_inversion(study: Study, point: Point) -> dict[str, Any]:
    """Attack one picture at every ratio, with and without noise, clipped and not."""
    options = study.measure
    settings = study.run_settings({}).resolved()
    bundle, number = load_data(settings), int(point["image"])
    model = new_model(settings, bundle).eval()
    d = ParameterLayout.of(model).dimension
    images, targets = bundle.test.rows_at(torch.tensor([number]))
    whole = mean_gradient(make_engine(model, LOSS), [MicroBatch((images, targets))])
    norm = float(torch.linalg.vector_norm(whole))
    assert isinstance(settings.clip_norm, float)
    clips = {"clipped": settings.clip_norm, "unclipped": norm}
    effort = Effort(options["steps"], options["learning_rate"], options["variation_weight"])
    attacks = []
    for clipping, bound in clips.items():
        for multiplier in options["noise_multipliers"]:
            if multiplier == 0 and clipping == "unclipped":
                continue
            for ratio in options["ratios"]:
                public = PublicRandomness(number)
                order = public.permutation(d, (5,))
                support = Support(order[: share_of(exact_ratio(ratio), d)], d)
                seen = observe(
                    model, LOSS, images[0], targets[0], support,
                    clip=FlatClip(bound), noise_std=multiplier * bound, public=public,
                )  # fmt: skip
                found = invert(model, LOSS, seen, bundle.input_shape, public, effort)
                attacks.append(
                    {
                        "clipping": clipping,
                        "noise_multiplier": multiplier,
                        "ratio": ratio,
                        "mse": mean_squared_error(found.image, images[0]),
                        "picture": packed(found.image) if number < options["shown"] else None,
                    }
                )
    mean_image = bundle.train.rows_at(torch.arange(options["guess_rows"]))[0].mean(0)
    return {
        "d": d,
        "shape": list(bundle.input_shape),
        "gradient_norm": norm,
        "picture": packed(images[0]) if number < options["shown"] else None,
        "guess_mse": mean_squared_error(mean_image, images[0]),
        "attacks": attacks,
    }


def packed(image: Tensor) -> str:
    """A grey picture in [0, 1] as base64 of its bytes."""
    return base64.b64encode(
        (image.detach().clamp(0, 1) * 255).round().to(torch.uint8).numpy().tobytes()
    ).decode()


def measure_least_squares(study: Study, point: Point) -> dict[str, Any]:
    """Attack a real picture through a dense layer: its gradient is `delta x'`, linear in the pixels x given delta."""
    options = study.measure
    public = PublicRandomness(int(point["seed"]))
    image = load_data(study.run_settings(point)).test.rows_at(torch.tensor([int(point["seed"])]))[0][0]
    pixels = functional.avg_pool2d(image, options["pool"]).reshape(-1).double()
    delta = public.normal(options["hidden"], (0,)) / options["hidden"] ** 0.5
    constraints = torch.kron(delta.unsqueeze(1), torch.eye(len(pixels), dtype=torch.float64))
    noise = options["noise_std"]
    rows = []
    for rate in options["rates"]:
        closed = mean_reconstruction_error(constraints, rate, noise, public, options["masks"])
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
    return {"pixels": len(pixels), "d": constraints.shape[0], "rates": rows}


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


def measure_misranking(study: Study, point: Point) -> dict[str, Any]:
    """One number of steps; a coordinate with a gradient against one without, over the gradient's strength."""
    options = study.measure
    steps, rows = int(point["steps"]), []
    generator = np.random.Generator(np.random.PCG64(options["seed"]))
    for strength in options["strengths"]:
        pair = Pair(math.sqrt(strength), 0.0, 1.0, steps)
        energy = misranking_energy(pair)
        swapped = _simulate(pair, options["draws"], generator)
        rows.append(
            {
                "strength": strength,
                "energy": energy,
                "coherent": misranking_coherent(pair),
                "chebyshev": misranking_chebyshev(pair),
                "bernstein": misranking_bernstein(pair),
                "chernoff": misranking_chernoff(pair),
                "swapped": swapped,
                "draws": options["draws"],
            }
        )
    return {"steps": steps, "pairs": rows}


def _simulate(pair: Pair, draws: int, generator: np.random.Generator) -> int:
    """How often the energy score of simulated releases puts the coordinate without a gradient first."""

    def energy(gradient: float) -> npt.NDArray[np.float32]:
        noise = generator.standard_normal((draws, pair.steps), dtype=np.float32)
        found: npt.NDArray[np.float32] = np.square(gradient + pair.noise_std * noise).mean(axis=1)
        return found

    return int((energy(pair.smaller) > energy(pair.larger)).sum())
