"""What was released, as the accountants see it: Poisson-subsampled Gaussian mechanisms and how often each ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sparsedp.core.errors import PrivacyError


class Spend(NamedTuple):
    """`steps` releases of one mechanism, under adding or removing one unit; noise 0 is no protection at all."""

    sampling_rate: float
    noise_multiplier: float
    steps: int


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


def spends_of(event: Any) -> tuple[Spend, ...]:
    """The spends of a `dp_accounting` event, in order.

    Raises:
        PrivacyError: the event holds a mechanism these accountants do not know. Unknown fails closed.
    """
    return tuple(_walk(event, 1))


def merged(spends: Iterable[Spend]) -> tuple[Spend, ...]:
    """Spends with equal mechanisms added up: composition does not depend on the order."""
    steps: dict[tuple[float, float], int] = {}
    for rate, noise, count in spends:
        steps[rate, noise] = steps.get((rate, noise), 0) + count
    return tuple(Spend(rate, noise, count) for (rate, noise), count in steps.items() if count)


def between(spends: Iterable[Spend], start: int, stop: int) -> tuple[Spend, ...]:
    """The spends of the steps start..stop-1."""
    parts, first = [], 0
    for rate, noise, count in spends:
        overlap = min(first + count, stop) - max(first, start)
        if overlap > 0:
            parts.append(Spend(rate, noise, overlap))
        first += count
    return tuple(parts)


def is_private(spends: Sequence[Spend]) -> bool:
    """Whether every mechanism adds noise."""
    return all(spend.noise_multiplier > 0 for spend in spends)


def _walk(event: Any, count: int) -> list[Spend]:
    import dp_accounting as dp

    match event:
        case dp.NoOpDpEvent():
            return []
        case dp.NonPrivateDpEvent():
            return [Spend(1.0, 0.0, count)]
        case dp.ComposedDpEvent(events=events):
            return [spend for part in events for spend in _walk(part, count)]
        case dp.SelfComposedDpEvent(event=part, count=times):
            return _walk(part, count * times)
        case dp.GaussianDpEvent(noise_multiplier=noise):
            return [Spend(1.0, float(noise), count)]
        case dp.PoissonSampledDpEvent(
            sampling_probability=rate, event=dp.GaussianDpEvent(noise_multiplier=noise)
        ):
            return [Spend(float(rate), float(noise), count)] if rate > 0 else []
        case _:
            raise PrivacyError(
                f"cannot account for {event!r}; expected compositions of Poisson-sampled Gaussian releases"
            )
