"""One run in several processes: what ranks tell each other, over `torch.distributed`.

Under `torchrun`, or in a process group that the user has made, these functions talk to the other ranks; in a run of
one process they do nothing. To start ranks, to start them again and to report which one failed is torchrun's work.

Formal guarantees:
    The ranks are one trusted party: sums travel between them before the noise. Ledger file and noise are on the main
    process, rank 0. A rank that raises does not join the next sum, so the main process has nothing to release.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous

from sparsedp._files import Json
from sparsedp._serialization import json_diff, plain_json, short
from sparsedp.errors import RankError, SparseDPError

logger = logging.getLogger("sparsedp")
T = TypeVar("T")

MAIN = 0
"""The rank that holds the ledger, the noise and the run directory."""
THREADS = "OMP_NUM_THREADS"
"""Environment variable: threads of a process; where it is not set, `torchrun` sets it to one for several."""
TIMEOUT = "SPARSEDP_RANK_TIMEOUT"
"""Environment variable: how many seconds ranks wait for each other; 1800 if not set, enough for an evaluation."""


def connect() -> None:
    """Join the process group that `torchrun` has prepared, if there is none yet; else every process would release."""
    if not dist.is_available() or dist.is_initialized():
        return
    if dist.is_torchelastic_launched():
        timeout = timedelta(seconds=float(os.environ.get(TIMEOUT, "1800")))
        store, rank, ranks = next(rendezvous("env://", timeout=timeout))
        # The store outlives a restart; without a name of its own a start would find the addresses of killed ranks.
        store = PrefixStore(f"start-{restarts()}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        atexit.register(_leave)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        raise SparseDPError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} and there is no process group: every "
            "rank would train and release by itself. Call torch.distributed.init_process_group first, or use torchrun"
        )


def _leave() -> None:
    """End the group, whose threads abort the process if they drop a tensor while the interpreter is ending."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
        time.sleep(0.2)


def is_distributed() -> bool:
    """Whether there is a process group, be it of one."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """Which rank this is."""
    return dist.get_rank() if is_distributed() else MAIN


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return rank() == MAIN


def restarts() -> int:
    """How often `torchrun` has started these processes before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def require_one_process(what: str) -> None:
    """Refuse to run in several processes what reads all data in one."""
    if world_size() > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SparseDPError(
            f"{what} runs in one process, and this is one of several; start it without torchrun"
        )


def use_threads_of_ranks() -> None:
    """Take one thread in a process that `torchrun` has started alone: as many as it gives to each of several.

    The order of additions in a product of matrices depends on the number of threads, so a seeded run's bits do.
    """
    if dist.is_available() and dist.is_torchelastic_launched() and THREADS not in os.environ:
        logger.info("a seeded run has one thread a process; set %s for more", THREADS)
        torch.set_num_threads(1)


def report_failure(run: Callable[[], T]) -> T:
    """Call `run`; if it raises here, `torchrun` names this rank and the error in its report."""
    return cast("T", record(run)()) if world_size() > 1 else run()


def reduce_sum(values: Tensor) -> Tensor:
    """Add up all ranks' values; the sum is complete on the main process alone.

    Edge cases: The sum of integers is exact, so neither order nor number of ranks changes a bit.
    """
    return _sent(values, lambda sent: dist.reduce(sent, MAIN))


def broadcast(values: Tensor) -> Tensor:
    """Give the main process's values to every rank."""
    return _sent(values, lambda sent: dist.broadcast(sent, MAIN))


def _sent(values: Tensor, collective: Callable[[Tensor], Any]) -> Tensor:
    if world_size() == 1 or not values.numel():
        return values
    sent = values.to(_device())
    _call(lambda: collective(sent))
    return sent.to(values.device)


def broadcast_parameters(model: nn.Module) -> None:
    """Give the main process's parameters and buffers to every rank, as PyTorch's data-parallel training does."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()] if world_size() > 1 else []:
            tensor.copy_(broadcast(tensor.detach().clone(memory_format=torch.contiguous_format)))


def should_stop(requested: bool) -> bool:
    """Whether any rank was asked to stop; every rank must ask after the same step, so that all stop together."""
    if world_size() == 1:
        return requested
    flag = torch.tensor([int(requested)], device=_device())
    _call(lambda: dist.all_reduce(flag, dist.ReduceOp.MAX))
    return bool(flag.item())


def gather(value: T) -> list[T]:
    """Give every rank's value to every rank, in order."""
    values: list[Any] = [value] * world_size()
    if len(values) > 1:
        _call(lambda: dist.all_gather_object(values, value))
    return values


def broadcast_from_main(make: Callable[[], T]) -> T:
    """Call `make` on the main process, and give what it returns to every rank."""
    sent: list[Any] = [all_or_raise(make) if is_main_process() else all_or_raise(lambda: None)]
    if world_size() > 1:
        _call(lambda: dist.broadcast_object_list(sent, MAIN))
    return cast("T", sent[0])


def all_or_raise(make: Callable[[], T]) -> T:
    """Call `make` on every rank, and return its value here once it has succeeded everywhere."""
    value, own = None, None
    try:
        value = make()
    except Exception as error:
        own = error
    failures = gather(None if own is None else f"{type(own).__name__}: {own}")
    if own is not None:
        raise own
    failed = [f"rank {number} stopped the run: {text}" for number, text in enumerate(failures) if text]
    if failed:
        raise RankError("; ".join(failed))
    return cast("T", value)


def check_same_on_all_ranks(facts: Callable[[], Mapping[str, Json]]) -> None:
    """Compare JSON values, by name, with the main process's."""
    if world_size() == 1:
        return
    main, *others = gather(all_or_raise(lambda: plain_json(dict(facts()))))
    differing = [
        f"rank {number}: {name} is {short(here)} and {short(there)} on rank {MAIN}"
        for number, theirs in enumerate(others, start=MAIN + 1)
        for name, there, here in [*json_diff(main, theirs)][:4]
    ]
    if differing:
        raise RankError(
            f"the ranks differ. {'. '.join(differing)}. Start all with the same code, data and settings"
        )


def _call(collective: Callable[[], Any]) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise RankError(
            f"rank {rank()} cannot go on: another rank raised, was killed or hangs; torchrun reports which one "
            f"({str(error).splitlines()[0]}). What was paid for stays paid; resume the run to go on from its last "
            "checkpoint (`torchrun --max-restarts` does that by itself)"
        ) from error


def _device() -> torch.device:
    on_gpu = "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextmanager
def begins_run(path: Path) -> Iterator[None]:
    """Note, around the making of a run directory, that this launch begins the run at `path`.

    It is noted in the launcher's store, which outlives a restart, and first: a kill in between leaves no run that a
    later start would take for another launch's.
    """
    if not (is_distributed() and dist.is_torchelastic_launched()):
        yield
        return
    store, name = _launcher_store(), _begun(path)
    store.set(name, f"making {restarts()}")
    try:
        yield
    except BaseException:
        store.delete_key(name)
        raise
    store.set(name, f"made {restarts()}")


def begun_by_this_launch(path: Path, exists: bool) -> bool:
    """Whether an earlier start of this launch, and not another launch, has made the run that `exists` at `path`."""
    if not restarts() or not is_distributed() or not _launcher_store().check([_begun(path)]):
        return False
    state, start = _launcher_store().get(_begun(path)).decode().split()
    if int(start) == restarts():
        return False
    if state == "made" and not exists:
        raise SparseDPError(
            f"an earlier start of this launch has begun a run at {path}, which is not here: it was removed, or the "
            "main process is on another machine now. Put the run directory where all machines see it"
        )
    return exists


def _begun(path: Path) -> str:
    return f"sparsedp/begun/{path.absolute()}"


def _launcher_store() -> Store:
    """The launcher's own store, below the names that one start of the ranks goes by."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return cast(Store, store)
