"""Reconstructing inputs from gradients: by optimisation, and by least squares with its error in closed form.

Inverting gradients (Geiping et al., 2020; RS, Fig. 5):

The attacker knows the model, the target and the support, sees the victim's gradient on the support with noise, and
looks for an image whose gradient points the same way: least `1 - cosine + weight . total variation`, by Adam on the
sign of the slope with a falling rate, in the box [0, 1].

Least squares (RS, Sec. 5): the input x solves `K x = g` for a matrix K with one row per gradient coordinate;
the attacker sees g plus noise on the support only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from sparsedp.batch import LossFunction
from sparsedp.clipping import FlatClip
from sparsedp.parameters import ParameterLayout, Support
from sparsedp.randomness import PublicRandomness


@final
@dataclass(frozen=True, slots=True, eq=False)
class Intercepted:
    """What the attacker sees of one victim: k values, and what is public."""

    values: Tensor = field(repr=False)
    support: Support
    target: Tensor


def observe(
    model: nn.Module,
    loss: LossFunction,
    image: Tensor,
    target: Tensor,
    support: Support,
    *,
    clip: FlatClip,
    noise_std: float,
    public: PublicRandomness,
) -> Intercepted:
    """The clipped gradient of one image on a support, with noise anyone may know: a simulation, not a release."""
    gradient = support.gather(_gradient(model, loss, image.unsqueeze(0), target, graph=False)).double().cpu()
    clipped = gradient * clip.factors(torch.linalg.vector_norm(gradient))
    noisy = clipped + noise_std * public.normal(support.size, (0,))
    return Intercepted(noisy, support, target)


@final
@dataclass(frozen=True, slots=True)
class Effort:
    """How hard the attacker tries."""

    steps: int = 400  # of the optimiser
    learning_rate: float = 0.1  # of Adam, at the start; it falls by ten at 3/8, 5/8 and 7/8 of the steps
    variation_weight: float = 1e-3  # of the total variation


@final
@dataclass(frozen=True, slots=True, eq=False)
class Reconstruction:
    """An image the attacker found; `objective` is what was minimised, at each step."""

    image: Tensor = field(repr=False)
    objective: tuple[float, ...] = field(repr=False)


def invert(
    model: nn.Module,
    loss: LossFunction,
    seen: Intercepted,
    shape: tuple[int, ...],
    public: PublicRandomness,
    effort: Effort = Effort(),  # noqa: B008
) -> Reconstruction:
    """Attack one observed gradient, from a random grey start; gives the image of the least objective.

    **Privacy.** The result may show a person's record: it is marked, like what it was made from.
    """
    aim = seen.values.to(next(model.parameters()))
    start = 0.5 + 0.1 * public.normal(math.prod(shape), (1,)).reshape(1, *shape)
    guess = start.to(aim).clamp(0, 1).requires_grad_(True)
    optimizer = torch.optim.Adam([guess], lr=effort.learning_rate)
    falls = [effort.steps * eighth // 8 for eighth in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=falls, gamma=0.1)
    history: list[float] = []
    best, least = guess.detach().clone(), math.inf
    for _ in range(effort.steps):
        gradient = seen.support.gather(_gradient(model, loss, guess, seen.target, graph=True))
        objective = _misalignment(gradient, aim) + effort.variation_weight * total_variation(guess)
        value = float(objective.detach())
        history.append(value)
        if value < least:
            best, least = guess.detach().clone(), value
        (slope,) = torch.autograd.grad(objective, [guess])
        guess.grad = slope.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            guess.clamp_(0, 1)
    return Reconstruction(best[0], tuple(history))


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, down and across."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    across = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
    return down + across


def mean_squared_error(found: Tensor, truth: Tensor) -> float:
    """Between two images."""
    return float(((found.detach().double() - truth.double()) ** 2).mean())


def _misalignment(gradient: Tensor, aim: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(gradient) * torch.linalg.vector_norm(aim)
    cosine: Tensor = (gradient @ aim) / lengths.clamp(min=1e-20)
    return 1 - cosine


def _gradient(model: nn.Module, loss: LossFunction, images: Tensor, target: Tensor, *, graph: bool) -> Tensor:
    """The flat gradient of the loss of one image, with its own graph if asked for."""
    parameters = ParameterLayout.of(model).parameters(model)
    losses = loss(model, (images.to(parameters[0]), target.reshape(1)))
    slopes = torch.autograd.grad(losses.sum(), parameters, create_graph=graph, materialize_grads=True)
    return torch.cat([slope.reshape(-1) for slope in slopes])


def least_squares_attack(constraints: Tensor, gradient: Tensor, support: Support) -> Tensor:
    """The attacker's estimate of x from the observed k values of g (RS, eq. 100)."""
    seen = _rows_seen(constraints, support)
    solution: Tensor = torch.linalg.lstsq(seen, gradient.double().unsqueeze(1)).solution
    return solution.squeeze(1)


def reconstruction_error(constraints: Tensor, support: Support, noise_std: float) -> float:
    """`E||x - x_hat||^2` for one support: `noise^2 tr (K_A' K_A)^-1` (RS, eq. 16 with the mask put in).

    **Edge cases.** Infinite when the observed rows do not determine x.
    """
    values = torch.linalg.svdvals(_rows_seen(constraints, support))
    columns = constraints.shape[1] if constraints.dim() == 2 else 1
    if values.numel() < columns or float(values.min()) <= 1e-12 * max(float(values.max()), 1e-300):
        return float("inf")
    return noise_std**2 * float((values**-2).sum())


def mean_reconstruction_error(
    constraints: Tensor, rate: float, noise_std: float, public: PublicRandomness, masks: int = 200
) -> float:
    """The error averaged over random supports that freeze the share `rate` of coordinates."""
    d = constraints.shape[0]
    kept = _kept(rate, d)
    orders = (public.permutation(d, (mask,)) for mask in range(masks))
    errors = (reconstruction_error(constraints, Support(order[:kept], d), noise_std) for order in orders)
    return sum(errors) / masks


def reconstruction_lower_bound(constraints: Tensor, rate: float, noise_std: float) -> float:
    """`noise^2/((1-r) ||k||^2)` (RS, Theorem 5.1), for a matrix `noise^2 n^2/((1-r) ||K||^2)` with n columns.

    Jensen for the mean over random supports, as the trace of an inverse is convex; for n columns the arithmetic and
    harmonic means of the eigenvalues besides. `1 - r` is the share actually kept.
    """
    columns = constraints.shape[1] if constraints.dim() == 2 else 1
    d = constraints.shape[0]
    return noise_std**2 * columns**2 / (_kept(rate, d) / d * float((constraints.double() ** 2).sum()))


def _rows_seen(constraints: Tensor, support: Support) -> Tensor:
    matrix = constraints.double().reshape(constraints.shape[0], -1)
    return matrix[support.indices]


def _kept(rate: float, dimension: int) -> int:
    return max(1, round((1 - rate) * dimension))
