"""The release of a selection stage: one count over all units, before training."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sparsedp.core.batch import PerSampleLoss, Rows
from sparsedp.core.errors import PrivacyError
from sparsedp.core.generators import own_generators
from sparsedp.core.layout import Layout
from sparsedp.core.randomness import PrivateRandomness, PublicRandomness
from sparsedp.gradients.touched import TouchedRows
from sparsedp.gradients.votes import GradientVotes
from sparsedp.methods.controller import Controller
from sparsedp.methods.stages import SELECT
from sparsedp.methods.votes import Votes
from sparsedp.privacy.exchange import Exchange
from sparsedp.privacy.ledger import Charge, Ledger
from sparsedp.privacy.mechanism import private_mean
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.touched import TouchedSum
from sparsedp.sampling.poisson import LogicalBatch
from sparsedp.training.step import clip_of

Look = TouchedRows | GradientVotes
"""What sees the pairs of unit and row."""


def selection_phase(plan: Plan) -> Phase | None:
    """The plan's selection, if it has one."""
    return next((phase for phase in plan.phases if phase.name == SELECT.name and not phase.trains), None)


def counted_rows(
    model: nn.Module,
    loss: PerSampleLoss,
    controller: Controller,
    probe: Callable[[], Rows],
    public: PublicRandomness,
) -> Look | None:
    """What a selection looks at, tried on a few rows; None for a method without one.

    Raises:
        ModelError: samples cannot be told apart in what the tables are asked for.
    """
    if controller.tables is None:
        return None
    if isinstance(ranking := controller.method.ranking, Votes):
        layout = Layout.of(model)
        return GradientVotes(model, loss, controller.tables.of_coordinates(layout.dimension), ranking.most)
    look = TouchedRows(model, loss, [slot.name for slot in controller.tables.slots])
    with own_generators(public.generator_seed((0, 4)), next(model.parameters()).device):
        look.check(probe())
    return look


def release_selection(
    look: Look,
    batch: LogicalBatch,
    plan: Plan,
    phase: Phase,
    controller: Controller,
    *,
    ledger: Ledger,
    randomness: PrivateRandomness,
    exchange: Exchange,
) -> None:
    """Count, with noise, how many units touch or vote for each row, and let the controller rank by it.

    **Privacy.** One Gaussian release over all units, of sensitivity `clip_norm`; charged before it is computed.
    """
    if controller.tables is None:
        raise PrivacyError(f"the phase {phase.name!r} selects, and the method has nothing to select by")
    rows = controller.tables.total
    released = private_mean(
        TouchedSum(batch, look, rows, clip_of(phase)),
        rows,
        expected_batch_size=plan.expected_batch_size(phase),
        charge=Charge(phase.name, batch.step, phase.sampling_rate, phase.noise_multiplier),
        ledger=ledger,
        randomness=randomness,
        exchange=exchange,
    )
    controller.observe_selection(released)
