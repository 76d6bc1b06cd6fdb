"""Private training behind scikit-learn's interface: `SparseDPClassifier` and `SparseDPRegressor`.

`PublicEncoder` turns columns into features by descriptions that are public; `PrivacyBudget` is shared by several
fits.
"""

from sparsedp.sklearn.budget import PrivacyBudget
from sparsedp.sklearn.estimators import SparseDPClassifier, SparseDPRegressor, expected_failed_checks
from sparsedp.sklearn.preprocessing import PublicEncoder

__all__ = [
    "PrivacyBudget",
    "PublicEncoder",
    "SparseDPClassifier",
    "SparseDPRegressor",
    "expected_failed_checks",
]
