"""The pieces of a plan: phases, and what it continues. Checked and converted as they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, final

from sparsedp.errors import PrivacyError
from sparsedp.privacy import checks
from sparsedp.privacy.canonical import FrozenMap

if TYPE_CHECKING:
    from sparsedp.core.clip import Clip


@final
@dataclass(frozen=True, slots=True)
class Phase:
    """Some consecutive steps of one mechanism.

    Attributes:
        name: unique in its plan; charges carry it.
        steps: how many releases it makes.
        sampling_rate: Poisson probability q of each unit in each step; 1 is a plain Gaussian release.
        clip_norm: L2 bound on a unit's contribution; None for no bound (not private).
        noise_multiplier: noise standard deviation over `clip_norm`; 0 for none, or not calibrated yet.
        noise_std: absolute noise on an unclipped sum, for the `noisy-sgd` ablation only.
        support: the method's support rule, as JSON, e.g. {"rule": "top-k", "ratio": 0.2}.
        geometry: name of the space gradients are clipped in.
        count_share: share of a step's precision (noise_multiplier^-2) for a second release of the same batch,
            a count of the rows it touches; the gradient has the rest.
        trains: False for a preliminary release (feature statistics), which counts in no epoch.
    """

    name: str
    steps: int
    sampling_rate: float
    clip_norm: float | None
    noise_multiplier: float = 0.0
    noise_std: float | None = None
    support: FrozenMap = field(default_factory=lambda: FrozenMap({"rule": "full"}))
    geometry: str = "identity"
    trains: bool = True
    count_share: float = 0.0

    def __post_init__(self) -> None:
        where = f"phase {self.name!r}"
        checks.text(self.name, "phase name")
        checks.text(self.geometry, f"{where}: geometry")
        clip, std = self.clip_norm, self.noise_std
        if not isinstance(self.support, Mapping):
            raise PrivacyError(f"{where}: support is {self.support!r}, expected a mapping of JSON values")
        if not isinstance(self.trains, bool):
            raise PrivacyError(f"{where}: trains is {self.trains!r}, expected True or False")
        set_fields(
            self,
            steps=checks.whole(self.steps, f"{where}: steps", at_least=1),
            sampling_rate=checks.probability(self.sampling_rate, f"{where}: sampling_rate"),
            clip_norm=None if clip is None else checks.number(clip, f"{where}: clip_norm", above=0.0),
            noise_multiplier=checks.number(self.noise_multiplier, f"{where}: noise_multiplier", at_least=0.0),
            noise_std=None if std is None else checks.number(std, f"{where}: noise_std", at_least=0.0),
            support=FrozenMap(self.support),
            count_share=checks.number(self.count_share, f"{where}: count_share", at_least=0.0),
        )
        if self.count_share >= 1:
            raise PrivacyError(f"{where}: count_share is {self.count_share}, expected a share below 1")
        if clip is None and self.noise_multiplier > 0:
            raise PrivacyError(
                f"{where}: a noise_multiplier needs a clip_norm; for noise without a clip use noise_std"
            )
        if clip is not None and std is not None:
            raise PrivacyError(
                f"{where}: noise_std is for unclipped sums; with a clip_norm give a noise_multiplier"
            )

    @property
    def is_private(self) -> bool:
        """Whether its releases are clipped and noised in proportion."""
        return self.clip_norm is not None and self.noise_multiplier > 0

    @property
    def clip(self) -> Clip:
        """What bounds a unit's contribution; nothing in the ablation without a bound."""
        from sparsedp.core.clip import FlatClip, NoClip  # loads torch, which planning does without

        return NoClip() if self.clip_norm is None else FlatClip(self.clip_norm)

    @property
    def gradient_noise(self) -> float:
        """The gradient's own noise multiplier: all of the step's, unless it also counts rows."""
        return self.noise_multiplier / math.sqrt(1 - self.count_share)

    @property
    def count_noise(self) -> float:
        """The noise multiplier of the count of rows, in a phase that makes one in every step."""
        if not self.count_share:
            raise PrivacyError(f"phase {self.name!r} counts nothing in its steps")
        return self.noise_multiplier / math.sqrt(self.count_share)

    def to_json(self) -> dict[str, Any]:
        """JSON values; a phase that counts nothing does not speak of it, as before there were such."""
        values = {**values_of(self), "support": self.support.plain()}
        return values if self.count_share else {k: v for k, v in values.items() if k != "count_share"}

    @classmethod
    def from_json(cls, values: Any) -> Phase:
        """The phase that `to_json` wrote.

        Raises:
            PrivacyError: unknown or missing keys, or an invalid phase.
        """
        complete = {"count_share": 0.0, **values} if isinstance(values, dict) else values
        return cls(**keyed(complete, cls, "phase"))


@final
@dataclass(frozen=True, slots=True)
class Continuation:
    """What earlier runs on the same units spent, and the cap over all of them; made by `RdpFilter.calibrate`.

    Attributes:
        order: the filter's fixed Renyi order.
        spent: Renyi divergence of that order spent by the earlier runs.
        ledgers: heads of the earlier runs' ledgers.
    """

    order: float
    spent: float
    ledgers: tuple[str, ...]

    def __post_init__(self) -> None:
        set_fields(
            self,
            order=checks.number(self.order, "continuation: order", above=1.0),
            spent=checks.number(self.spent, "continuation: spent", at_least=0.0),
            ledgers=tuple(checks.text(head, "continuation: ledger head") for head in self.ledgers),
        )


def values_of(item: Any) -> dict[str, Any]:
    """A dataclass's fields by name."""
    return {entry.name: getattr(item, entry.name) for entry in fields(item)}


def keyed(
    value: Any, kind: type, what: str, extra: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    """The values of a JSON object that must have the fields of `kind`, and `extra` ones, which are left out."""
    expected = {entry.name for entry in fields(kind)} | extra
    if not isinstance(value, dict) or set(value) != expected:
        found = sorted(value) if isinstance(value, dict) else value
        raise PrivacyError(f"{what}: got the keys {found}, expected {sorted(expected)}")
    return {key: value[key] for key in expected - extra}


def set_fields(item: object, **values: object) -> None:
    """Put checked and converted values into a frozen dataclass, as it is made."""
    for name, value in values.items():
        object.__setattr__(item, name, value)
