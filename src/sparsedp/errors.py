"""The one exception family users see: what was got, what was expected, what to do."""


class SparseDPError(ValueError):
    """A mistake the user can fix; the message says how."""


class ModelError(SparseDPError):
    """The model cannot be trained with per-sample clipping as it is."""


class DataError(SparseDPError):
    """A data set, file or batch is not what it should be."""


class PrivacyError(SparseDPError):
    """A request that would break, overstate or overspend the privacy guarantee."""


class RankError(SparseDPError):
    """The processes of a run cannot go on together: one failed, is gone, or is not like the others."""


class OutOfReachError(PrivacyError):
    """A budget so small that no noise keeps to it."""


class PrivacyWarning(UserWarning):
    """A request that is honoured but gives a weaker guarantee than it seems to."""
