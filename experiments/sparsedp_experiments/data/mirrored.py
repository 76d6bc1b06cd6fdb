"""Pictures with their mirror images: two rows of one unit, whose gradients are averaged before the clip."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsedp_experiments.data.bundle import DataBundle, Split
from sparsedp_experiments.data.features import Features


@dataclass(frozen=True, slots=True, eq=False)
class Mirrored:
    """Some pictures, then the same ones with left and right exchanged; with `rows`, only those, in that order."""

    pictures: Features
    rows: Tensor | None = None

    def __len__(self) -> int:
        return 2 * len(self.pictures) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one picture."""
        return self.pictures.shape

    def batch(self, indices: Tensor) -> Tensor:
        """The rows at these indices; without a selection the second half are the mirror images."""
        numbers = indices if self.rows is None else self.rows[indices]
        found = self.pictures.batch(numbers % len(self.pictures))
        turned = (numbers >= len(self.pictures)).view(-1, *[1] * len(self.shape))
        return torch.where(turned, found.flip(-1), found)

    def select(self, indices: Tensor) -> Mirrored:
        """These rows as features of their own."""
        return Mirrored(self.pictures, indices if self.rows is None else self.rows[indices])


def mirrored(bundle: DataBundle) -> DataBundle:
    """The training pictures with their mirror images, both one unit; the test set stays as it is.

    Train with `rows_per_unit=2`: the mean of the two gradients is clipped once, so that augmentation costs no privacy
    (De et al. 2022). With fewer rows one of the two is drawn.
    """
    train = bundle.train
    rows = torch.arange(len(train))
    units = rows if train.units is None else train.units
    doubled = Split(
        Mirrored(train.features), torch.cat([train.targets, train.targets]), torch.cat([units, units])
    )
    return replace(
        bundle,
        variant=f"{bundle.variant}, mirrored",
        train=doubled,
        unit="picture" if train.units is None else bundle.unit,
        fingerprint=None if bundle.fingerprint is None else f"{bundle.fingerprint}|mirrored",
    )
