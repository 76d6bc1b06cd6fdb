"""How fast the scattering transform is, beside Kymatio's where that is installed.

    python -m benchmarks.scattering [--images 1024] [--threads 1]

Both run in one process, in turn, on the same images; the ratio is what to look at. CPU time is given as well: on a
busy machine it says more than the clock. Kymatio is not a dependency: install it (with scipy < 1.17) to compare.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sparsedp_experiments.data.features import Scattering

ROUNDS = 5
KYMATIO_BATCH = 256


def measure(transform: Callable[[Tensor], Tensor], images: Tensor) -> tuple[float, float]:
    """Clock and CPU seconds of one pass."""
    clock, cpu = time.perf_counter(), time.process_time()
    transform(images)
    return time.perf_counter() - clock, time.process_time() - cpu


def contenders(size: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ours, and Kymatio's if it is there."""
    found: dict[str, Callable[[Tensor], Tensor]] = {"sparsedp": Scattering(size)}
    if importlib.util.find_spec("kymatio") is not None:
        from kymatio.torch import Scattering2D

        theirs = Scattering2D(J=2, shape=(size, size))
        found["kymatio"] = lambda images: torch.cat([theirs(part) for part in images.split(KYMATIO_BATCH)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name, channels, size, records in (("MNIST", 1, 28, 70_000), ("CIFAR-10", 3, 32, 60_000)):
        images = torch.rand(arguments.images, channels, size, size)
        transforms = contenders(size)
        for transform in transforms.values():
            transform(images[:64])
        rounds = [
            {key: measure(transform, images) for key, transform in transforms.items()} for _ in range(ROUNDS)
        ]
        best = {key: tuple(min(round_[key][i] for round_ in rounds) for i in (0, 1)) for key in transforms}
        print(f"{name}: {arguments.images} images of {channels}x{size}x{size}, {arguments.threads} thread(s)")
        for key, (clock, cpu) in best.items():
            each = 1e6 * clock / arguments.images
            print(f"  {key:9} {each:7.0f} us an image, {cpu / arguments.images * 1e6:7.0f} us of CPU", end="")
            print(f"; all {records:,}: {clock / arguments.images * records:.0f} s")
        if "kymatio" in best:
            print(
                "  kymatio / sparsedp: {:.2f} by the clock, {:.2f} by CPU".format(
                    *(best["kymatio"][i] / best["sparsedp"][i] for i in (0, 1))
                )
            )


if __name__ == "__main__":
    main()
