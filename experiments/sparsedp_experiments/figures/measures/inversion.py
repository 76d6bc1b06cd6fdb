"""Reconstructing real pictures from their gradients, over sparsity and noise (RS, Fig. 5)."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from sparsedp._validate import exact_ratio, share_of
from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import make_engine
from sparsedp.parameters import Layout, Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.attacks.inversion import Effort, invert, mean_squared_error, observe
from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.figures.cost import Costs
from sparsedp_experiments.figures.runs import LOSS
from sparsedp_experiments.runs.datasets import load_data
from sparsedp_experiments.runs.networks import build_model
from sparsedp_experiments.theory.oracle import mean_gradient


def measure(study: Study, point: Point) -> dict[str, Any]:
    """Attack one picture at every ratio, with and without noise, clipped and not."""
    options, costs = study.measure, Costs()
    settings = study.run_settings({}).resolved()
    bundle, number = load_data(settings), int(point["image"])
    model = build_model(
        settings.model or "", settings.model_options, bundle.input_shape, len(bundle.classes), settings.seed
    ).eval()
    d = Layout.of(model).dimension
    images, targets = bundle.test.rows_at(torch.tensor([number]))
    whole = mean_gradient(make_engine(model, LOSS), [MicroBatch((images, targets))]).value
    norm = float(torch.linalg.vector_norm(whole))
    clips = {"clipped": settings_clip(settings.clip_norm), "unclipped": norm}
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
                with costs.of(f"inverting one gradient, {options['steps']} steps"):
                    found = invert(model, LOSS, seen, bundle.input_shape, public, effort).value
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
        "costs": costs.to_json(),
    }


def settings_clip(clip_norm: float | tuple[float, float] | None) -> float:
    """The clip norm of the main phase."""
    return float(clip_norm[-1] if isinstance(clip_norm, tuple) else clip_norm or 1.0)


def packed(image: Tensor) -> str:
    """A grey picture in [0, 1] as base64 of its bytes."""
    return base64.b64encode(
        (image.detach().clamp(0, 1) * 255).round().to(torch.uint8).numpy().tobytes()
    ).decode()
