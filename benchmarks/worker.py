"""One contender in its own process: takes steps when told to, and answers how long they took.

Each line on standard input is the number of seconds to spend; the answer is one line of JSON. The first turn also
sets the contender up and takes an untimed step.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Job, Step, make_step

MOST_STEPS = 20
"""In one turn."""
MOST_OF_THE_MACHINE = 0.8
"""Of its memory, for one contender."""
CANNOT_RUN = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    MemoryError,
    KeyError,
    AssertionError,
)
"""How a contender says that a model is not for it."""


def take_turn(step: Step, seconds: float) -> list[float]:
    """Times of at least one step, and of as many as start within `seconds`."""
    gc.collect()
    taken: list[float] = []
    while not taken or (sum(taken) < seconds and len(taken) < MOST_STEPS):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken


def peak_rss_mb() -> float:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rss_mb() -> float:
    """The memory this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def stay_within_memory() -> None:
    """Refuse what the machine cannot hold with an error, instead of bringing it down."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (int(MOST_OF_THE_MACHINE * machine), resource.RLIM_INFINITY))


def main() -> None:
    """Set up the job given as JSON in the only argument, then serve turns until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    answer(ready=True)
    stay_within_memory()
    step: Step | None = None
    ready = 0.0
    for line in sys.stdin:
        try:
            if step is None:
                step = make_step(Job(**given["job"]))
                ready = rss_mb()
                step()
            seconds = take_turn(step, float(line))
            answer(seconds=seconds, peak_rss_mb=peak_rss_mb(), ready_rss_mb=ready)
        except CANNOT_RUN as error:
            answer(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
            return


if __name__ == "__main__":
    main()
