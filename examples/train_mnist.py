"""Every method on real MNIST, and its epsilon counted again by somebody else: Opacus.

Run: SPARSEDP_DATA=... python examples/train_mnist.py [--epochs 5] [--epsilon 3] [--out runs] [method ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from torch import nn

import sparsedp
from sparsedp.privacy.ledger import Ledger
from sparsedp_experiments import data as datasets
from sparsedp_experiments import models

METHODS = ("dp-sgd", "tp-topk", "tp-coherent", "tp-rand", "on-rand", "on-topk", "ranked", "adadpigu")
LOSS = nn.CrossEntropyLoss(reduction="none")


def train(method: str, mnist: datasets.DataBundle, epochs: int, epsilon: float, out: Path) -> sparsedp.Result:
    torch.manual_seed(0)
    return sparsedp.fit(
        models.mnist_cnn((1, 28, 28), 10),
        mnist.train,
        LOSS,
        method=method,
        epsilon=epsilon,
        delta=1e-5,
        epochs=epochs,
        batch_size=1024,
        eval_dataset=mnist.test,
        run_dir=out,
        run=sparsedp.RunConfig(metadata=sparsedp.RunMetadata(dataset="mnist", model="mnist-cnn")),
    )


def counted_by_opacus(ledger: Path, delta: float) -> tuple[float, float]:
    """Epsilon of a ledger by Opacus's RDP and PRV accountants, from the file alone."""
    blocks = Ledger.read(ledger).blocks
    found = []
    for accountant in (RDPAccountant(), PRVAccountant()):
        for noise, rate in dict.fromkeys((block.noise_multiplier, block.sampling_rate) for block in blocks):
            steps = sum(b.steps for b in blocks if (b.noise_multiplier, b.sampling_rate) == (noise, rate))
            accountant.history.append((noise, rate, steps))
        found.append(accountant.get_epsilon(delta))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    mnist = datasets.mnist()
    with TemporaryDirectory() as scratch:
        out = chosen.out or Path(scratch)
        print(
            f"{'method':12} {'accuracy':>8} {'k':>6}  {'pld':>6} {'prv':>6} {'':7} {'rdp':>6} {'opacus':>6}"
        )
        for method in chosen.methods:
            result = train(method, mnist, chosen.epochs, chosen.epsilon, out / method)
            ledger = out / method / "ledger.jsonl"
            rdp, prv = counted_by_opacus(ledger, result.delta)
            ours_rdp, ours_pld = Ledger.read(ledger).spent(accountant="rdp"), result.ledger.epsilon
            print(
                f"{method:12} {result.metrics['accuracy']:8.4f} {result.k:6d}  {ours_pld:6.3f} {prv:6.3f} "
                f"({prv / ours_pld - 1:+.1%}) {ours_rdp:6.3f} {rdp:6.3f} ({rdp / ours_rdp - 1:+.1%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
