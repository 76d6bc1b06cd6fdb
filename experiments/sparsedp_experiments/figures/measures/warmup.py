"""At the switch: what a private warm-up knows about the gradient (TP-TopK, Fig. 1 and Sec. 7.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsedp._validate import exact_ratio, share_of
from sparsedp.clipping import FlatClip
from sparsedp.diagnostics import proxy_concentration, pure_noise, split_concentration
from sparsedp.grad_sample import make_engine
from sparsedp.methods.scores import ByScore, Coherent, Energy, Observation
from sparsedp.methods.support_scheduler import noise_on_mean
from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.figures.cost import Costs
from sparsedp_experiments.figures.runs import LOSS, Releases, held_out, open_trainer, switch_of, train_until
from sparsedp_experiments.theory.criteria import (
    concentration_curve,
    energy_captured,
    random_capture,
    recovery_curve,
    split_of,
)
from sparsedp_experiments.theory.oracle import mean_gradient

SCORES: tuple[ByScore, ...] = (Energy(), Coherent())


def measure(study: Study, point: Point) -> dict[str, Any]:
    """One private warm-up, and everything Fig. 1 and Sec. 7.4 ask of it."""
    options, costs, releases = study.measure, Costs(), Releases()
    settings = study.run_settings(point)
    trainer, bundle = open_trainer(settings)
    plan = trainer.plan
    nu = noise_on_mean(plan, plan.phases[0])
    with costs.of("warm-up (training, for comparison)"):
        train_until(trainer, switch_of(trainer), (releases,))
    trainer.close()
    model = trainer.model.eval()
    seen = releases.stacked()
    batches = held_out(bundle.test, options["held_out"], options["batch"], int(point["seed"]))
    with costs.of("held-out gradient"):
        engine = make_engine(model, LOSS)
        gradients = torch.stack([mean_gradient(engine, [batch]).value for batch in batches])
        clip = FlatClip(plan.phases[0].clip_norm or 1.0)
        clipped = mean_gradient(engine, batches, clip).value ** 2
    energies = gradients.mean(0) ** 2
    fair = gradients[0::2].mean(0) * gradients[1::2].mean(0)
    with costs.of("scores of the warm-up"):
        scores = {score.name: scored(score, seen, nu) for score in SCORES}
    with costs.of("concentration and recovery curves"):
        shown = {
            "mean gradient": energies,
            "mini-batch gradients": (gradients**2).mean(0),
            "clipped": clipped,
        }
        curves = _curves(shown, scores, options["shares"], int(point["seed"]))
    with costs.of("rho_sig, its null and its split version"):
        supports = [
            _at_ratio(ratio, scores, seen, nu, energies, fair, clipped) for ratio in options["ratios"]
        ]
    total = float(energies.sum())
    return {
        "d": seen.shape[1],
        "warmup_steps": seen.shape[0],
        "noise_multiplier": plan.phases[0].noise_multiplier,
        "noise_std": nu,
        "unit": bundle.unit,
        "held_out_units": options["held_out"],
        "energy": total,
        "energy_less_sampling": float(fair.sum()),
        "clipped_energy": float(clipped.sum()),
        "clipped_energy_over_noise": float(clipped.sum()) / (seen.shape[1] * nu**2),
        **curves,
        "supports": supports,
        "costs": costs.to_json(),
    }


def scored(score: ByScore, seen: Tensor, noise_std: float) -> Tensor:
    """The scores of a stack of dense releases."""
    state = score.init(seen.shape[1])
    variance = torch.full((seen.shape[1],), noise_std**2, dtype=torch.float64)
    for gradient in seen:
        state = score.update(state, Observation(gradient, variance))
    return score.scores(state)


def ranked(scores: Tensor) -> Tensor:
    """Coordinates, best first; ties go to the lower index."""
    return torch.sort(scores, descending=True, stable=True).indices


def _curves(
    shown: dict[str, Tensor], scores: dict[str, Tensor], shares: Sequence[float], seed: int
) -> dict[str, Any]:
    energies = shown["mean gradient"]
    curves = {name: recovery_curve(energies, ranked(found), shares) for name, found in scores.items()}
    first = next(iter(curves.values()))
    chance = PublicRandomness(seed).permutation(energies.numel(), (8,))
    return {
        "shares": list(shares),
        "concentration": {name: concentration_curve(values, shares) for name, values in shown.items()},
        "recovery": {
            **{name: [step.learned for step in curve] for name, curve in curves.items()},
            "random": [step.learned for step in recovery_curve(energies, chance, shares)],
            "oracle": [step.oracle for step in first],
        },
    }


def _at_ratio(
    ratio: float,
    scores: dict[str, Tensor],
    seen: Tensor,
    nu: float,
    energies: Tensor,
    fair: Tensor,
    clipped: Tensor,
) -> dict[str, Any]:
    d, steps = energies.numel(), seen.shape[0]
    k = max(1, share_of(exact_ratio(ratio), d))
    chance = random_capture(energies, k)
    found: dict[str, Any] = {
        "ratio": ratio,
        "k": k,
        "active_ratio": k / d,
        "random_std": chance.std,
        "by": {},
    }
    squares = {"energy": steps, "coherent": 1}
    half = steps // 2
    for score in SCORES:
        support = Support.top_k(scores[score.name], k)
        null = pure_noise(k, d, squares[score.name])
        early = ranked(scored(score, seen[:half], nu))
        split = split_concentration(split_of(early, seen[half:], nu), k)
        found["by"][score.name] = {
            "alpha": energy_captured(energies, support),
            "alpha_less_sampling": float(support.gather(fair).sum() / fair.sum()),
            "alpha_clipped": energy_captured(clipped, support),
            "rho_sig": proxy_concentration(scores[score.name], support),
            "null": null.mean,
            "null_std": null.std,
            "split": None if split.share is None else split.share.value,
            "split_std": None if split.share is None else split.share.std,
            "alpha_of_first_half": energy_captured(energies, Support(early[:k], d)),
        }
    best = Support.top_k(energies, k)
    found["oracle"] = energy_captured(energies, best)
    return found
