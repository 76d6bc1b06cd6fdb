"""TP-TopK, Algorithm 1, line by line from the paper. `noise` holds standard normal numbers, one row per step."""

import numpy as np

from oracles.network import clipped, top_k


def energy_score(g, sigma1, C1, B):
    """Lines 11 and 14."""
    return (g**2).sum(axis=0) / len(g) - (sigma1 * C1 / B) ** 2


def coherent_score(g, sigma1, C1, B):
    """Not in the paper: (mean g)^2 less the noise left in the mean."""
    return g.mean(axis=0) ** 2 - (sigma1 * C1 / B) ** 2 / len(g)


def train(network, theta, data, batches, noise, *, T1, B, C1, C2, sigma1, sigma2, lr, k, score=energy_score):
    X, y = data
    theta = theta.copy()
    released, history = [], []
    for t in range(T1):  # line 5
        total = np.zeros(network.dimension)
        for i in batches[t]:  # lines 7-9
            total += clipped(network.gradient(theta, X[i], y[i]), C1)
        g = (total + sigma1 * C1 * noise[t]) / B  # line 10
        theta = theta - lr * g  # line 11
        released.append(g)
        history.append(theta.copy())
    a = score(np.array(released), sigma1, C1, B)
    A = top_k(a, k)  # line 15
    m = np.zeros(network.dimension)
    m[A] = 1.0
    for t in range(T1, len(batches)):  # line 19
        total = np.zeros(network.dimension)
        for i in batches[t]:  # line 22
            total += clipped(m * network.gradient(theta, X[i], y[i]), C2)
        g = (total + m * (sigma2 * C2 * noise[t])) / B  # line 24
        theta = theta - lr * g  # line 25
        history.append(theta.copy())
    return {"scores": a, "support": A, "history": np.array(history)}
