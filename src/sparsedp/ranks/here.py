"""Which run of several processes this one belongs to, as the launcher has set it up."""

from __future__ import annotations

import atexit
import functools
import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from sparsedp.errors import SparseDPError
from sparsedp.ranks.group import RankGroup
from sparsedp.ranks.one import OneRank, Ranks

logger = logging.getLogger("sparsedp")

THREADS = "OMP_NUM_THREADS"
"""Environment variable: threads of a process; where it is not set, `torchrun` sets it to one for several."""
TIMEOUT = "SPARSEDP_RANK_TIMEOUT"
"""Environment variable: how many seconds ranks wait for each other."""
SECONDS = 1800.0
"""Long enough for the leading rank to evaluate and save; a rank that hangs is noticed that late."""


def ranks_here() -> Ranks:
    """The ranks of the process group that is there, or that `torchrun` has prepared; else one rank.

    **Privacy.** Under `torchrun` a group is made if there is none: otherwise every process would train, and release,
    by itself.
    """
    if not dist.is_available():
        return OneRank()
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            _refuse_lone_ranks()
            return OneRank()
        _make_group()
    _leave_before_the_interpreter()
    group = dist.new_group(backend=_backend(), timeout=timedelta(seconds=_seconds()))
    on_gpu = "nccl" in dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return RankGroup(group, _seconds(), _starts_before() > 0, device)


def refuse_ranks(what: str) -> None:
    """Refuse what is for one process, which looks at all data.

    Raises:
        SparseDPError: there are several.
    """
    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if grouped or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SparseDPError(
            f"{what} runs in one process, and this is one of several; start it without torchrun"
        )


def same_threads() -> None:
    """One thread in a process that `torchrun` has started alone: as many as it gives each of several.

    The order of additions in a product of matrices depends on the number of threads, so a seeded run's bits do.
    """
    if dist.is_available() and dist.is_torchelastic_launched() and THREADS not in os.environ:
        logger.info("a seeded run has one thread a process; set %s for more", THREADS)
        torch.set_num_threads(1)


def _refuse_lone_ranks() -> None:
    """Several processes by another launcher, none of which knows the others, would each train for themselves."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        raise SparseDPError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} and there is no process group: every "
            "rank would train and release by itself. Call torch.distributed.init_process_group first, or use torchrun"
        )


@functools.cache
def _leave_before_the_interpreter() -> None:
    """See that the groups end before Python does, once a process.

    Their threads may drop a tensor a moment after the last exchange. If the interpreter is ending by then, that
    aborts the process (seen in one of ten), and a launcher takes a finished run for a failed one.
    """
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _make_group() -> None:
    """The group that `torchrun` has prepared, under a name for this start.

    Its store outlives a restart: without the name, ranks find the addresses of those that were killed there.
    """
    timeout = timedelta(seconds=_seconds())
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    named = PrefixStore(f"start-{_starts_before()}", store)
    dist.init_process_group(_backend(), store=named, rank=rank, world_size=ranks, timeout=timeout)


def _starts_before() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _seconds() -> float:
    return float(os.environ.get(TIMEOUT, SECONDS))
