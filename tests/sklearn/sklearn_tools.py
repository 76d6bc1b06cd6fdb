"""What the tests of the scikit-learn classifier share: a small table and a quick classifier."""

import numpy as np
import torch

from sparsedp.sklearn import SparseDPClassifier


def table(rows=80, features=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, size=(rows, features))
    return X, (X[:, 0] > 0).astype(int)


def classifier(**changes):
    given = {"classes": [0, 1], "epochs": 3, "batch_size": 16, "random_state": 0, "bounds": (-1, 1)}
    if changes.get("columns") is not None:
        del given["bounds"]
    return SparseDPClassifier(**(given | changes))


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.model_.parameters()]).numpy()
