"""The scattering transform of images (Bruna and Mallat 2013): two scales, eight angles, two orders, in PyTorch.

Each input channel gives 81 maps at a quarter of the resolution: the blurred image, 16 blurred moduli of its wavelet
transform, and 64 blurred moduli of the finer eight's own. Equal to Kymatio's `Scattering2D(J=2)` to float precision.

**Privacy.** A fixed function of one image: it costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsedp.errors import DataError
from sparsedp_experiments.data.wavelets import ANGLES, BORDER, low_pass, morlet

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
        self._fine = _twice(torch.from_numpy(fine).float())
        self._coarse = _twice(torch.from_numpy(_aliases(coarse) / 4).float())
        self._blur_full = torch.from_numpy(low_pass(self._padded, 0)).float()
        self._blur_half = torch.from_numpy(low_pass(self._padded, 1)).float()

    def __call__(self, images: Tensor) -> Tensor:
        """The scattering maps of each image."""
        if images.dim() != 4 or images.shape[2:] != (self.size, self.size):
            raise DataError(
                f"scattering: got images of shape {tuple(images.shape)}, "
                f"expected [N, channels, {self.size}, {self.size}]"
            )
        count, channels = images.shape[:2]
        flat = images.to(torch.float32).reshape(-1, 1, self.size, self.size)
        out = torch.empty(len(flat), MAPS, self.output_size**2)
        step = _CHUNK * torch.get_num_threads()
        work = _Workspace.of(min(step, len(flat)), self._padded)
        for start in range(0, len(flat), step):
            chunk = flat[start : start + step]
            self._transform(chunk, work.first(len(chunk)), out[start : start + step])
        return out.reshape(count, channels * MAPS, self.output_size, self.output_size)

    def _transform(self, images: Tensor, work: _Workspace, out: Tensor) -> None:
        """Orders zero, one and two of a few grey images, into `out` [n, 81, pixels]."""
        padded = functional.pad(images, (BORDER,) * 4, mode="reflect")
        out[:, :1] = padded.flatten(2) @ self._blur_full
        spectrum = torch.fft.fft2(padded, out=work.image_spectrum)
        fine = self._fine_moduli(spectrum, work.fine)
        out[:, 1 : 1 + ANGLES] = fine.flatten(2) @ self._blur_full
        first = self._coarse_moduli(spectrum, work.coarse.first(len(images)))
        out[:, 1 + ANGLES : 1 + 2 * ANGLES] = first.flatten(2) @ self._blur_half
        fine_spectrum = torch.fft.fft2(fine, out=work.fine.waves).flatten(0, 1).unsqueeze(1)
        second = self._coarse_moduli(fine_spectrum, work.coarse)
        out[:, 1 + 2 * ANGLES :] = (second.flatten(2) @ self._blur_half).reshape(len(images), ANGLES**2, -1)

    def _fine_moduli(self, spectrum: Tensor, maps: _Maps) -> Tensor:
        """Moduli of the fine wavelet transform at full resolution: [n, 8, size, size] of a spectrum [n, 1, ...]."""
        torch.mul(torch.view_as_real(spectrum), self._fine, out=torch.view_as_real(maps.spectrum))
        return maps.modulus()

    def _coarse_moduli(self, spectrum: Tensor, maps: _Maps) -> Tensor:
        """Moduli of the coarse wavelet transform at half resolution: [n, 8, half, half] of a spectrum [n, 1, ...].

        Sampling every second pixel is adding up the four aliases in the Fourier domain.
        """
        aliases = torch.view_as_real(spectrum).reshape(len(spectrum), 1, 2, self._half, 2, self._half, 2)
        total = torch.view_as_real(maps.spectrum)
        torch.mul(aliases[:, :, 0, :, 0], self._coarse[0, 0], out=total)
        for down, right in ((0, 1), (1, 0), (1, 1)):
            total.addcmul_(aliases[:, :, down, :, right], self._coarse[down, right])
        return maps.modulus()


@dataclass(frozen=True, slots=True, eq=False)
class _Maps:
    """Room for eight complex maps of each of n images, reused: fresh memory each time costs as much as the sums."""

    spectrum: Tensor
    waves: Tensor
    moduli: Tensor

    @classmethod
    def of(cls, count: int, size: int) -> _Maps:
        shape = (count, ANGLES, size, size)
        return cls(
            torch.empty(shape, dtype=torch.complex64),
            torch.empty(shape, dtype=torch.complex64),
            torch.empty(shape),
        )

    def first(self, count: int) -> _Maps:
        return _Maps(self.spectrum[:count], self.waves[:count], self.moduli[:count])

    def modulus(self) -> Tensor:
        """Absolute values of the inverse Fourier transform of the spectrum."""
        torch.fft.ifft2(self.spectrum, out=self.waves)
        parts = torch.view_as_real(self.waves)
        parts.mul_(parts)
        return torch.add(parts[..., 0], parts[..., 1], out=self.moduli).sqrt_()


@dataclass(frozen=True, slots=True, eq=False)
class _Workspace:
    """Room for a chunk of images."""

    image_spectrum: Tensor
    fine: _Maps
    coarse: _Maps

    @classmethod
    def of(cls, count: int, padded: int) -> _Workspace:
        spectrum = torch.empty(count, 1, padded, padded, dtype=torch.complex64)
        return cls(spectrum, _Maps.of(count, padded), _Maps.of(count * ANGLES, padded // 2))

    def first(self, count: int) -> _Workspace:
        return _Workspace(
            self.image_spectrum[:count], self.fine.first(count), self.coarse.first(count * ANGLES)
        )


def _twice(real: Tensor) -> Tensor:
    """Each number twice, to multiply real and imaginary parts without broadcasting, which is several times slower."""
    return real.unsqueeze(-1).expand(*real.shape, 2).contiguous()


def _aliases(filters: np.ndarray) -> np.ndarray:
    """Filters [angles, size, size] cut into the quarters that fold onto each other: [2, 2, angles, half, half]."""
    angles, size, _ = filters.shape
    return filters.reshape(angles, 2, size // 2, 2, size // 2).transpose(1, 3, 0, 2, 4)
