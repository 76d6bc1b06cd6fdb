"""Private training behind scikit-learn's interface: `SparseDPClassifier` and `SparseDPRegressor`.

`PublicEncoder` turns columns into features by descriptions that are public; `PrivacyBudget` is shared by several
fits.
"""

from sparsedp.sklearn.budget import PrivacyBudget
from sparsedp.sklearn.classifier import SparseDPClassifier
from sparsedp.sklearn.preprocessing import PublicEncoder
from sparsedp.sklearn.regressor import SparseDPRegressor

__all__ = ["PrivacyBudget", "PublicEncoder", "SparseDPClassifier", "SparseDPRegressor"]
