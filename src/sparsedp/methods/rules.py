"""The small choices of a method's row: where it clips, what becomes of a coordinate that leaves, what protects."""

from __future__ import annotations

from enum import Enum


class GeometryRule(Enum):
    """The space the main stage clips in; earlier stages always clip gradients as they are.

    Scaled: the clip norm follows the support, `C sqrt(k/d)` for k of d coordinates, and an update is as long as before:
    a gradient whose energy is spread evenly loses as little to the clip as a whole one, and meets `k/d` of the noise.
    """

    IDENTITY = "identity"
    STANDARDIZED = "standardized"
    SCALED = "scaled"


class OffSupport(Enum):
    """What happens to a coordinate that leaves the support.

    Dropped: its optimizer state is made fresh and it does not move. Coasts: it may still move by its velocity, which
    is public (RS, Sec. 4).
    """

    DROPPED = "dropped"
    COASTS = "coasts"


class Protection(Enum):
    """Clip and noise, or one of the two ablations of RS App. E, which protect nobody."""

    PRIVATE = "private"
    NO_CLIP = "no clip"
    NO_NOISE = "no noise"
