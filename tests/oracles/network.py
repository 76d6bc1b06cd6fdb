"""A two-layer network with hand-written per-sample gradients, in NumPy. No automatic differentiation."""

import numpy as np


class TinyNetwork:
    """logits = W2 tanh(W1 x + b1) + b2 with cross-entropy; parameters flat as W1, b1, W2, b2, row by row."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        self.inputs, self.hidden, self.classes = inputs, hidden, classes

    @property
    def dimension(self) -> int:
        return self.hidden * (self.inputs + 1) + self.classes * (self.hidden + 1)

    def unpack(self, theta):
        sizes = [self.hidden * self.inputs, self.hidden, self.classes * self.hidden, self.classes]
        w1, b1, w2, b2 = np.split(theta, np.cumsum(sizes)[:-1])
        return w1.reshape(self.hidden, self.inputs), b1, w2.reshape(self.classes, self.hidden), b2

    def gradient(self, theta, x, label):
        """The gradient of one sample's loss, d numbers."""
        w1, b1, w2, b2 = self.unpack(theta)
        h = np.tanh(w1 @ x + b1)
        logits = w2 @ h + b2
        p = np.exp(logits - logits.max())
        p /= p.sum()
        d_logits = p.copy()
        d_logits[label] -= 1.0
        d_hidden = (w2.T @ d_logits) * (1 - h**2)
        parts = [np.outer(d_hidden, x), d_hidden, np.outer(d_logits, h), d_logits]
        return np.concatenate([part.ravel() for part in parts])


CLIP_MARGIN = 1e-3
"""The one place the oracles are not literal: the library aims its clip this far below C, against rounding."""


def clipped(g, bound):
    """g * min(1, C/||g||)."""
    norm, aim = np.sqrt((g**2).sum()), bound / (1 + CLIP_MARGIN)
    return g if norm <= aim else g * (aim / norm)


def top_k(values, k):
    """The k indices of largest value; ties to the lower index."""
    ranked = sorted(range(len(values)), key=lambda p: (-values[p], p))
    return sorted(ranked[:k])
