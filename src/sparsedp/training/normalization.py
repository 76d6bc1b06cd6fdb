"""A model with its inputs normalised by constants that were released privately, and the release itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsedp.errors import ModelError, PrivacyError
from sparsedp.methods.method import SELECT
from sparsedp.privacy.charge import Charge, Chargeable
from sparsedp.privacy.mechanism import GaussianMechanism, Release
from sparsedp.privacy.normalization import NORMALISE, RELEASES
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.queries import ChannelStatisticsSum
from sparsedp.randomness import PrivateRandomness
from sparsedp.sampling import LogicalBatch


@final
class Normalised(nn.Module):
    """A model behind `(inputs - centre) / scale`, channel by channel: axis 1 of the inputs.

    The constants are buffers, so they are saved, loaded and moved with the weights. They are 0 and 1 until a run
    whose plan has a normalisation sets them.

    Args:
        model: gets the normalised inputs, and further arguments as they are.
        channels: how many the inputs have; public.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self, model: nn.Module, channels: int) -> None:
        super().__init__()
        self.model = model
        like = next(model.parameters(), torch.empty(0))
        self.register_buffer("centre", torch.zeros(channels).to(like))
        self.register_buffer("scale", torch.ones(channels).to(like))

    def forward(self, inputs: Tensor, *more: Any) -> Any:
        """The model's output for normalised inputs."""
        channels = self.centre.numel()
        if inputs.dim() < 2 or inputs.shape[1] != channels:
            raise ModelError(
                f"Normalised: got inputs of shape {tuple(inputs.shape)}, expected [rows, {channels}, ...]"
            )
        shape = (channels, *[1] * (inputs.dim() - 2))
        return self.model((inputs - self.centre.view(shape)).div_(self.scale.view(shape)), *more)

    @torch.no_grad()
    def set_constants(self, means: Release | None, spreads: Release, columns: Tensor | None = None) -> None:
        """Take released means, if any, and spreads; a spread below its own noise counts as that noise.

        With `columns` they are of these channels, and the others stay as they are.
        Formal guarantees: Post-processing: released values and their public noise.
        """
        where = slice(None) if columns is None else columns
        if means is not None:
            self.centre[where] = means.mean.to(self.centre)
        self.scale[where] = torch.maximum(spreads.mean, spreads.noise_scale).to(self.scale)


def check_normalisation(plan: Plan, model: nn.Module) -> None:
    """Refuse phases without training that are not a normalisation at the start, or one that the model cannot take."""
    phase = plan.preliminary(NORMALISE)
    others = {other.name for other in plan.phases if not other.trains} - {NORMALISE, SELECT.name}
    if others:
        raise PrivacyError(f"the phases {sorted(others)} do not train; leave them out of this plan")
    if phase is None:
        return
    if plan.phases[0] is not phase or phase.steps not in (1, RELEASES):
        raise PrivacyError(
            f"the phase {NORMALISE!r} does not come first; make the plan by build_plan(normalise=...)"
        )
    if not isinstance(model, Normalised):
        raise ModelError(
            f"the plan normalises the inputs, and {type(model).__name__} has no place for the constants; give "
            "Normalised(model, channels)"
        )
    columns = phase.support.get("columns")
    if columns and max(columns) >= model.centre.numel():
        raise PrivacyError(
            f"normalise: columns: got {max(columns)}, expected numbers below {model.centre.numel()}, the channels of "
            "the inputs"
        )


def release_statistics(
    model: Normalised,
    batches: Iterator[LogicalBatch],
    plan: Plan,
    phase: Phase,
    *,
    ledger: Chargeable,
    randomness: PrivateRandomness,
) -> None:
    """Release the channels' means, then their spreads around those means, and set the model's constants to them.

    A phase of one release has the spreads around zero alone.
    Formal guarantees: (Poisson-sampled) Gaussian releases of sensitivity `clip_norm`; the second is adaptive, which
    composition allows.
    """
    channels, clip = model.centre.numel(), phase.clip
    chosen = phase.support.get("columns")
    columns = None if chosen is None else torch.tensor(chosen)

    def released(centre: Tensor | None) -> Release:
        batch = next(batches)
        return GaussianMechanism(ledger, randomness).release(
            ChannelStatisticsSum(batch, channels, clip, centre, columns),
            Charge(phase.name, batch.step, phase.sampling_rate, phase.noise_multiplier),
            expected_batch_size=plan.expected_batch_size(phase),
        )

    means = None if phase.steps == 1 else released(None)
    measured = channels if columns is None else columns.numel()
    model.set_constants(means, released(torch.zeros(measured) if means is None else means.mean), columns)
