"""Epsilon of a ledger by accountants that share no code with the one that planned."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable
from typing import Any

from sparsedp.privacy.accounting import quiet
from sparsedp.privacy.ledger import VerifiedLedger
from sparsedp.privacy.plan import Spend

TIGHTEST = "PLD (dp-accounting)"


def independent_epsilons(ledger: VerifiedLedger) -> dict[str, float]:
    """Epsilon of everything charged, by `dp_accounting`'s own PLD and RDP accountants, and Opacus's two if installed.

    **Edge cases.** Empty when it is not private.
    """
    import dp_accounting as dp

    if ledger.delta is None or any(block.noise_multiplier == 0 for block in ledger.blocks):
        return {}
    with quiet():
        made = {TIGHTEST: dp.pld.PLDAccountant(), "RDP (dp-accounting)": dp.rdp.RdpAccountant()}
        found = {
            name: float(one.compose(event_of(ledger.spends())).get_epsilon(ledger.delta))
            for name, one in made.items()
        }
    return {**found, **_by_opacus(ledger, ledger.delta)}


def event_of(spends: Iterable[Spend]) -> Any:
    """The `dp_accounting` event of some spends: one self-composed, Poisson-sampled Gaussian each.

    **Edge cases.** One spend without noise makes the whole non-private; nothing spent is a no-op.
    """
    import dp_accounting as dp

    parts = []
    for spend in spends:
        if spend.noise_multiplier == 0:
            return dp.NonPrivateDpEvent()
        gaussian = dp.GaussianDpEvent(spend.noise_multiplier)
        parts.append(
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(spend.sampling_rate, gaussian), spend.steps)
        )
    return dp.ComposedDpEvent(parts) if parts else dp.NoOpDpEvent()


def _by_opacus(ledger: VerifiedLedger, delta: float) -> dict[str, float]:
    if importlib.util.find_spec("opacus") is None:
        return {}
    from opacus.accountants import PRVAccountant, RDPAccountant

    history = [(block.noise_multiplier, block.sampling_rate, block.steps) for block in ledger.blocks]
    found = {}
    for name, made in (("RDP (Opacus)", RDPAccountant()), ("PRV (Opacus)", PRVAccountant())):
        made.history = _merged(history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = float(made.get_epsilon(delta)) if history else 0.0
    return found


def _merged(history: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    steps: dict[tuple[float, float], int] = {}
    for noise, rate, count in history:
        steps[noise, rate] = steps.get((noise, rate), 0) + count
    return [(noise, rate, count) for (noise, rate), count in steps.items()]
