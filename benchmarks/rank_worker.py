"""One rank of `benchmarks.ranks`: takes steps of one contender on its share of a batch, under torchrun.

The last argument is the job as JSON; rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import (
    CLIP_NORM,
    NOISE_MULTIPLIER,
    SAMPLING_RATE,
    Job,
    _opacus,
    _optimizer,
    _sparsedp,
)
from benchmarks.supports import support_of
from benchmarks.workloads import per_sample_loss, workload_of
from sparsedp.sampling import block_bits
from sparsedp_experiments.models import parameter_count

Batch = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Clock:
    """Time spent in collectives since it was last read, and bytes given to them and got from them."""

    seconds: float = 0.0
    sent: int = 0
    got: int = 0
    steps: list[float] = field(default_factory=list)

    def around(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """The collective, timed and counted."""

        def timed(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            size, began = tensor.numel() * tensor.element_size(), time.perf_counter()
            self.sent += size if collective is not _BROADCAST else 0
            self.got += size if collective is not _REDUCE else 0
            try:
                return collective(tensor, *arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


_REDUCE, _BROADCAST, _ALL_REDUCE = dist.reduce, dist.broadcast, dist.all_reduce


def shared_sparsedp(job: Job, batch: Batch) -> Callable[[], None]:
    """A private step on this rank's micro-batches, added up over the group."""
    from sparsedp.batch import MicroBatch, slice_batch
    from sparsedp.clipping import FlatClip
    from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
    from sparsedp.optimizers.sparse import SupportOptimizer
    from sparsedp.privacy.charge import Charge, ChargeLog
    from sparsedp.privacy.mechanism import GaussianMechanism
    from sparsedp.privacy.queries import GradientSum
    from sparsedp.randomness import SystemRandomness

    model = workload_of(job.model).model()
    engine = BookKeepingEngine(model, per_sample_loss)
    query = ClippedSumQuery(support_of(job.support, engine.layout, job.active_ratio), FlatClip(CLIP_NORM))
    optimizer = SupportOptimizer(model, engine.layout, _optimizer(job, model), coasts=False)
    ledger, randomness = ChargeLog(), SystemRandomness()
    rows = batch[0].shape[0]
    block = 1 << block_bits(1.0, rows, None)
    mine = range(dist.get_rank() * block, rows, dist.get_world_size() * block)
    parts = [MicroBatch(slice_batch(batch, slice(start, start + block))) for start in mine]

    def step() -> None:
        released = GaussianMechanism(ledger, randomness).release(
            GradientSum(engine, parts, query),
            Charge("train", len(ledger.charges), SAMPLING_RATE, NOISE_MULTIPLIER),
            expected_batch_size=float(rows),
        )
        optimizer.apply(released)

    return step


def shared_opacus(job: Job, batch: Batch) -> Callable[[], None]:
    """Opacus's data-parallel step on this rank's half of the rows."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    rank, count = dist.get_rank(), dist.get_world_size()
    model = DifferentiallyPrivateDistributedDataParallel(workload_of(job.model).model())
    inputs, targets = batch
    return _opacus("hooks", job, model, (inputs[rank::count].contiguous(), targets[rank::count].contiguous()))


def alone(job: Job, batch: Batch) -> Callable[[], None]:
    """One process with the whole batch, and nobody to talk to."""
    return _sparsedp(job, workload_of(job.model).model(), batch)


CONTENDERS = {"sparsedp": shared_sparsedp, "opacus-ddp": shared_opacus, "alone": alone}


def main() -> None:
    """Take steps and say how long they took, what part of it was the exchange, and what was sent."""
    asked = json.loads(sys.argv[-1])
    torch.set_num_threads(asked["threads"])
    dist.init_process_group("gloo")
    job = Job(asked["model"], asked["contender"], asked["ratio"], asked["support"])
    clock = Clock()
    for name in ("reduce", "broadcast", "all_reduce"):
        setattr(dist, name, clock.around(getattr(dist, name)))
    step = CONTENDERS[job.contender](job, workload_of(job.model).batch())
    for _ in range(2):
        step()
    d = parameter_count(workload_of(job.model).model())
    taken, exchanged = [], []
    clock.sent = clock.got = 0
    for _ in range(asked["steps"]):
        clock.seconds, began = 0.0, time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
        exchanged.append(clock.seconds)
    found = {
        "seconds": float(np.median(taken)),
        "exchange_seconds": float(np.median(exchanged)),
        "bytes_sent": clock.sent // len(taken),
        "bytes_got": clock.got // len(taken),
    }
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    if dist.get_rank() == 0:
        quickest = min(one["exchange_seconds"] for one in everybody)  # the rank that waits for nobody
        print(
            json.dumps(
                {
                    **asked,
                    **everybody[-1],
                    "d": d,
                    "k": int(job.active_ratio * d),
                    "seconds": found["seconds"],
                    "exchange_seconds": quickest,
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
