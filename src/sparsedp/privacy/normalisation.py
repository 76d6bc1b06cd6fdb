"""Private normalisation of the inputs: what is asked for, and the phase of a plan that it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from sparsedp.core.errors import PrivacyError
from sparsedp.privacy import checks
from sparsedp.privacy.canonical import FrozenMap
from sparsedp.privacy.plan import Phase

NORMALISE = "normalise"
"""Name of the phase."""

RELEASES = 2
"""The channels' means, then their spreads around the means released."""


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
            Scattering features of pixels in [0, 1] have norms of about 1 and 0.4, and never much above sqrt(3).

    **Privacy.** The clip norm is public, so it must not be chosen by looking at the private data.
    """

    noise_multiplier: float = 8.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            checks.number(getattr(self, entry.name), f"normalise: {entry.name}", above=0.0)

    def phase(self) -> Phase:
        """Two releases over all units, before training."""
        return Phase(
            name=NORMALISE,
            steps=RELEASES,
            sampling_rate=1.0,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            support=FrozenMap({"rule": "channels"}),
            trains=False,
        )

    def to_json(self) -> dict[str, Any]:
        """Names and numbers."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PrivateNormalisation:
        """From names and numbers, as in an experiment file.

        Raises:
            PrivacyError: a name that is not one of the attributes, or a value that is not a number > 0.
        """
        known = {entry.name for entry in fields(cls)}
        if not set(values) <= known:
            raise PrivacyError(
                f"normalise: got {sorted(set(values) - known)}, expected some of {sorted(known)}"
            )
        return cls(**values)
