"""Who takes part in a round: every client by its own coin."""

from __future__ import annotations

import numpy as np

from sparsedp.randomness import PrivateRandomness


def pick(clients: int, sampling_rate: float, randomness: PrivateRandomness, step: int) -> tuple[int, ...]:
    """The numbers of the clients that take part; there may be none. Private.

    **Privacy.** Each client is picked independently with exactly the probability that the ledger is charged for.
    """
    coins = randomness.bernoulli(sampling_rate, clients, key=(step,))
    return tuple(int(number) for number in np.flatnonzero(coins))
