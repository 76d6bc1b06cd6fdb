"""Wide data: independent features, correlated blocks, genotypes from msprime (their causes known), and real sets.

Every made-up feature has mean 0 and variance 1/d, by public numbers, so that an example has length about 1; real
examples have length 1.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import sparse
from torch import Tensor, nn

from sparsedp.errors import DataError
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.data.tables import diabetes130
from sparsedp_experiments.data.text import imdb
from sparsedp_experiments.data.vision import fashion_mnist, mnist

TEST = 5_000
"""Records of the test set."""
LOGITS = 4.0
"""The standard deviation of the log-odds of independent features: Bayes accuracy about 0.877."""
HERITABILITY = 0.5
"""The share of a liability's variance that its causes explain."""
BLOCK, CORRELATION = 50, 0.9
"""Sites of a block, and the correlation of neighbours on a chromosome."""


class Rows:
    """Examples as a dense or a sparse (CSR) matrix."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self.width: int = matrix.shape[1]

    def rows(self, index: Tensor) -> Rows:
        """Some examples."""
        return Rows(self.matrix[index if isinstance(self.matrix, Tensor) else index.numpy()])

    def at(self, columns: Tensor) -> Rows:
        """Some features."""
        return Rows(self.matrix[:, columns])

    def times(self, weights: Tensor) -> Tensor:
        """`X W`."""
        if isinstance(self.matrix, Tensor):
            return self.matrix @ weights
        return torch.from_numpy(self.matrix @ weights.numpy())

    def transposed_times(self, values: Tensor) -> Tensor:
        """`X^T V`."""
        if isinstance(self.matrix, Tensor):
            return self.matrix.T @ values
        return torch.from_numpy(self.matrix.T @ values.numpy())

    def norms(self, mask: Tensor) -> Tensor:
        """The length of each example on each column's support."""
        if isinstance(self.matrix, Tensor):
            return torch.cat([part.square() @ mask for part in self.matrix.split(1024)]).sqrt()
        return torch.from_numpy(np.sqrt(self.matrix.multiply(self.matrix).tocsr() @ mask.numpy()))


@dataclass(frozen=True, slots=True, eq=False)
class WideData:
    """Training and test examples, which features are causes, and the best score anybody could give a test example.

    Of real data nobody knows the causes (none are given) or the best score (zeros).
    """

    x: Rows = field(repr=False)
    y: Tensor = field(repr=False)
    test_x: Rows = field(repr=False)
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
    records: int, features: int, causes: int, seed: int, folder: Path | None = None, each: int = 250
) -> WideData:
    """Diploid genotypes of a human-like population by coalescent simulation, and a liability.

    Regions of 300 kb with recombination and mutation at human rates; of each, so many common sites (frequency 5 to
    95 % in a public panel of 2,000 other people), evenly spaced. The panel also gives the frequencies that scale the
    features. Seeds of one hundred share a population and differ in who is tested, causes and liability.
    """
    population = seed // 100
    file = (folder or Path()) / f"msprime-{population}-{records}-{features}-{each}.npy"
    if folder is None or not file.exists():
        counts = _coalescent(records + TEST + PANEL, features, each, population)
        if folder is not None:
            np.save(file, counts)
    else:
        counts = np.load(file)
    generator = torch.Generator().manual_seed(seed)
    panel = torch.from_numpy(counts[-PANEL:]).float()
    people = torch.from_numpy(counts[:-PANEL])[torch.randperm(records + TEST, generator=generator)].float()
    return _cases(people, panel.mean(0) / 2, records, causes, generator)


PANEL, REGION = 2_000, 300_000


def _coalescent(people: int, features: int, each: int, population: int) -> np.ndarray:
    import msprime  # of the extra "wide"

    found: list[np.ndarray] = []
    for draw in range(1 + population * 100_000, (population + 1) * 100_000):
        tree = msprime.sim_ancestry(
            people, sequence_length=REGION, recombination_rate=1e-8, population_size=1e4, random_seed=draw
        )
        model = msprime.BinaryMutationModel()
        tree = msprime.sim_mutations(tree, rate=1.25e-8, random_seed=draw, model=model)
        diploid = tree.genotype_matrix().reshape(tree.num_sites, people, 2).sum(2, dtype=np.int8)
        frequency = diploid[:, -PANEL:].mean(1) / 2
        sites = diploid[(frequency >= 0.05) & (frequency <= 0.95)]
        room = min(each, features - sum(map(len, found)))
        found.append(sites[np.linspace(0, len(sites) - 1, min(len(sites), room)).astype(int)])
        if sum(map(len, found)) == features:
            break
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
    return WideData(Rows(x[:records]), y[:records], Rows(x[records:]), y[records:], causes, best[records:])


def hospital(records: int, features: int, causes: int, seed: int) -> WideData:
    """The hospital table: one row of each training patient, all rows of the held-out ones; nothing is drawn here.

    With more features than the table's columns, pairs of its columns are hashed into the rest.
    """
    bundle = diabetes130()
    train, test = (_csr(split.features) for split in (bundle.train, bundle.test))
    patients = np.asarray(bundle.train.units)
    order = np.random.default_rng(0).permutation(len(patients))
    _, first = np.unique(patients[order], return_index=True)
    kept = np.sort(order[first])[:records]
    matrices = [_with_pairs(matrix, features) for matrix in (train[kept], test)]
    return _real(matrices, bundle.train.targets[torch.from_numpy(kept)], bundle.test.targets)


def reviews(records: int, features: int, causes: int, seed: int) -> WideData:
    """IMDB reviews as hashed words, present or not; nothing is drawn here."""
    bundle = imdb(buckets=features)
    matrices = [_csr(split.features) for split in (bundle.train, bundle.test)]
    return _real(matrices, bundle.train.targets, bundle.test.targets)


def molecules(records: int, features: int, causes: int, seed: int) -> WideData:
    """Which of B3DB's molecules pass the blood-brain barrier, by Morgan fingerprints (radius 2) and a constant.

    So many of them, chosen once for all seeds, are trained on, the others tested; nothing else is drawn here.
    """
    from rdkit import Chem  # of the extra "molecules", as is the table's package
    from rdkit.Chem import rdFingerprintGenerator

    package = importlib.util.find_spec("B3DB")
    if package is None or package.origin is None:
        raise DataError("molecules: found no B3DB, expected the package qc-B3DB to be installed")
    frame = pd.read_csv(Path(package.origin).parent / "B3DB_classification.tsv", sep="\t")
    read = [Chem.MolFromSmiles(one) for one in frame["SMILES"]]
    valid = np.array([one is not None for one in read])
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=features - 1)
    bits = np.stack([generator.GetFingerprintAsNumPy(one) for one in read if one is not None])
    whole = sparse.csr_matrix(np.column_stack([bits, np.ones(len(bits))]))
    y = torch.from_numpy((frame["BBB+/BBB-"] == "BBB+").to_numpy()[valid])
    order = np.random.default_rng(0).permutation(len(bits))
    train, test = order[:records], order[records:]
    return _real([whole[train], whole[test]], y[train], y[test])


def _csr(features: Any) -> Any:
    return sparse.csr_matrix(features.matrix)


def _with_pairs(matrix: Any, features: int) -> Any:
    """The columns and, in `features` less their number, hashed pairs of them; the last column is constant."""
    room = features - matrix.shape[1] - 1
    parts = [matrix]
    if room > 0:
        rows, columns = [], []
        for row in range(matrix.shape[0]):
            present = matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]].astype(np.int64)
            one, other = np.triu_indices(len(present), 1)
            found = np.unique((present[one] * 1_000_003 + present[other] * 7_919) % room)
            rows.append(np.full(len(found), row))
            columns.append(found)
        at = np.concatenate(rows), np.concatenate(columns)
        parts.append(sparse.csr_matrix((np.full(len(at[0]), 0.05), at), (matrix.shape[0], room)))
    parts.append(np.full((matrix.shape[0], 1), 0.25))
    return sparse.hstack(parts).tocsr()


def _real(matrices: list[Any], train_y: Tensor, test_y: Tensor) -> WideData:
    ready = []
    for matrix in matrices:
        lengths = np.sqrt(matrix.multiply(matrix).sum(1)).A1
        ready.append(Rows((sparse.diags(1 / np.maximum(lengths, 1e-12)) @ matrix).tocsr().astype(np.float32)))
    none = torch.empty(0, dtype=torch.int64)
    return WideData(ready[0], train_y.float(), ready[1], test_y.float(), none, torch.zeros(len(test_y)))


def pixels(bundle: DataBundle) -> WideData:
    """Pictures as vectors of length 1 and their classes; nothing is drawn here."""
    x, test_x = (
        nn.functional.normalize(split.features.batch(torch.arange(len(split))).flatten(1))
        for split in (bundle.train, bundle.test)
    )
    none = torch.empty(0, dtype=torch.int64)
    return WideData(
        Rows(x), bundle.train.targets, Rows(test_x), bundle.test.targets, none, torch.zeros(len(test_x))
    )


GENERATORS: dict[str, Callable[..., WideData]] = {
    "independent": independent,
    "blocks": blocks,
    "msprime": msprime_genotypes,
    "msprime-array": partial(msprime_genotypes, each=50),
    "hospital": hospital,
    "reviews": reviews,
    "molecules": molecules,
    "mnist": lambda *_: pixels(mnist()),
    "fashion": lambda *_: pixels(fashion_mnist()),
}
