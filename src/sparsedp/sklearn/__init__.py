"""Private training behind scikit-learn's interface: `SparseDPClassifier`, and `BoundedScaler` to go before it."""

from sparsedp.sklearn.classifier import SparseDPClassifier
from sparsedp.sklearn.scaling import BoundedScaler

__all__ = ["BoundedScaler", "SparseDPClassifier"]
