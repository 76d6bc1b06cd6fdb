"""Data-independent features of pictures, computed once and kept on disk: scattering, and a pretrained network's.

The scattering transform (Bruna and Mallat 2013) has two scales, eight angles and two orders. Its filters are sampled
as in Kymatio (Andreux et al. 2020), down to its value of pi in the normalisation. Each input channel gives 81 maps at
a quarter of the resolution. Features are kept as half floats in a file that is mapped into memory.

**Privacy.** A fixed public function of one record: it costs no privacy. The cached file holds the records' features.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle, Dense, Split, mirrored
from sparsedp_experiments.data.files import cache_path, replaced, shown
from sparsedp_experiments.models.pretrained import LITE0, BlockMoments, parts_before, pretrained

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


MAPS = 1 + 2 * ANGLES + ANGLES**2
"""Maps per input channel: 81."""

_CHUNK = 16
"""Images per thread at a time: what fits the cache."""


@final
class Scattering:
    """The transform for square images of one size, a multiple of four.

    Call it with images [N, channels, size, size]; it returns [N, 81 * channels, size/4, size/4].
    """

    def __init__(self, size: int) -> None:
        if size % BORDER or size < 2 * BORDER:
            raise DataError(
                f"scattering: got images of {size} pixels, expected a multiple of {BORDER} from {2 * BORDER}"
            )
        self.size = size
        self.output_size = size // BORDER
        self._padded = size + 2 * BORDER
        self._half = self._padded // 2
        fine = np.stack([morlet(self._padded, 0, angle) for angle in range(ANGLES)])
        coarse = np.stack([morlet(self._padded, 1, angle) for angle in range(ANGLES)])
        self._fine = torch.from_numpy(fine).float()
        self._coarse = torch.from_numpy(_aliases(coarse) / 4).float()
        self._blur_full = torch.from_numpy(low_pass(self._padded, 0)).float()
        self._blur_half = torch.from_numpy(low_pass(self._padded, 1)).float()

    def __call__(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[2:] != (self.size, self.size):
            raise DataError(
                f"scattering: got images of shape {tuple(images.shape)}, "
                f"expected [N, channels, {self.size}, {self.size}]"
            )
        flat = images.to(torch.float32).reshape(-1, 1, self.size, self.size)
        parts = [self._transform(part) for part in flat.split(_CHUNK * torch.get_num_threads())]
        out = self.output_size
        return torch.cat(parts).reshape(len(images), images.shape[1] * MAPS, out, out)

    def _transform(self, images: Tensor) -> Tensor:
        """Orders zero, one and two of a few grey images: [n, 81, pixels]."""
        padded = functional.pad(images, (BORDER,) * 4, mode="reflect")
        spectrum = torch.fft.fft2(padded)
        fine = torch.fft.ifft2(spectrum * self._fine).abs()
        of_fine = self._coarse_moduli(torch.fft.fft2(fine).flatten(0, 1).unsqueeze(1))
        orders = [
            padded.flatten(2) @ self._blur_full,
            fine.flatten(2) @ self._blur_full,
            self._coarse_moduli(spectrum).flatten(2) @ self._blur_half,
            (of_fine.flatten(2) @ self._blur_half).reshape(len(images), ANGLES**2, -1),
        ]
        return torch.cat(orders, dim=1)

    def _coarse_moduli(self, spectrum: Tensor) -> Tensor:
        """Moduli of the coarse wavelet transform at half resolution: [n, 8, half, half] of a spectrum [n, 1, ...].

        Sampling every second pixel is adding up the four aliases in the Fourier domain.
        """
        aliases = spectrum.reshape(len(spectrum), 1, 2, self._half, 2, self._half)
        quarters = [(down, right) for down in (0, 1) for right in (0, 1)]
        parts = [aliases[:, :, down, :, right] * self._coarse[down, right] for down, right in quarters]
        moduli: Tensor = torch.fft.ifft2(parts[0] + parts[1] + parts[2] + parts[3]).abs()
        return moduli


def _aliases(filters: np.ndarray) -> np.ndarray:
    """Filters [angles, size, size] cut into the quarters that fold onto each other: [2, 2, angles, half, half]."""
    angles, size, _ = filters.shape
    return filters.reshape(angles, 2, size // 2, 2, size // 2).transpose(1, 3, 0, 2, 4)


logger = logging.getLogger(__name__)

STEP = 512
"""Records computed at once."""

Compute = Callable[[Tensor], Tensor]
"""The features of the records at some indices."""


def with_features(
    bundle: DataBundle,
    compute: Callable[[Split, str], Compute],
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    *,
    key: str | None,
    title: str,
) -> DataBundle:
    """A bundle with features in place of its inputs, on both sides; see `kept_features`.

    `compute` gives, for the records of a side and its name, what makes their features; `shape` is that of one record.
    `key`, what the features depend on besides the side, is the new bundle's fingerprint.
    """

    def featurize(split: Split, side: str) -> Split:
        values = kept_features(
            compute(split, side),
            (len(split), *shape),
            dtype,
            None if key is None else f"{key}|{side}|{len(split)}",
            f"{title}, {side}",
        )
        return replace(split, features=Dense(values))

    return replace(
        bundle, train=featurize(bundle.train, "train"), test=featurize(bundle.test, "test"), fingerprint=key
    )


def kept_features(
    compute: Compute, shape: tuple[int, ...], dtype: npt.DTypeLike, key: str | None, title: str
) -> Tensor:
    """Features of all `shape[0]` records, from the file of what they depend on (`key`) or computed into it.

    They stay in memory without a key, or where there can be no file.
    """

    def filled(room: npt.NDArray[Any]) -> npt.NDArray[Any]:
        for start in shown(range(0, len(room), STEP), title):
            stop = min(start + STEP, len(room))
            room[start:stop] = compute(torch.arange(start, stop)).numpy()
        return room

    if key is None:
        return torch.from_numpy(filled(np.empty(shape, dtype=dtype)))
    path = cache_path(key, ".npy")
    values = _mapped(path, shape, dtype)
    if values is None:
        try:
            with replaced(path) as partial:
                room = np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
                filled(room)
                room.flush()
            values = _mapped(path, shape, dtype)
        except OSError as error:
            logger.warning("features cannot be kept in %s (%s): they stay in memory", path, error)
    return torch.from_numpy(filled(np.empty(shape, dtype=dtype)) if values is None else values)


def _mapped(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
    """The file mapped into memory (changes stay private), or None when it is not there or not what it should be."""
    try:
        values: npt.NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        logger.warning("cache file %s cannot be read (%s): made again", path, error)
        return None
    return values if (values.dtype, values.shape) == (np.dtype(dtype), shape) else None


_SCATTERING_VERSION = 1


def scattering_bundle(bundle: DataBundle, groups: int | None = 27, mirror: bool = False) -> DataBundle:
    """Scattering features of a data set of square images, normalised within each sample.

    `groups` is the number of channel groups of a GroupNorm without parameters (27 in Tramèr and Boneh's Fashion-MNIST
    setting); None or 0 keeps the raw features. With `mirror` every training picture has its mirror image as a second
    row; see `mirrored`. Cached on disk when the bundle came from files.
    **Privacy.** Each record's features depend on that record alone: no privacy cost. The cached file holds them.
    """
    shape = bundle.input_shape
    if len(shape) != 3 or shape[1] != shape[2]:
        raise DataError(f"scattering: {bundle.name} has inputs of shape {shape}, expected square images")
    groups = groups or None
    if groups is not None and (groups < 1 or (shape[0] * MAPS) % groups):
        raise DataError(f"scattering: {shape[0] * MAPS} channels cannot be split into {groups} groups")
    bundle = mirrored(bundle) if mirror else bundle
    transform = Scattering(shape[1])
    normal = "raw" if groups is None else f"GroupNorm({groups})"
    key = (
        None
        if bundle.fingerprint is None
        else f"{bundle.fingerprint}|scattering {_SCATTERING_VERSION}|{normal}"
    )

    side = transform.output_size
    found = with_features(
        bundle,
        lambda split, _: _scattering_of(split, transform, groups),
        (shape[0] * MAPS, side, side),
        np.float16,
        key=key,
        title=f"scattering features of {bundle.name}",
    )
    return replace(found, variant=f"{bundle.variant}, scattering J=2 L=8 order 2, {normal}")


def _scattering_of(split: Split, transform: Scattering, groups: int | None) -> Compute:
    """The features of the records at some indices."""

    def features(indices: Tensor) -> Tensor:
        found = transform(split.features.batch(indices))
        return found if groups is None else functional.group_norm(found, groups)

    return features


_LITE0_VERSION = 1
_BLOCKS = "blocks"
"""A cut that is no part: features of all blocks together."""
_AT_ONCE = 16
"""Pictures: their activations then fit into the processor's cache, which at 224 pixels takes half the time of 64."""


def lite0_bundle(bundle: DataBundle, resize: int = 96, cut: str = "head") -> DataBundle:
    """What EfficientNet-Lite0, pretrained on ImageNet, hands to its part `cut`, for pictures resized to `resize`.

    With `cut="blocks"` it is the mean and the spread of every map of all its blocks; see `BlockMoments`.

    **Privacy.** The network is public and each record's features depend on that record alone: no privacy cost.
    """
    if len(bundle.input_shape) != 3:
        raise DataError(f"lite0: {bundle.name} has inputs of shape {bundle.input_shape}, expected images")
    network = pretrained(classes=2, size=resize)
    below = (BlockMoments(network) if cut == _BLOCKS else parts_before(network, cut)).eval()
    below.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        shape = tuple(below(torch.zeros(1, *bundle.input_shape)).shape[1:])
    told = f"{resize} px, " + ("moments of every block" if cut == _BLOCKS else f"before {cut!r}")
    key = None if bundle.fingerprint is None else f"{bundle.fingerprint}|lite0 {_LITE0_VERSION}|{told}"

    found = with_features(
        bundle,
        lambda split, _: _network_features(below, split),
        shape,
        np.float32,
        key=key,
        title=f"Lite0 features of {bundle.name}",
    )
    return replace(
        found, variant=f"{bundle.variant}, {LITE0.name} features, {told}", notes=(*bundle.notes, str(LITE0))
    )


def _network_features(below: nn.Module, split: Split) -> Compute:
    def features(indices: Tensor) -> Tensor:
        with torch.no_grad():
            pictures = [split.features.batch(part) for part in torch.split(indices, _AT_ONCE)]
            return torch.cat([below(part).contiguous() for part in pictures])

    return features
