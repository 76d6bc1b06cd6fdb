"""A private head on kept features against plain PyTorch's and scikit-learn's training of the same head, in CPU time.

`python -m benchmarks.heads` (or `--quick`): one thread, the least of several turns each, turn by turn. All three fit
the same rows in memory; sparsedp's and PyTorch's loops take the same number of steps with batches of the same
(expected) size. Calibrating the noise is done once beforehand, as its result is kept on disk; its time is told apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import sparsedp
from sparsedp.methods import build_plan

FEATURES, CLASSES = 1280, 10
"""Of EfficientNet-Lite0 and CIFAR-10."""
RATE, MOMENTUM, EPSILON, DELTA = 0.3, 0.9, 1.0, 1e-5
BAR = 1.1
"""Times plain training: what a private head may cost."""


@dataclass(frozen=True, slots=True)
class Task:
    """Rows of features and how long to train on them."""

    rows: int
    batch: int
    epochs: int

    def data(self) -> tuple[Tensor, Tensor]:
        """Features that tell the classes apart a little."""
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(CLASSES, (self.rows,), generator=generator)
        centres = torch.randn(CLASSES, FEATURES, generator=generator)
        noise = torch.randn(self.rows, FEATURES, generator=generator)
        return 0.05 * (centres[targets] + 3 * noise), targets


def private(task: Task, x: Tensor, y: Tensor) -> None:
    """`fit` with dense DP-SGD, all of it: checks, batches, steps, the result."""
    sparsedp.fit(
        nn.Linear(FEATURES, CLASSES), (x, y), nn.CrossEntropyLoss(reduction="none"), method="dp-sgd",
        epsilon=EPSILON, delta=DELTA, epochs=task.epochs, batch_size=task.batch, lr=RATE, progress=False,
    )  # fmt: skip


def plain(task: Task, x: Tensor, y: Tensor) -> None:
    """The loop that everybody writes."""
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for _ in range(task.epochs):
        for rows in torch.randperm(task.rows).split(task.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def scikit_learn(task: Task, x: Tensor, y: Tensor) -> None:
    """Logistic regression as it comes, to its own tolerance."""
    LogisticRegression(max_iter=1000).fit(x.numpy(), y.numpy())


CONTENDERS: Mapping[str, Callable[[Task, Tensor, Tensor], None]] = {
    "sparsedp": private,
    "PyTorch": plain,
    "scikit-learn": scikit_learn,
}


def measure(task: Task, turns: int) -> dict[str, float]:
    """The least CPU seconds of each, all once a turn; "calibration" is what the noise takes the first time."""
    x, y = task.data()
    begin = time.process_time()
    build_plan(
        "dp-sgd", units=task.rows, epsilon=EPSILON, delta=DELTA, epochs=task.epochs, batch_size=task.batch
    )
    least = {"calibration": time.process_time() - begin}
    for _ in range(turns):
        for name, contender in CONTENDERS.items():
            begin = time.process_time()
            contender(task, x, y)
            least[name] = min(least.get(name, float("inf")), time.process_time() - begin)
    return least


def told(task: Task, least: Mapping[str, float]) -> list[str]:
    """A line for each, and whether the bar is met."""
    lines = [
        f"{task.rows:,} rows of {FEATURES} features, {CLASSES} classes, batches of {task.batch:,}, "
        f"{task.epochs} epochs"
    ]
    lines += [f"{name:14} {least[name]:8.3f} s" for name in (*CONTENDERS, "calibration")]
    for other in ("PyTorch", "scikit-learn"):
        ratio = least["sparsedp"] / least[other]
        lines.append(
            f"sparsedp / {other}: {ratio:.2f} ({'met' if ratio <= BAR else 'missed'}, at most {BAR:g})"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows and turns")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task, turns = (Task(2000, 500, 2), 1) if given.quick else (Task(10_000, 2048, 20), 5)
    print("\n".join(told(task, measure(task, turns))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
