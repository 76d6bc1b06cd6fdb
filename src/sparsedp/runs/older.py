"""What version 0.1 kept in a file of its own, and every run keeps in its checkpoint since."""

from __future__ import annotations

from pathlib import Path

from sparsedp.methods.warmup import WarmupSeen
from sparsedp.runs.documents import intact
from sparsedp.runs.snapshots import read_facts

WARMUP = "warmup.safetensors"


def read_older_warmup(folder: Path) -> WarmupSeen | None:
    """The warm-up statistics of a run of version 0.1; None if it kept none.

    Raises:
        DataError: the file is damaged.
    """
    file = folder / WARMUP
    if not file.is_file():
        return None
    with intact(file):
        tensors, facts = read_facts(file)
        variances = (facts["first_variance"], facts["second_variance"])
        even, odd = (round(facts["noise_std"] ** 2 / variance) for variance in variances)
        orders = {name: tensors[f"order.{name}"] for name in facts["rankings"]}
        return WarmupSeen(orders, tensors["first"], tensors["second"], even, odd, facts["steps"])
