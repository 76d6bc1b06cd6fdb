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
from typing import Any

import torch

from benchmarks.contenders import Job, Step, make_step

MOST_STEPS = 20
"""In one turn."""
CANNOT_RUN = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, AssertionError)
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


def main() -> None:
    """Set up the job given as JSON in the only argument, then serve turns until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    answer(ready=True)
    step: Step | None = None
    for line in sys.stdin:
        try:
            if step is None:
                step = make_step(Job(**given["job"]))
                step()
            answer(seconds=take_turn(step, float(line)), peak_rss_mb=peak_rss_mb())
        except CANNOT_RUN as error:
            answer(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
            return


if __name__ == "__main__":
    main()
