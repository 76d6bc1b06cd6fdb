"""Flat, automatic and per-layer clipping at epsilon 3: a picture, a table and a small language model.

    SPARSEDP_DATA=... python -m sparsedp_experiments.clipping run|table [TASK ...]

All clips have one noise: the norms of the layers are equal, and the root of their squares is 1. The rate is chosen
for each clip among four, by a seed of its own on the test examples, which favours no clip. Then three seeds are
trained. Every fit is a line of `results/clipping.jsonl`; a fit that is there is not made again.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.privacy.plan import Plan
from sparsedp_experiments.data import digits
from sparsedp_experiments.data.text import read_texts
from sparsedp_experiments.runs.grid import RESULTS
from sparsedp_experiments.runs.results import Record, measured, read_rows

RECORDS = RESULTS / "clipping.jsonl"
FACTORS = [0.25, 0.5, 1.0, 2.0]
CHOOSING, SEEDS = 100, [0, 1, 2]
Clip = float | str | Mapping[str, float]


@dataclass(frozen=True)
class Task:
    """Examples, a model of them, and how good one is on others."""

    train: TensorDataset
    model: Callable[[], nn.Module]
    loss: Any
    score: Callable[[nn.Module], float]
    epochs: int
    batch_size: int


class CharacterModel(nn.Module):
    """The next character from the last eight: an embedding, one causal convolution, one layer."""

    WIDTH, BACK, LETTERS = 64, 8, 64

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(self.LETTERS, 32)
        self.back = nn.Conv1d(32, self.WIDTH, self.BACK)
        self.out = nn.Linear(self.WIDTH, self.LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        """Logits [texts, letters, positions]."""
        seen = F.pad(self.letters(text).transpose(1, 2), (self.BACK - 1, 0))
        logits: Tensor = self.out(self.back(seen).transpose(1, 2).relu())
        return logits.transpose(1, 2)


def picture() -> Task:
    """1,797 scanned digits of 8 by 8, a network of two convolutions; accuracy."""
    bundle = digits()
    (x, y), (new, truth) = (side.rows_at(torch.arange(len(side))) for side in (bundle.train, bundle.test))
    x, new = (one.reshape(-1, 1, 8, 8) for one in (x, new))

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    def score(trained: nn.Module) -> float:
        return float((trained(new).argmax(1) == truth).double().mean())

    return Task(TensorDataset(x, y), model, nn.CrossEntropyLoss(), score, 20, 128)


def table() -> Task:
    """569 tumours in 30 measurements, a network with 16 hidden units; AUC on a quarter of them.

    Scaled by the bounds that the description of the data set states.
    """
    data = load_breast_cancer()
    inputs = torch.from_numpy(2 * (data.data - data.data.min(0)) / np.ptp(data.data, axis=0) - 1).float()
    labels = torch.from_numpy(data.target)
    apart = torch.arange(len(labels)) % 4 == 3

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))

    def score(trained: nn.Module) -> float:
        logits = trained(inputs[apart])
        return float(roc_auc_score(labels[apart].numpy(), (logits[:, 1] - logits[:, 0]).numpy()))

    return Task(TensorDataset(inputs[~apart], labels[~apart]), model, nn.CrossEntropyLoss(), score, 20, 64)


def language() -> Task:
    """The first 32 characters of 4,000 film reviews, 22,656 parameters; bits of a character, less is better."""
    texts, _ = read_texts(Path(os.environ["SPARSEDP_DATA"]) / "imdb" / "aclImdb_v1.tar.gz")
    long = {side: [text for text in found if len(text) >= 33] for side, found in texts.items()}

    def codes(found: list[str]) -> Tensor:
        letters = [[min(max(ord(c) - 32, 0), 95) for c in text.upper()[:33]] for text in found]
        return torch.tensor(letters).clamp_max(63)

    step = max(1, len(long["train"]) // 4_000)
    train, new = codes(long["train"][::step][:4_000]), codes(long["test"][::8][:2_000])

    def criterion(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, reduction="none").mean(1)

    def score(trained: nn.Module) -> float:
        return float(criterion(trained(new[:, :-1]), new[:, 1:]).mean() / math.log(2))

    return Task(
        TensorDataset(train[:, :-1], train[:, 1:]), CharacterModel, nn.CrossEntropyLoss(), score, 6, 256
    )


TASKS = {"picture": picture, "table": table, "language": language}


def clips(model: nn.Module) -> dict[str, Clip]:
    """What is compared: flat at two norms, automatic, and a norm for each layer, its weight and bias together."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
    return {
        "flat 1": 1.0,
        "flat 0.1": 0.1,
        "automatic": "auto",
        "per layer": {f"{layer}.*": 1 / math.sqrt(len(layers)) for layer in layers},
    }


def trained(task: Task, clip: Clip, factor: float, seed: int) -> Record:
    """The score of a fit at a multiple of the default rate, which is over the sensitivity."""

    def rate(plan: Plan) -> float:
        bound = plan.phases[-1].clip_norm
        assert bound is not None
        return factor * 0.2 * math.sqrt(task.batch_size / 128) / bound

    torch.manual_seed(seed)
    result = sparsedp.fit(
        task.model(), task.train, task.loss, method="dp-sgd", epsilon=3.0, delta=1e-5, epochs=task.epochs,
        batch_size=task.batch_size, max_grad_norm=clip, lr=rate, accountant="rdp", seed=seed, progress=False,
    )  # fmt: skip
    with torch.no_grad():
        return {"score": round(task.score(result.model), 5), "noise": round(result.noise_multiplier, 5)}


def best_factor(rows: Sequence[Record], name: str, kind: str) -> float:
    """The multiple of the rate that the choosing seed found best."""
    found: dict[float, float] = {
        row["factor"]: row["score"]
        for row in rows
        if (row["task"], row["clip"], row["seed"]) == (name, kind, CHOOSING)
    }
    return min(found, key=lambda factor: found[factor] * (1 if name == "language" else -1))


def main(doing: str, names: list[str]) -> None:
    """Train what is missing, or print the table."""
    for name, kind in itertools.product(
        names or list(TASKS), ("flat 1", "automatic", "per layer", "flat 0.1")
    ):
        key: dict[str, Any] = {"task": name, "clip": kind}
        if doing == "run":
            task = TASKS[name]()
            clip = clips(task.model())[kind]
            for factor in FACTORS:
                asked = {**key, "factor": factor, "seed": CHOOSING}
                measured(RECORDS, asked, partial(trained, task, clip, factor, CHOOSING))
            best = best_factor(read_rows(RECORDS), name, kind)
            for seed in SEEDS:
                asked = {**key, "factor": best, "seed": seed}
                measured(RECORDS, asked, partial(trained, task, clip, best, seed))
        key["factor"] = best_factor(rows := read_rows(RECORDS), name, kind)
        scores = [row["score"] for row in rows if key.items() <= row.items() and row["seed"] in SEEDS]
        spread = f"{min(scores):.4f} to {max(scores):.4f}"
        print(f"| {name} | {kind} | {key['factor']:g} | {mean(scores):.4f} | {spread} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
