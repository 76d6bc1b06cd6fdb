"""Private training behind scikit-learn's interface: `SparseDPClassifier`, and what may go before it.

`PublicEncoder` turns columns into features by declared rules, `BoundedScaler` maps features from declared bounds.
"""

from sparsedp.sklearn.classifier import SparseDPClassifier
from sparsedp.sklearn.columns import PublicEncoder
from sparsedp.sklearn.scaling import BoundedScaler

__all__ = ["BoundedScaler", "PublicEncoder", "SparseDPClassifier"]
