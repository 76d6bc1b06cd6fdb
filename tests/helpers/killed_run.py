"""Trains in a child process, kills it at random moments, resumes it; prints what was seen as JSON.

Usage: killed_run.py FOLDER SEED|none KILLS EPOCHS, each epoch three steps, blocks of two
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from runs import a_trainer, advance, weights
from sparsedp import randomness
from sparsedp.runs.run import Run
from sparsedp.runs.verify import verify


def train(out: Path, seed: int | None, epochs: int, log: Path) -> None:
    """Go on with the run, or start it; every draw of noise is logged before it is made."""
    source = randomness.SystemRandomness if seed is None else randomness.SeededRandomness
    draw = source.add_rounded_gaussian

    def logged(self: object, bits: int, sums: torch.Tensor, key: Sequence[int]) -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{key[0]}\n".encode())
        os.close(descriptor)
        draw(self, bits, sums, key)

    source.add_rounded_gaussian = logged
    trainer = a_trainer(out=out, resume=out.exists(), seed=seed, epochs=epochs, optimizer=adam)
    advance(trainer).finish()


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def drawn_steps(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def kill_and_look(
    out: Path, seed: int | None, epochs: int, log: Path, steps: int, delay: float
) -> dict[str, object]:
    """One child, killed `delay` seconds after that many more draws of noise; then what its files say.

    Waiting for draws, not for time, makes the moment independent of how busy the machine is.
    """
    goal = len(drawn_steps(log)) + steps
    child = os.fork()
    if child == 0:
        train(out, seed, epochs, log)
        os._exit(0)
    while len(drawn_steps(log)) < goal and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    drawn = drawn_steps(log)
    if not out.exists():
        return {"drawn": drawn, "charged": 0, "saved": 0, "reasons": []}
    run = Run.open(out)
    reasons = verify(out, independent=False).reasons
    return {"drawn": drawn, "charged": run.ledger.charged, "saved": run.checkpoint.step, "reasons": reasons}


def main() -> None:
    folder, seed = Path(sys.argv[1]), None if sys.argv[2] == "none" else int(sys.argv[2])
    kills, epochs = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    make = {"seed": seed, "epochs": epochs, "optimizer": adam}
    alone = advance(a_trainer(**make)).finish()  # and what is slow once, before the first fork
    chance = random.Random(7)
    looks = [
        kill_and_look(
            folder / "run", seed, epochs, folder / "log", chance.randrange(8), chance.uniform(0, 0.02)
        )
        for _ in range(kills)
    ]
    result = advance(a_trainer(out=folder / "run", resume=True, **make)).finish()
    seen = {
        "looks": looks,
        "steps": result.plan.total_steps,
        "charged": result.ledger.steps,
        "epsilon": result.ledger.epsilon,
        "epochs": [report.epoch for report in result.history],
        "same_as_alone": torch.equal(weights(result.model), weights(alone.model)),
    }
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
