"""A table of embeddings, dense and by rows: what each costs and how well it learns, on made-up texts of Zipf's words.

Run: python examples/embedding_table.py [--vocabulary 65536] [--epsilon 3] [--epochs 4] [--records 20000] [method ...]
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import sparsedp
from sparsedp.methods import Granularity
from sparsedp_experiments import data as datasets
from sparsedp_experiments import models


def train(
    method: str, data: datasets.DataBundle, epsilon: float, epochs: int, ratio: float
) -> sparsedp.Result:
    torch.manual_seed(0)
    changes = {} if method == "dp-sgd" else {"active_ratio": ratio, "granularity": Granularity.ROWS}
    return sparsedp.fit(
        models.embedding_bag(data.input_shape, 2, vocabulary=data.vocabulary),
        data.train,
        nn.CrossEntropyLoss(reduction="none"),
        method=sparsedp.get_method(method, **changes),
        epsilon=epsilon,
        delta=1e-5,
        epochs=epochs,
        batch_size=512,
        lr=16.0,
        max_grad_norm=0.1,
        eval_dataset=data.test,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=["dp-sgd", "tp-coherent"])
    parser.add_argument("--vocabulary", type=int, default=2**16)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--active-ratio", type=float, default=0.02)
    asked = parser.parse_args()
    data = datasets.load("zipf", records=asked.records, vocabulary=asked.vocabulary)
    for method in asked.methods:
        start = time.perf_counter()
        result = train(method, data, asked.epsilon, asked.epochs, asked.active_ratio)
        seconds = time.perf_counter() - start
        accuracy = result.metrics["accuracy"]
        print(
            f"{method:12} epsilon {result.epsilon:.2f}  active {result.k:,} of {result.d:,}  "
            f"accuracy {accuracy:.1%}  {seconds:.0f} s"
        )


if __name__ == "__main__":
    main()
