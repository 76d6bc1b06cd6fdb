"""Random sparsification, Algorithms 1 to 4, from the paper's pseudo-code (and its code's --refresh).

`private_noise` and `fresh_noise` hold standard normal numbers, one row per step; `orders[n]` is the random order of
the n-th mask: a mask keeps the first of it.
"""

import numpy as np

from oracles.network import clipped


def cooling(final_rate, n, masks):
    """r(e) = r* e/(E-1), counted in masks when an epoch has several."""
    return final_rate * n / (masks - 1)


def kept(d, rate):
    """||m||_1 = d (1 - r(e)); the tests choose d and r so that it is whole."""
    count = round(d * (1 - rate))
    assert abs(count - d * (1 - rate)) < 1e-9
    return count


def random_mask(order, count):
    m = np.zeros(len(order))
    m[np.asarray(order)[:count]] = 1.0
    return m


def ranked_mask(z, removed):
    """Sort |z| in ascending order, set the first `removed` to 0 and the rest to 1 (Alg. 4 line 9)."""
    m = np.ones(len(z))
    m[np.argsort(np.abs(z), kind="stable")[:removed]] = 0.0
    return m


def train_random(
    network,
    w,
    data,
    batches,
    private_noise,
    orders,
    *,
    E,
    final_rate,
    B,
    lr,
    momentum,
    clip=None,
    sigma,
    refresh=1,
):
    """Alg. 1 with a clip and noise sigma*clip; Alg. 2 without a clip and noise sigma; Alg. 3 with sigma = 0."""
    X, y = data
    d, w = network.dimension, w.copy()
    steps = len(batches) // E
    v = np.zeros(d)
    history, masks = [], []
    for e in range(E):
        for t in range(steps):
            if t % (steps // refresh) == 0:
                n = e * refresh + t // (steps // refresh)
                m = random_mask(orders[n], kept(d, cooling(final_rate, n, refresh * E)))
            step = e * steps + t
            total = np.zeros(d)
            for i in batches[step]:
                g = m * network.gradient(w, X[i], y[i])
                total += g if clip is None else clipped(g, clip)
            scale = sigma if clip is None else sigma * clip
            g_tilde = (total + m * (scale * private_noise[step])) / B
            v = momentum * v + g_tilde
            w = w - lr * v
            history.append(w.copy())
            masks.append(m.copy())
    return {"history": np.array(history), "masks": np.array(masks)}


def train_ranked(
    network,
    w,
    data,
    batches,
    private_noise,
    fresh_noise,
    *,
    E,
    final_rate,
    B,
    C,
    sigma,
    lr,
    momentum,
    energy=False,
):
    """Alg. 4; with `energy`, ON-TopK: the same device with TP-TopK's score summed over the epoch."""
    X, y = data
    d, w = network.dimension, w.copy()
    steps = len(batches) // E
    v = np.zeros(d)
    z = np.zeros(d)
    history, masks = [], []
    for e in range(E):
        removed = d - kept(d, cooling(final_rate, e, E))
        if e == 0:
            m = np.ones(d)  # line 7
        elif energy:
            m = np.ones(d)
            m[np.argsort(z, kind="stable")[:removed]] = 0.0
        else:
            m = ranked_mask(z, removed)  # line 9
        z = np.zeros(d)  # line 2, after use
        for t in range(steps):
            step = e * steps + t
            total = np.zeros(d)
            for i in batches[step]:
                total += clipped(m * network.gradient(w, X[i], y[i]), C)  # lines 12-16
            g = (total + m * (C * sigma * private_noise[step])) / B  # line 18
            v = momentum * v + g  # line 20
            w = w - lr * v
            seen = g + (1 - m) * (C * sigma * fresh_noise[step]) / B  # line 22
            z = z + (seen**2 - (C * sigma / B) ** 2 if energy else seen)
            history.append(w.copy())
            masks.append(m.copy())
    return {"history": np.array(history), "masks": np.array(masks)}
