"""Private normalisation of the inputs: what is asked for, and the phase of a plan that it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from sparsedp import _validate as checks
from sparsedp._serialization import FrozenMap, from_json
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
    that noise. But the clip norm is given, where their code reads the exact median off the data, and the second
    release is of root mean squares around the released means, where noise on mean squares drowns weak channels.

    Attributes:
        noise_multiplier: of each of the two releases.
        clip_norm: L2 bound on a unit's vector of channel means, and on its vector of spreads, in units of the inputs.
        centre: False leaves the means out: one release, of the spreads around zero, and zero stays zero.
        columns: numbers of the channels that are measured and scaled; None for all. The others stay as they are.

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
        if self.columns is not None:
            columns = {checks.whole(one, "normalise: columns", at_least=0) for one in self.columns}
            if not columns or len(columns) != len(self.columns):
                raise PrivacyError(
                    f"normalise: columns: got {self.columns!r}, expected distinct channels, or None"
                )
            set_fields(self, columns=tuple(sorted(columns)))

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
        return from_json(cls, dict(values), "normalise")
