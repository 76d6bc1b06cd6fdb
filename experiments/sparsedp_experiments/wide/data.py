"""Wide data whose causes are known: independent features, correlated blocks, and genotypes from msprime.

Every feature has mean 0 and variance 1/d, by public numbers, so that a record has length about 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TEST = 5_000
"""Records of the test set."""
LOGITS = 4.0
"""The standard deviation of the log-odds of independent features: Bayes accuracy about 0.877."""
HERITABILITY = 0.5
"""The share of a liability's variance that its causes explain."""
BLOCK, CORRELATION = 50, 0.9
"""Sites of a block, and the correlation of neighbours on a chromosome."""


@dataclass(frozen=True, slots=True, eq=False)
class WideData:
    """Training and test records, which features are causes, and the best score anybody could give a test record."""

    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    test_x: Tensor = field(repr=False)
    test_y: Tensor = field(repr=False)
    causes: Tensor = field(repr=False)
    best: Tensor = field(repr=False)


def independent(records: int, features: int, causes: int, seed: int) -> WideData:
    """Normal features; the log-odds are a sum of a few of them, with weights of size 1 to 2 and random sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records + TEST, features, generator=generator)
    weights, chosen = torch.zeros(features), torch.randperm(features, generator=generator)[:causes]
    signs = torch.randn(causes, generator=generator).sign()
    weights[chosen] = signs * (1 + torch.rand(causes, generator=generator))
    logits = x @ weights
    logits *= LOGITS / logits.std()
    y = (torch.rand(len(logits), generator=generator) < torch.sigmoid(logits)).float()
    return _split(x, y, chosen, logits, records)


def blocks(records: int, features: int, causes: int, seed: int) -> WideData:
    """Genotypes of common sites in blocks of correlated neighbours (first order autoregression), and a liability."""
    generator = torch.Generator().manual_seed(seed)
    frequency = 0.05 + 0.45 * torch.rand(features, generator=generator)
    threshold = torch.distributions.Normal(0, 1).icdf(frequency)
    counts = torch.zeros(records + TEST, features)
    for _ in range(2):
        for start in range(0, features, BLOCK):
            width = min(BLOCK, features - start)
            z = torch.randn(len(counts), width, generator=generator)
            for j in range(1, width):
                z[:, j] = CORRELATION * z[:, j - 1] + math.sqrt(1 - CORRELATION**2) * z[:, j]
            part = slice(start, start + width)
            counts[:, part] += (z < threshold[part]).float()
    return _cases(counts, frequency, records, causes, generator)


def msprime_genotypes(
    records: int, features: int, causes: int, seed: int, folder: Path | None = None
) -> WideData:
    """Diploid genotypes of a human-like population by coalescent simulation, and a liability.

    Regions of 300 kb with recombination and mutation at human rates; common sites (frequency 5 to 95 % in a public
    panel of 2,000 other people), evenly thinned. The panel also gives the frequencies that scale the features.
    """
    file = None if folder is None else folder / f"msprime-{seed}-{records}-{features}.npy"
    if file is None or not file.exists():
        counts = _coalescent(records + TEST + PANEL, features, seed)
        if file is not None:
            np.save(file, counts)
    else:
        counts = np.load(file)
    panel = torch.from_numpy(counts[-PANEL:]).float()
    people = torch.from_numpy(counts[:-PANEL]).float()
    return _cases(people, panel.mean(0) / 2, records, causes, torch.Generator().manual_seed(seed))


PANEL, REGION = 2_000, 300_000


def _coalescent(people: int, features: int, seed: int) -> np.ndarray:
    import msprime  # of the extra "wide"

    found: list[np.ndarray] = []
    region, count = 0, 0
    while count < features:
        region += 1
        draw = seed * 1000 + region
        tree = msprime.sim_ancestry(
            people, sequence_length=REGION, recombination_rate=1e-8, population_size=1e4, random_seed=draw
        )
        tree = msprime.sim_mutations(
            tree, rate=1.25e-8, random_seed=draw, model=msprime.BinaryMutationModel()
        )
        sites = []
        for variant in tree.variants():
            diploid = (variant.genotypes[0::2] + variant.genotypes[1::2]).astype(np.int8)
            if 0.05 <= diploid[-PANEL:].mean() / 2 <= 0.95:
                sites.append(diploid)
        kept = np.linspace(0, len(sites) - 1, min(len(sites), 250, features - count)).astype(int)
        found.append(np.stack([sites[i] for i in kept]))
        count += len(kept)
    return np.ascontiguousarray(np.concatenate(found).T)


def _cases(
    counts: Tensor, frequency: Tensor, records: int, causes: int, generator: torch.Generator
) -> WideData:
    """Standardized by public frequencies; half the people, those of larger liability, are cases."""
    x = counts.sub_(2 * frequency).div_((2 * frequency * (1 - frequency)).sqrt())
    chosen = torch.randperm(x.shape[1], generator=generator)[:causes]
    signal = x[:, chosen] @ torch.randn(causes, generator=generator)
    noise = torch.randn(len(x), generator=generator)
    liability = signal / signal.std() * HERITABILITY**0.5 + (1 - HERITABILITY) ** 0.5 * noise
    return _split(x, (liability > liability.median()).float(), chosen, signal, records)


def _split(x: Tensor, y: Tensor, causes: Tensor, best: Tensor, records: int) -> WideData:
    x.div_(math.sqrt(x.shape[1]))
    return WideData(x[:records], y[:records], x[records:], y[records:], causes, best[records:])


GENERATORS: dict[str, Callable[..., WideData]] = {
    "independent": independent,
    "blocks": blocks,
    "msprime": msprime_genotypes,
}
