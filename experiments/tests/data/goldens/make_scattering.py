"""Writes scattering.npz: a few made-up images and their features as computed by Kymatio.

Run in an environment of its own, with `kymatio==0.3.0`, `numpy` and `scipy<1.17`:

    python make_scattering.py
"""

from pathlib import Path

import numpy as np
from kymatio.numpy import Scattering2D


def images(size, channels, seed):
    """Noise, a blurred stroke and an edge: every frequency and orientation is in there."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] / size
    stroke = np.exp(-((x - y**2) ** 2) * 60)
    edge = (x + 0.3 * y > 0.6).astype(np.float64)
    noise = rng.random((channels, size, size))
    mixed = 0.5 * stroke + 0.3 * edge + 0.2 * noise
    return np.stack([noise, mixed]).astype(np.float32)


def main():
    """One grey and one colour size, as MNIST and CIFAR-10 have them."""
    arrays = {}
    for name, size, channels in (("grey", 28, 1), ("colour", 32, 3)):
        arrays[f"{name}_images"] = images(size, channels, seed=size)
        features = Scattering2D(J=2, shape=(size, size))(arrays[f"{name}_images"])
        arrays[f"{name}_features"] = features.reshape(2, -1, size // 4, size // 4).astype(np.float32)
    np.savez_compressed(Path(__file__).parent / "scattering.npz", **arrays)


if __name__ == "__main__":
    main()
