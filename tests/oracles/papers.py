"""The papers' algorithms in NumPy, line by line, on a two-layer network with hand-written per-sample gradients.

No automatic differentiation, nothing of the library but `CLIP_MARGIN`. Noise is given: standard normal numbers, one
row per step. One deliberate difference, as in the library: AdaDPIGU's Alg. 1 scores the *released* gradient, since
scoring the clipped one before noise leaks.
"""

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


def noisy_mean(network, theta, data, batch, m, C, noise, B):
    """(sum of clip_C(m . g) + m . noise) / B: TP-TopK lines 7-10 and 22-24, RS lines 12-18, AdaDPIGU Alg. 1."""
    total = np.zeros(network.dimension)
    for i in batch:
        total += clipped(m * network.gradient(theta, data[0][i], data[1][i]), C)
    return (total + m * noise) / B


def energy_score(g, sigma1, C1, B):
    """TP-TopK, lines 11 and 14."""
    return (g**2).sum(axis=0) / len(g) - (sigma1 * C1 / B) ** 2


def coherent_score(g, sigma1, C1, B):
    """Not in the paper: (mean g)^2 less the noise left in the mean."""
    return g.mean(axis=0) ** 2 - (sigma1 * C1 / B) ** 2 / len(g)


def train_tp_topk(
    network, theta, data, batches, noise, *, T1, B, C1, C2, sigma1, sigma2, lr, k, score=energy_score
):  # fmt: skip
    """TP-TopK, Alg. 1."""
    released, history, m = [], [], np.ones(network.dimension)
    for t in range(T1):  # line 5
        g = noisy_mean(network, theta, data, batches[t], m, C1, sigma1 * C1 * noise[t], B)
        theta = theta - lr * g  # line 11
        released.append(g)
        history.append(theta)
    a = score(np.array(released), sigma1, C1, B)
    A = top_k(a, k)  # line 15
    m = np.isin(np.arange(network.dimension), A).astype(float)
    for t in range(T1, len(batches)):  # line 19
        g = noisy_mean(network, theta, data, batches[t], m, C2, sigma2 * C2 * noise[t], B)
        theta = theta - lr * g  # line 25
        history.append(theta)
    return {"scores": a, "support": A, "history": np.array(history)}


def cooling(final_rate, n, masks):
    """r(e) = r* e/(E-1), counted in masks when an epoch has several."""
    return final_rate * n / (masks - 1)


def kept(d, rate):
    """||m||_1 = d (1 - r(e)); the tests choose d and r so that it is whole."""
    count = round(d * (1 - rate))
    assert abs(count - d * (1 - rate)) < 1e-9
    return count


def train_random(
    network, w, data, batches, private_noise, orders, *, E, final_rate, B, lr, momentum, clip, sigma, refresh
):  # fmt: skip
    """RS, Alg. 1, and its code's `refresh` masks an epoch. `orders[n]` is the random order of the n-th mask."""
    d, steps = network.dimension, len(batches) // E
    v, history, masks = np.zeros(d), [], []
    for step, batch in enumerate(batches):
        if step % steps % (steps // refresh) == 0:
            n = step // steps * refresh + step % steps // (steps // refresh)
            m = np.zeros(d)
            m[orders[n][: kept(d, cooling(final_rate, n, refresh * E))]] = 1.0
        v = momentum * v + noisy_mean(network, w, data, batch, m, clip, sigma * clip * private_noise[step], B)
        w = w - lr * v
        history.append(w)
        masks.append(m)
    return {"history": np.array(history), "masks": np.array(masks)}


def train_ranked(
    network, w, data, batches, private_noise, fresh_noise, *, E, final_rate, B, C, sigma, lr, momentum, energy
):  # fmt: skip
    """RS, Alg. 4; with `energy`, ON-TopK: the same device with TP-TopK's score summed over the epoch."""
    d, steps = network.dimension, len(batches) // E
    v, z, history, masks = np.zeros(d), np.zeros(d), [], []
    for step, batch in enumerate(batches):
        if step % steps == 0:
            removed = d - kept(d, cooling(final_rate, step // steps, E))
            m = np.ones(d)  # line 7
            if step > 0:
                m[np.argsort(z if energy else np.abs(z), kind="stable")[:removed]] = 0.0  # line 9
            z = np.zeros(d)  # line 2, after use
        g = noisy_mean(network, w, data, batch, m, C, C * sigma * private_noise[step], B)
        v = momentum * v + g  # line 20
        w = w - lr * v
        seen = g + (1 - m) * (C * sigma * fresh_noise[step]) / B  # line 22
        z = z + (seen**2 - (C * sigma / B) ** 2 if energy else seen)
        history.append(w)
        masks.append(m)
    return {"history": np.array(history), "masks": np.array(masks)}


def keep_top(z, active, share):
    """Zero all but the largest `share` of the active coordinates (Sec. 4, pruning via top-k selection)."""
    count = max(1, int(np.floor(share * len(active))))
    order = sorted(active, key=lambda j: (-abs(z[j]), j))
    out = np.zeros_like(z)
    out[order[:count]] = z[order[:count]]
    return out


def train_adadpigu(
    network, theta, data, batches, noise, *, T_pre, B, C, sigma_pre, sigma, lr, gamma1, gamma2, mu,
    counts, per_sample_top=None, prune=False,
):  # fmt: skip
    """AdaDPIGU, Alg. 1 and 2. `counts[t]` is floor(r_t d), the number of active coordinates at main step t."""
    X, y = data
    d = network.dimension
    s, history = np.zeros(d), []
    for t in range(T_pre):  # Alg. 1 lines 2-9
        g = noisy_mean(network, theta, data, batches[t], np.ones(d), C, C * sigma_pre * noise[t], B)
        theta = theta - lr * g
        s += np.abs(g) / T_pre
        history.append(theta)
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
