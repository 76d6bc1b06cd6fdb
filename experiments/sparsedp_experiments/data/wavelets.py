"""The filters of the scattering transform: oriented Morlet wavelets and a Gaussian low pass.

Sampled as in Kymatio (Andreux et al. 2020), down to its value of pi in the normalisation, so that features agree with
those of papers that used it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

ANGLES = 8
SCALES = 2
BORDER = 2**SCALES
"""Pixels of reflected border on each side; also the step of the output grid."""

_BANDWIDTH = 0.8
_FREQUENCY = 3 * math.pi / 4
_SLANT = 4 / ANGLES
_PI_IN_NORMALISATION = 3.1415
_WRAPS = range(-2, 3)

Real = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]


def morlet(size: int, scale: int, angle: int) -> Real:
    """Fourier transform (real) of the Morlet wavelet of a scale and an angle index, on a periodic square grid."""
    bandwidth = _BANDWIDTH * 2**scale
    theta = (ANGLES // 2 - 1 - angle) * math.pi / ANGLES
    wave = _gabor(size, bandwidth, theta, _FREQUENCY / 2**scale)
    envelope = _gabor(size, bandwidth, theta, 0.0)
    zero_mean = wave - wave.sum() / envelope.sum() * envelope
    return np.fft.fft2(zero_mean).real


def _gabor(size: int, bandwidth: float, theta: float, frequency: float) -> Complex:
    """Gaussian envelope times plane wave, summed over periods."""
    cos, sin = math.cos(theta), math.sin(theta)
    total = np.zeros((size, size), dtype=np.complex128)
    for down in _WRAPS:
        for right in _WRAPS:
            y, x = np.mgrid[down * size : (down + 1) * size, right * size : (right + 1) * size]
            along, across = y * cos + x * sin, -y * sin + x * cos
            envelope = (along**2 + _SLANT**2 * across**2) / (2 * bandwidth**2)
            total += np.exp(-envelope + 1j * frequency * along)
    return total * (_SLANT / (2 * _PI_IN_NORMALISATION * bandwidth**2))


def low_pass(size: int, resolution: int) -> Real:
    """Matrix [pixels of a map, pixels of the output] that blurs a map, samples it and cuts off the border.

    The map has been sampled `resolution` times by two already, out of a padded image of `size`.
    """
    axis = _low_pass_axis(size, resolution)
    return np.asarray(np.kron(axis, axis).T, dtype=np.float64)


def _low_pass_axis(size: int, resolution: int) -> Real:
    """The same along one axis, [output, pixels]: the Gaussian is the product of two."""
    bandwidth = _BANDWIDTH * 2 ** (SCALES - 1)
    positions = np.arange(size)[None, :] + size * np.array(_WRAPS)[:, None]
    gaussian = np.exp(-(positions**2) / (2 * bandwidth**2)).sum(axis=0)
    spectrum = np.fft.fft(gaussian / math.sqrt(2 * _PI_IN_NORMALISATION * bandwidth**2)).real
    coarse = size >> resolution
    if resolution:
        spectrum[coarse // 2 : size - coarse // 2] = 0
        spectrum = spectrum.reshape(2**resolution, coarse).sum(axis=0)
    kernel = np.fft.ifft(spectrum).real
    step = BORDER >> resolution
    outputs = np.arange(step, coarse - step, step)
    return kernel[(outputs[:, None] - np.arange(coarse)[None, :]) % coarse]
