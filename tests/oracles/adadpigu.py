"""AdaDPIGU, Algorithms 1 and 2, from the paper, with its text's per-sample top-r and progressive unfreezing.

One deliberate difference, as in the library: Alg. 1 scores the *released* gradient, since scoring the clipped one
before noise leaks. `noise` holds standard normal numbers, one row per step.
"""

import numpy as np

from oracles.network import clipped


def importance(network, theta, data, batches, noise, *, B, C, sigma, lr):
    """Alg. 1 lines 2-9: T_pre steps of DP-SGD and the mean magnitude of each coordinate."""
    X, y = data
    s = np.zeros(network.dimension)
    history = []
    for t, batch in enumerate(batches):
        total = sum(
            (clipped(network.gradient(theta, X[i], y[i]), C) for i in batch), np.zeros(network.dimension)
        )
        g = (total + C * sigma * noise[t]) / B
        theta = theta - lr * g
        s += np.abs(g)
        history.append(theta.copy())
    return theta, s / len(batches), history


def keep_top(z, active, share):
    """Zero all but the largest `share` of the active coordinates (Sec. 4, pruning via top-k selection)."""
    count = max(1, int(np.floor(share * len(active))))
    order = sorted(active, key=lambda j: (-abs(z[j]), j))
    out = np.zeros_like(z)
    out[order[:count]] = z[order[:count]]
    return out


def train(
    network, theta, data, batches, noise, *, T_pre, B, C, sigma_pre, sigma, lr, gamma1, gamma2, mu,
    counts, per_sample_top=None, prune=False,
):  # fmt: skip
    """Alg. 2. `counts[t]` is floor(r_t d), the number of active coordinates at main step t."""
    X, y = data
    d = network.dimension
    theta, s, history = importance(
        network, theta.copy(), data, batches[:T_pre], noise[:T_pre], B=B, C=C, sigma=sigma_pre, lr=lr
    )
    ranked = sorted(range(d), key=lambda j: (-s[j], j))  # Alg. 1 line 10
    alpha, beta = np.zeros(d), np.ones(d)
    masks, alphas, betas = [], [], []
    for t in range(len(batches) - T_pre):
        active = sorted(ranked[: counts[t]])
        m = np.zeros(d)
        m[active] = 1.0
        if prune and t == 0:
            theta = m * theta  # line 8: m . theta
        scale = np.sqrt(beta) + mu
        total = np.zeros(d)
        for i in batches[T_pre + t]:
            z = m * (network.gradient(theta, X[i], y[i]) - alpha) / scale  # line 9
            if per_sample_top is not None:
                z = keep_top(z, active, per_sample_top)
            total += clipped(z, C)  # line 10
        g_bar = (total + m * (C * sigma * noise[T_pre + t])) / B  # line 12
        g_hat = m * (g_bar * scale + alpha)  # line 13
        theta = theta - lr * g_hat  # line 14
        new_alpha = gamma1 * alpha + (1 - gamma1) * g_hat  # line 15
        new_beta = gamma2 * beta + (1 - gamma2) * (g_hat - alpha) ** 2
        alpha = np.where(m == 1, new_alpha, alpha)
        beta = np.where(m == 1, new_beta, beta)
        history.append(theta.copy())
        masks.append(m)
        alphas.append(alpha.copy())
        betas.append(beta.copy())
    return {
        "scores": s, "history": np.array(history), "masks": np.array(masks), "alpha": alphas[-1], "beta": betas[-1],
    }  # fmt: skip
