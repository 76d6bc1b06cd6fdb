"""The only door: where private gradients become a release."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparsedp.batch import MicroBatch
from sparsedp.core.clip import Clip
from sparsedp.core.geometry import Geometry, Identity
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample.query import Engine, Query
from sparsedp.parameters import Support
from sparsedp.privacy.exchange import ALONE, Exchange
from sparsedp.privacy.grid import Grid
from sparsedp.privacy.ledger import Charge, Ledger
from sparsedp.privacy.quiet import no_messages
from sparsedp.privacy.released import _SEAL, Released
from sparsedp.randomness import PrivateRandomness


class BoundedSum(Protocol):
    """A sum over units that knows how far one unit can move it. Asked once, inside `private_sum`."""

    @property
    def size(self) -> int:
        """How many numbers the sum has. Public."""
        ...

    @property
    def sensitivity(self) -> float:
        """Largest L2 change when one unit is added or removed."""
        ...

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The sum in float64, in one or more parts, clipped so that a unit moves it by at most `bound`. Private.

        Cut by unit: one that is added moves a single part, or makes two of it. The mechanism takes their memory: no
        part may be used again.
        """
        ...


def private_sum(
    query: BoundedSum,
    *,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    absolute_noise_std: float = 0.0,
    exchange: Exchange = ALONE,
) -> tuple[Tensor, float]:
    """A bounded sum plus Gaussian noise, paid for first; gives the noisy sum and the noise's standard deviation.

    **Privacy.** One Poisson-subsampled Gaussian mechanism with the charge's rate and noise multiplier, under adding
    or removing one unit, rounded to a public grid: the sum is put on it first, the noise has exactly the law of a
    rounded Gaussian, and both are added as integers. The ledger is charged before anything is computed or drawn.
    Where several processes share the units (`exchange`), their integers are added first, and one of them charges and
    draws noise. Nothing is logged and no warning is shown meanwhile.
    **Edge cases.** `absolute_noise_std` is for sums without a bound (the non-private ablations) and only for them.
    """
    std = _noise_std(query.sensitivity, charge.noise_multiplier, absolute_noise_std)
    grid = (
        Grid.of(query.sensitivity, charge.noise_multiplier, query.size) if charge.noise_multiplier else None
    )
    if grid is None:
        with no_messages():
            return _float_sum(query, std, charge, ledger, randomness, exchange), std

    def local() -> Tensor:
        ledger.charge(charge)
        return grid.add_up(query.parts(grid.bound))

    def noisy(steps: Tensor) -> Tensor:
        randomness.add_rounded_gaussian(grid.noise_bits, steps, key=charge.key)
        return steps

    with no_messages():
        return grid.values(exchange.integers(local, noisy, query.size)), std


def privatize(
    engine: Engine,
    batches: Iterable[MicroBatch],
    query: Query,
    *,
    expected_batch_size: float,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    absolute_noise_std: float = 0.0,
    exchange: Exchange = ALONE,
) -> Released:
    """One private step: mask, standardize, per-sample top-r, clip, sum, noise on the support, average, restore.

    **Privacy.** Sensitivity is the clip norm whatever the support, geometry and top-r, since the clip comes after
    them. The sum is divided by the *expected* batch size, a public number; the realised one is never used.
    **Edge cases.** An empty batch releases noise alone; an empty support releases an empty vector and is still
    charged.
    """
    return _mean(
        _GradientSum(engine, batches, query),
        query.support,
        query.geometry,
        expected_batch_size=expected_batch_size,
        charge=charge,
        ledger=ledger,
        randomness=randomness,
        absolute_noise_std=absolute_noise_std,
        exchange=exchange,
    )


def private_mean(
    query: BoundedSum,
    size: int,
    *,
    expected_batch_size: float,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    support: Support | None = None,
    geometry: Geometry | None = None,
    exchange: Exchange = ALONE,
) -> Released:
    """The mean over units of explicit vectors of `size` numbers: bounded sum, noise, expected number of units.

    They stand for all there is, or for the coordinates of a `support`, in the space of a `geometry`.

    **Privacy.** That of `private_sum`. Every number of the vector gets noise.
    """
    return _mean(
        query,
        Support.full(size) if support is None else support,
        Identity() if geometry is None else geometry,
        expected_batch_size=expected_batch_size,
        charge=charge,
        ledger=ledger,
        randomness=randomness,
        exchange=exchange,
    )


def _mean(
    query: BoundedSum,
    support: Support,
    geometry: Geometry,
    *,
    expected_batch_size: float,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    absolute_noise_std: float = 0.0,
    exchange: Exchange = ALONE,
) -> Released:
    if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
        raise PrivacyError(f"expected_batch_size: got {expected_batch_size}, expected a finite number > 0")
    total, std = private_sum(
        query,
        charge=charge,
        ledger=ledger,
        randomness=randomness,
        absolute_noise_std=absolute_noise_std,
        exchange=exchange,
    )
    return Released(
        support=support,
        mean=geometry.inverse(total.div_(expected_batch_size)),
        noise_scale=geometry.noise_scale(std / expected_batch_size, support.size),
        phase=charge.phase,
        step=charge.step,
        for_release=randomness.for_release,
        private=charge.noise_multiplier > 0,
        seal=_SEAL,
    )


@dataclass(frozen=True, slots=True)
class ClippedRows:
    """The clipped sum of explicit vectors, one per unit: for private feature statistics."""

    rows: Tensor
    clip: Clip

    @property
    def size(self) -> int:
        """The length of a row."""
        return int(self.rows.shape[1])

    @property
    def sensitivity(self) -> float:
        """The clip's."""
        return self.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        """The clipped sum, in one part; a row that is not finite contributes zero."""
        rows = self.rows.to(torch.float64)
        factors = self.clip.tightened(bound).factors(torch.linalg.vector_norm(rows, dim=1))
        yield factors @ torch.where((factors > 0).unsqueeze(1), rows, torch.zeros_like(rows))


@dataclass(frozen=True, slots=True)
class _GradientSum:
    engine: Engine
    batches: Iterable[MicroBatch]
    query: Query

    @property
    def size(self) -> int:
        return self.query.support.size

    @property
    def sensitivity(self) -> float:
        return self.query.clip.sensitivity

    def parts(self, bound: float) -> Iterator[Tensor]:
        query = replace(self.query, clip=self.query.clip.tightened(bound))
        empty = True
        for batch in self.batches:
            empty = False
            yield self.engine.clipped_sum([batch], query)
        if empty:
            yield self.engine.clipped_sum([], query)


_ABLATION_BITS = 30


def _float_sum(
    query: BoundedSum,
    std: float,
    charge: Charge,
    ledger: Ledger,
    randomness: PrivateRandomness,
    exchange: Exchange,
) -> Tensor:
    """For the ablations, which promise nothing: the sum as it is, and noise if there is any."""

    def local() -> Iterator[Tensor]:
        ledger.charge(charge)
        return query.parts(math.inf)

    def noisy(total: Tensor) -> Tensor:
        if std == 0:
            return total
        noise = randomness.rounded_gaussian(_ABLATION_BITS, query.size, key=charge.key)
        return total.add(noise.to(total), alpha=math.ldexp(std, -_ABLATION_BITS))

    return exchange.floats(local, noisy, query.size)


def _noise_std(sensitivity: float, noise_multiplier: float, absolute: float) -> float:
    if noise_multiplier < 0 or absolute < 0 or not math.isfinite(noise_multiplier + absolute):
        raise PrivacyError(
            f"noise: got multiplier {noise_multiplier} and std {absolute}, expected numbers >= 0"
        )
    if absolute and noise_multiplier:
        raise PrivacyError("noise: give a noise multiplier or an absolute std, not both")
    if absolute and math.isfinite(sensitivity):
        raise PrivacyError(
            "noise: an absolute std is for unclipped sums; with a clip, give a noise multiplier"
        )
    if noise_multiplier and not math.isfinite(sensitivity):
        raise PrivacyError(
            "noise: without a clip the sensitivity is infinite and no multiplier protects anyone"
        )
    return absolute if absolute else (noise_multiplier * sensitivity if noise_multiplier else 0.0)
