"""Private normalisation of the inputs: what is asked for, and the phase of a plan that it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from sparsedp import _validate as checks
from sparsedp._serialization import FrozenMap
from sparsedp.errors import PrivacyError
from sparsedp.privacy.plan import Phase, set_fields

NORMALISE = "normalise"
"""Name of the phase."""

RELEASES = 2
"""The channels' means, then their spreads around the means released; without a centre the spreads alone."""


@final
@dataclass(frozen=True, slots=True)
class PrivateNormalisation:
    """Centre and scale every channel of the inputs by statistics of the training data, released once with noise.

    After Tramèr and Boneh (ICLR 2021, Sec. 2.3), whose "BN(8)" is `noise_multiplier=8` here: two Gaussian releases of
    that noise. Two things differ. The clip norm is given, where their code reads the exact median off the data; and
    the second release is of root mean squares around the released means, not of mean squares, whose noise drowns
    every weak channel.

    Attributes:
        noise_multiplier: of each of the two releases.
        clip_norm: L2 bound on a unit's vector of channel means, and on its vector of spreads, in units of the inputs.
        centre: False leaves the means out: one release, of the spreads around zero, and zero stays zero.
        columns: numbers of the channels that are measured and scaled, for tables of mixed columns; None for all. The
            others stay as they are, and neither take part in the clip nor get noise.

    Formal guarantees:
        Clip norm and columns are public, so they must not be chosen by looking at the private data.
    """

    noise_multiplier: float = 8.0
    clip_norm: float = 1.0
    centre: bool = True
    columns: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "clip_norm"):
            checks.number(getattr(self, name), f"normalise: {name}", above=0.0)
        if not isinstance(self.centre, bool):
            raise PrivacyError(f"normalise: centre: got {self.centre!r}, expected True or False")
        if self.columns is not None:
            set_fields(self, columns=_distinct(self.columns))

    def phase(self) -> Phase:
        """Two releases over all units before training, or one without a centre."""
        rule = {"rule": "channels"} if self.columns is None else {"rule": "channels", "columns": self.columns}
        return Phase(
            name=NORMALISE,
            steps=RELEASES if self.centre else 1,
            sampling_rate=1.0,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            support=FrozenMap(rule),
            trains=False,
        )

    def to_json(self) -> dict[str, Any]:
        """Names and values; those of `centre` and `columns` only if they are not the defaults."""
        values: dict[str, Any] = {"noise_multiplier": self.noise_multiplier, "clip_norm": self.clip_norm}
        values |= {} if self.centre else {"centre": False}
        return values if self.columns is None else {**values, "columns": list(self.columns)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PrivateNormalisation:
        """From names and numbers, as in an experiment file."""
        known = {entry.name for entry in fields(cls)}
        if unknown := set(values) - known:
            raise PrivacyError(f"normalise: got {sorted(unknown)}, expected some of {sorted(known)}")
        return cls(**values)


def _distinct(columns: object) -> tuple[int, ...]:
    """Distinct numbers of channels, sorted."""
    listed = columns if isinstance(columns, (list, tuple)) else ()
    whole = [one for one in listed if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    if not listed or len(set(whole)) != len(listed):
        raise PrivacyError(
            f"normalise: columns: got {columns!r}, expected distinct numbers of channels, counted from 0, or None"
        )
    return tuple(sorted(whole))
