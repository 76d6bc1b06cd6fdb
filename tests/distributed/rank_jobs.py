"""What the ranks of the tests do: run by torchrun, one job after another, each writing what it found to a file.

`torchrun --nproc-per-node 3 rank_jobs.py FOLDER JOB...`; rank r writes FOLDER/JOB.r.json.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sparsedp
from runs import Bag, placed, texts
from sparsedp import distributed
from sparsedp._serialization import to_json
from sparsedp.errors import SparseDPError
from sparsedp.privacy.ledger import Ledger
from sparsedp.results import StepReport
from sparsedp.runs.directory import RunDirectory

SCRIPT = Path(__file__).with_name("rank_jobs.py")
TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src"


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(
        filter(None, [str(SOURCES), str(TESTS), str(TESTS / "helpers"), os.environ.get("PYTHONPATH")])
    )
    quick = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    return {**os.environ, "PYTHONPATH": path, **quick, **more}


def torchrun(
    ranks: int, *arguments: str, restarts: int = 0, timeout: float = 280, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command under torchrun and wait for it."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}", *arguments,
    ]  # fmt: skip
    return subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, timeout=timeout, check=False
    )


def jobs(
    folder: Path, ranks: int, *names: str, restarts: int = 0, timeout: float = 280, **more: str
) -> dict[str, list[Any]]:
    """Do jobs of `rank_jobs` in one start; what each gave, rank by rank."""
    ended = torchrun(ranks, str(SCRIPT), str(folder), *names, restarts=restarts, timeout=timeout, **more)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
        for name in names
    }


@contextmanager
def group_of_one() -> Iterator[None]:
    """This process as a group that the user has made: what one rank under torchrun is, without its start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def jobs_of_one(folder: Path, *names: str) -> dict[str, Any]:
    """Do jobs of `rank_jobs` as one rank, in this process."""
    with group_of_one():
        return {name: json.loads(json.dumps(JOBS[name](folder))) for name in names}


ROWS, CLASSES = 400, 3
LOSS = nn.CrossEntropyLoss(reduction="none")


def data(rows: int = ROWS, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    inputs = torch.rand(rows, 6, generator=generator) + nn.functional.one_hot(labels, 6)
    return TensorDataset(inputs, labels)


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, CLASSES))


def digest(result: sparsedp.Result) -> str:
    found = hashlib.sha256()
    for value in result.model.state_dict().values():
        found.update(value.numpy().tobytes())
    found.update(result.support.indices.numpy().tobytes())
    found.update(json.dumps(to_json(result.history), sort_keys=True).encode())
    found.update(f"{result.ledger.steps} {result.ledger.epsilon}".encode())
    return found.hexdigest()


def train(method: str = "tp-topk", **changes: Any) -> sparsedp.Result:
    """A short run, of a model and data as the method needs them."""
    model, dataset = (Bag(), texts(1, ROWS)) if method in TABLES else (network(), data())
    model, dataset = changes.pop("model", model), changes.pop("dataset", dataset)
    how = {"epsilon": 4.0, "delta": 1e-3, "accountant": "rdp", "epochs": 2, "batch_size": 100}
    how |= {"method": method, "lr": 0.5, "seed": 7, "evaluate": accuracy, **changes}
    return sparsedp.fit(model, dataset, how.pop("loss", LOSS), **placed(how))


def accuracy(model: nn.Module) -> dict[str, float]:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"accuracy": float(weights.abs().mean())}


TABLES = frozenset(
    m.name for m in sparsedp.list_methods() if m.ranking is not None and m.ranking.source.counts_rows
)
"""Methods that rank rows of embedding tables, by a count of their own."""
LONG = 16
"""Epochs of the runs that are hurt."""
FULL = "FULL"


def refused(do: Callable[[], object]) -> str:
    """The error it raises."""
    try:
        do()
    except SparseDPError as error:
        return str(error)
    return "nothing was refused"


def every_method(folder: Path) -> dict[str, str]:
    return {method.name: digest(train(method.name)) for method in sparsedp.list_methods()}


def every_way(folder: Path) -> dict[str, str]:
    """What may be given besides a method."""
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
    ways: dict[str, dict[str, Any]] = {
        "normalised": {"normalise": sparsedp.PrivateNormalisation(clip_norm=3.0)},
        "averaged": {"ema_decay": 0.9, "optimizer": adam, "lr": None},
        "by hand": {"engine": "reference", "epochs": 1},
        "given": {"method": "given", "public_scores": {"0.weight": torch.arange(48).reshape(8, 6)}},
        "few people at once": {
            "unit_ids": torch.arange(ROWS) % 130, "unit_name": "person", "rows_per_unit": 2, "max_physical_batch": 8,
        },
        "a loss": {"private_loss": 2.0},
        "loaded apart": {"num_workers": 1},
    }  # fmt: skip
    return {name: digest(train(**changes)) for name, changes in ways.items()}


def threads(folder: Path) -> str:
    """One rank of a seeded run has more threads, so its products add up in another order."""
    torch.set_num_threads(1 + dist.get_rank())
    try:
        return refused(train)
    finally:
        torch.set_num_threads(1)


def at_step(number: int, do: Callable[[], object]) -> Callable[[object], None]:
    """A callback: rank 1 does this after so many steps."""

    def callback(event: object) -> None:
        if isinstance(event, StepReport) and event.step == number and dist.get_rank() == 1:
            do()

    return callback


def ended(folder: Path) -> list[str]:
    """One rank is told to end, as by a launcher: all save and stop, and go on later."""
    end = at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    said = "it was not told"
    try:
        train(run_dir=folder / "ENDED", callbacks=[end])
    except KeyboardInterrupt:
        said = "stopped"
    stopped_at = Ledger.read(folder / "ENDED" / "ledger.jsonl").charged
    dist.barrier()
    again = digest(train(run_dir=folder / "ENDED", resume=True))
    return [said, str(stopped_at), again, digest(train())]


def drifts(folder: Path) -> str:
    """One rank's weights move by themselves."""
    model = network()
    drift = at_step(5, lambda: next(model.parameters()).data.add_(1e-6))
    return refused(lambda: train(model=model, callbacks=[drift]))


def failing(steps: int, folder: Path) -> None:
    """One rank's loss raises, in its own part of a step after so many; rank 0 notes what was released."""
    reached = [-1]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if dist.get_rank() == 1 and reached[0] == steps:
            raise SparseDPError("no more")
        return LOSS(output, target)

    def note(event: object) -> None:
        if isinstance(event, StepReport):
            reached[0] = event.step
            if dist.get_rank() == 0:
                (folder / "released.txt").write_text(str(event.step))

    train(loss=loss, callbacks=[note], run_dir=folder / "FAILED")


def unseeded(folder: Path) -> dict[str, Any]:
    """Without a seed, and with initial weights of each rank's own: all end with the same weights."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    result = train(model=model, seed=None)
    return {"digest": digest(result), "steps": result.ledger.steps}


def sharded(folder: Path) -> dict[str, Any]:
    """Each rank has rows of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, labels = data().tensors
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    result = train(dataset=TensorDataset(inputs[mine], labels[mine]), sharded=True)
    twice = refused(lambda: train(unit_ids=torch.arange(ROWS), unit_name="person", sharded=True))
    copies = refused(lambda: train(sharded=True))
    return {"digest": digest(result), "units": result.plan.units, "twice": twice, "copies": copies}


class Hit(NamedTuple):
    """What befalls a rank in one of the starts of a run: after so many steps of that start, and a moment more.

    `how` is a signal, or FULL: its disk is full from then on. Without steps (-1) the moment counts from the start.
    """

    how: str
    rank: int
    after: int
    seconds: float


def hurt(folder: Path) -> dict[str, Any]:
    """A run whose n-th start is hit by the n-th of HITS. Rank 0 notes every release, and what was paid by then."""
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
    hits = [Hit(*values) for values in json.loads(os.environ["HITS"])]
    hit = hits[start] if start < len(hits) and hits[start].rank == rank else None
    notes, steps = folder / "released.txt", 0

    def strike() -> None:
        assert hit is not None
        time.sleep(hit.seconds)
        os.kill(os.getpid(), getattr(signal, hit.how))

    def step(event: object) -> None:
        nonlocal steps
        if not isinstance(event, StepReport):
            return
        if rank == 0:
            with notes.open("a") as file:
                file.write(f"{event.step}\n")
        steps += 1
        if hit is not None and hit.after == steps and hit.how == FULL:
            RunDirectory.write_checkpoint = no_space  # type: ignore[method-assign]
        elif hit is not None and hit.after == steps:
            threading.Thread(target=strike, daemon=True).start()

    if rank == 0 and notes.exists():
        paid = Ledger.read(folder / "RUN" / "ledger.jsonl").charged
        assert paid > max(int(line) for line in notes.read_text().split()), "released and not paid for"
    if hit is not None and hit.after < 0:
        threading.Thread(target=strike, daemon=True).start()
    seed = None if os.environ.get("SEEDLESS") else 7
    found = digest(train(run_dir=folder / "RUN", callbacks=[step], epochs=LONG, seed=seed))
    return {"digest": found, "starts": start + 1}


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


DIFFERING: dict[str, Callable[[bool], dict[str, Any]]] = {
    "plans": lambda odd: {"epsilon": 4.0 + odd},
    "models": lambda odd: {"model": network(8 + odd)},
    "parts": lambda odd: {"model": nn.Sequential(nn.Linear(6, CLASSES), nn.ReLU() if odd else nn.Tanh())},
    "modes": lambda odd: {"model": network().train(not odd)},
    "losses": lambda odd: {"loss": nn.MultiMarginLoss(reduction="none") if odd else LOSS},
    "others": lambda odd: {"dataset": data(seed=int(odd))},
    "shuffled": lambda odd: {"dataset": TensorDataset(*(t.flip(0) if odd else t for t in data().tensors))},
    "limits": lambda odd: {"max_physical_batch": 10 + odd},
    "optimizers": lambda odd: {"lr": 0.5 + odd},
}
"""What one rank is given otherwise than the other."""


def differing(name: str) -> Callable[[Path], str]:
    return lambda folder: refused(lambda: train(**DIFFERING[name](dist.get_rank() == 1)))


JOBS: dict[str, Callable[[Path], Any]] = {
    **{name: differing(name) for name in DIFFERING},
    "kept": lambda folder: digest(train(run_dir=folder / "RUN")),
    "second": lambda folder: refused(lambda: train(run_dir=folder / "RUN")),
    "unhurt": lambda folder: digest(train(run_dir=folder / "UNHURT", epochs=LONG)),
    "resumed": lambda folder: digest(train(run_dir=folder / "RUN", epochs=LONG, resume=True)),
    "fails": lambda folder: failing(3, folder),
    "refuses": lambda folder: refused(lambda: failing(-1, folder)),
    **{
        job.__name__: job
        for job in (every_method, every_way, threads, ended, drifts, unseeded, sharded, hurt)
    },
}


def main() -> None:
    folder, *names = sys.argv[1:]
    left = Path(folder) / f"left.{os.environ['RANK']}.json"
    atexit.register(lambda: left.write_text(json.dumps(not dist.is_initialized())))  # first in, so last
    torch.set_num_threads(1)
    if os.environ.get("OWN_GROUP"):
        dist.init_process_group("gloo")
    else:
        distributed.connect()
    for name in names:
        found = JOBS[name](Path(folder))
        (Path(folder) / f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(found))
    if os.environ.get("OWN_GROUP"):
        dist.destroy_process_group()
    # Under load PyTorch's threads may abort an interpreter that ends beside them, after all work is done.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
