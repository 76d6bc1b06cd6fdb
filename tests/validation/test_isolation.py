"""Attacks on the isolation of examples: refused before the first step, or one record moves no sum by more than C.

What a user writes without meaning harm comes first, as found in the wild; then what tries to look past the isolation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import sparsedp
from sparsedp.batch import MicroBatch, concat_batches, from_criterion, slice_batch
from sparsedp.clipping import FlatClip
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery, make_engine
from sparsedp.grad_sample.isolation import same_draws, why_not_isolated
from sparsedp.parameters import Support
from sparsedp.randomness import SeededRandomness
from sparsedp.validation.model import ModelValidation
from sparsedp.validation.state import StateGuard

ROWS, WIDTH, CLASSES = 96, 6, 3
Rows = tuple[Tensor, Tensor]


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, CLASSES)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self, self.body(x)))


def mixed(h: Tensor) -> Tensor:
    return h - 5 * h.mean(0)


def unseen(h: Tensor) -> Tensor:
    """Mixes in the backward pass alone, whatever the rows hold."""
    mean = h.nan_to_num(0.0, 0.0, 0.0).mean(0)
    return h + 5 * (mean - mean.detach())


class MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g + 5 * g.mean(0)


def hooked(module: nn.Module, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g / g.norm() * 3)
    return h


def remembering(module: nn.Module, h: Tensor) -> Tensor:
    before = vars(module).get("last", 0.0)
    vars(module)["last"] = h.detach().mean(0)
    return h + 5 * before


def backward_hooked() -> nn.Module:
    model = Between(lambda m, h: h.tanh())
    model.head.register_full_backward_hook(lambda m, i, o: tuple(g - g.mean(0) for g in i))
    return model


class WithCapacity(nn.Module):
    """A mixture of two experts that drops the rows for which an expert has no room."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))
        self.room = 24

    def forward(self, x: Tensor) -> Tensor:
        out = 0.0
        for number, expert in enumerate(self.experts):
            chosen = (x[:, 0] > 0) == bool(number)
            fits = chosen & (chosen.cumsum(0) <= self.room)
            out = out + expert(x) * fits.unsqueeze(1)
        return out


def table(identical: bool = False, count: int = ROWS) -> Rows:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, WIDTH, generator=generator)
    if identical:
        x[:16] = x[0]
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


@dataclass(frozen=True)
class Case:
    """A model, its rows, and a record that pulls at the others."""

    model: Callable[[], nn.Module]
    rows: Callable[[], Rows] = table


def extreme(rows: Rows) -> Rows:
    """One record that shifts means, comes first when sorted and asks for the first expert."""
    x = rows[0][:1].clone()
    return torch.full_like(x, 30.0 if x.is_floating_point() else 7), rows[1][:1]


CASES = {
    "rows sorted by length": Case(lambda: Text("sort"), lambda: padded_texts(6, ROWS)),
    "tensor hook": Case(lambda: Between(hooked)),
    "custom backward": Case(lambda: Between(lambda m, h: MeanInBackward.apply(h))),
    "detach trick": Case(lambda: Between(lambda m, h: unseen(h))),
    "detach trick in more than three rows": Case(
        lambda: Between(lambda m, h: unseen(h) if len(h) > 3 else h)
    ),
    "backward hook minus the mean": Case(backward_hooked),
    "only rows that are not finite": Case(lambda: Between(lambda m, h: h + 0 * h.mean(0))),
    "only in more than 16 rows": Case(lambda: Between(lambda m, h: mixed(h) if len(h) > 16 else h)),
    "only in more than 64 rows": Case(lambda: Between(lambda m, h: mixed(h) if len(h) > 64 else h)),
    "only with gradients": Case(lambda: Between(lambda m, h: mixed(h) if torch.is_grad_enabled() else h)),
    "with probability 0.3": Case(
        lambda: Between(lambda m, h: mixed(h) if float(torch.rand(())) < 0.3 else h)
    ),
    "expert capacity": Case(WithCapacity),
    "memory in an attribute": Case(lambda: Between(remembering)),
    "batch mean, first rows identical": Case(
        lambda: Between(lambda m, h: h - h.mean(0)), lambda: table(identical=True)
    ),
    "batch mean, a single row": Case(lambda: Between(lambda m, h: h - h.mean(0)), lambda: table(count=1)),
}


class LongSequences(nn.Module):
    """A recurrent network that puts time first: its eight steps are no rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTM(WIDTH, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.cell(x.unsqueeze(0) * torch.linspace(-1, 1, 8).to(x).reshape(8, 1, 1))[0]
        return self.head(steps[-1])


class Transformer(nn.Module):
    """A masked transformer, the mask [L, L] as long as one of the trial's batches."""

    def __init__(self, dtype: torch.dtype, length: int = 9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, length * 4)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(4, CLASSES)
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool())
        self.length, self.dtype = length, dtype
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x.to(self.dtype)).reshape(-1, self.length, 4)
        for layer in self.layers:
            h = layer(h, src_mask=self.mask)
        return self.head(h.mean(1))


SOUND = {
    "LSTM with eight time steps first": LongSequences,
    "transformer with a square mask": lambda: Transformer(torch.float32),
    "bfloat16 transformer": lambda: Transformer(torch.bfloat16),
    "float16 transformer": lambda: Transformer(torch.float16),
    "double precision": lambda: Transformer(torch.float64),
    "dropout": lambda: Between(lambda m, h: F.dropout(h, 0.5, m.training)),
    "saturated": lambda: Between(lambda m, h: h * 1e3),
    "kinks everywhere": lambda: Between(lambda m, h: (h * 1e6).relu().clamp(max=1)),
}


def loss(model: Callable[..., Tensor], rows: Rows) -> Tensor:
    return F.cross_entropy(model(rows[0]).float(), rows[1], reduction="none")


CLIP, REFUSED = 0.1, "refused"


def movement(
    make: Callable[[], nn.Module], loss: Callable[..., Tensor], rows: Any, target: Any, *, present: int
) -> float | str:
    """The most by which the target, in the batch of one step, moves the sum of any step, over C.

    Both runs are validated on rows without the target. A refusal after the first step began is an error here.
    """
    runs: list[list[Tensor]] = []
    for member in (False, True):
        torch.manual_seed(0)
        model = make()
        try:
            validation = ModelValidation(model, loss, slice_batch(rows, slice(8)))
            guard = StateGuard(model, loss, lambda validation=validation: validation.examples)
            validation.check()
            engine = make_engine(model, loss)
            guard.check()
        except SparseDPError:
            return REFUSED
        query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(CLIP))
        sums = []
        for step in range(3):
            batch = concat_batches([target, rows]) if member and step == present else rows
            with same_draws(), guard.untouched(last_of_epoch=True):
                sums.append(engine.clipped_sum([MicroBatch(batch)], query))
        runs.append(sums)
    return max(float((a - b).norm()) for a, b in zip(*runs, strict=True)) / CLIP


def assert_bounded(
    make: Callable[[], nn.Module], loss: Any, rows: Any, target: Any, *, sound: bool = False
) -> None:
    for present in (0, 1):
        moved = movement(make, loss, rows, target, present=present)
        assert moved == REFUSED or float(moved) <= 1.0
        assert not sound or float(moved) > 0.9


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_mixes_rows_is_refused_or_moves_by_at_most_c(name):
    rows = CASES[name].rows()
    rows = rows if len(rows[0]) > 8 else table(count=9)
    assert_bounded(CASES[name].model, loss, rows, extreme(rows))


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_trains_and_moves_by_at_most_c(name):
    assert_bounded(SOUND[name], loss, table(count=24), extreme(table()), sound=True)


# What ordinary users write.


def padded_texts(longest: int, count: int = 40) -> Rows:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator)
    tokens = torch.randint(1, 20, (count, 12), generator=generator)
    return tokens * (torch.arange(12) < lengths.unsqueeze(1)), torch.arange(count) % CLASSES


class Text(nn.Module):
    """Word vectors, and one of the usual ways to look at the lengths of a batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words, self.cell, self.head = nn.Embedding(20, 8), nn.GRUCell(8, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens > 0).sum(1)
        if self.how == "trim":
            return self.head(self.words(tokens)[:, : int(lengths.max())].mean(1))
        if self.how == "sort":
            order = lengths.argsort(descending=True, stable=True)
            return self.head(self.words(tokens[order]).mean(1))[order.argsort(stable=True)]
        state = self.words.weight.new_zeros(len(tokens), 8)
        for t in range(int(lengths.max())):
            state = self.cell(self.words(tokens[:, t]), state)
        return self.head(state)


class Scaled(nn.Module):
    """A column divided by its maximum, beyond what is usual."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        amount = x[:, :1] / x[:, :1].max().clamp(min=10.0)
        return self.head(torch.cat([amount, x[:, 1:]], 1))


def by_positives(output: Tensor, target: Tensor) -> Tensor:
    rare = (target == 2).long()
    return CRITERION(output, target) / rare.sum().clamp(min=1)


CRITERION = nn.CrossEntropyLoss(reduction="none")
LONG = torch.full((1, 12), 7), torch.zeros(1, dtype=torch.int64)
HUGE = torch.cat([torch.full((1, 1), 1e4), torch.ones(1, WIDTH - 1)], 1), torch.full((1,), 2)
FEW = table(count=40)[0], table(count=40)[1] % 2
ORDINARY: dict[str, tuple[Callable[[], nn.Module], Any, Rows, Rows]] = {
    "trimmed to the longest": (lambda: Text("trim"), CRITERION, padded_texts(6), LONG),
    "a loop to the longest": (lambda: Text("loop"), CRITERION, padded_texts(6), LONG),
    "sorted by length and back": (lambda: Text("sort"), CRITERION, padded_texts(6), LONG),
    "divided by the number of positives": (lambda: nn.Linear(WIDTH, CLASSES), by_positives, FEW, HUGE),
    "divided by the largest amount": (Scaled, CRITERION, table(count=40), HUGE),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_ordinary_users_write_is_refused_or_moves_by_at_most_c(name):
    make, criterion, rows, target = ORDINARY[name]
    assert_bounded(make, from_criterion(criterion), rows, target)


@pytest.mark.parametrize("door", ["fit", "make_private"])
@pytest.mark.parametrize("name", ORDINARY)
def test_the_target_moves_a_run_by_at_most_c_whichever_door_it_enters(name, door, monkeypatch):
    """Two whole runs of full batches, with and without the target; seen are the sums before the noise."""
    make, criterion, rows, target = ORDINARY[name]
    sums: list[Tensor] = []
    real = BookKeepingEngine.clipped_sum

    def seen(self: Any, batches: Any, query: Any) -> Tensor:
        with same_draws():
            sums.append(real(self, batches, query))
        return sums[-1].clone()

    monkeypatch.setattr(BookKeepingEngine, "clipped_sum", seen)
    monkeypatch.setattr(
        SeededRandomness, "bernoulli", lambda self, rate, size, key: np.ones(size, dtype=bool)
    )
    rows = tuple(leaf[:20] for leaf in rows)
    others = tuple(torch.cat([leaf[:1], leaf]) for leaf in rows)  # as many rows, so that the plan is the same
    for data in (others, tuple(torch.cat([a, b]) for a, b in zip(target, rows, strict=True))):
        torch.manual_seed(0)
        how = {"epsilon": 50.0, "delta": 1e-2, "epochs": 2, "accountant": "rdp", "seed": 0}
        model, dataset = make(), TensorDataset(*data)
        try:
            if door == "fit":
                how |= {"max_grad_norm": CLIP, "batch_size": 10, "progress": False}
                sparsedp.fit(model, dataset, criterion, lr=0.1, **how)
            else:
                train_by_hand(model, DataLoader(dataset, batch_size=10), criterion, how)
        except SparseDPError:
            assert not sums
            return
    first, second = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    assert len(first) == len(second) >= 2
    # One record was replaced by another, so the first sums differ by at most twice C; later weights differ.
    assert float((first[0] - second[0]).norm()) <= 2 * CLIP


def train_by_hand(model: nn.Module, loader: Any, criterion: Any, how: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = sparsedp.make_private(model, optimizer, loader, criterion, max_grad_norm=CLIP, **how)
    for x, y in private.loader:
        private.optimizer.zero_grad()
        private.criterion(private.model(x), y).backward()
        private.optimizer.step()


# What tries to look past the isolation.


def rare(h: Tensor) -> Tensor:
    return h.detach().abs().max() > 8


class OwnRule(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, axes, x):
        x = x.movedim(axes[0], 0)
        return torch.where(rare(x), x - 5 * x.mean(0), x), 0


@torch.library.custom_op("sparsedp_tests::own_rule", mutates_args=())
def own_rule(x: Tensor) -> Tensor:
    return x.clone()


@own_rule.register_vmap
def _own_rule_of_all(info, axes, x):
    return OwnRule.vmap(info, axes, x)


class Below(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return torch.where(rare(found), mixed(found), found) if "tanh" in str(func) else found


class OnInputs(nn.Module):
    """A linear layer on what a function makes of the inputs; `memory` is its own."""

    def __init__(self, of_inputs: Callable[[Any, Tensor], Tensor], **own: object) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.of_inputs, self.memory = of_inputs, []
        self.register_buffer("running", torch.zeros(()))
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.of_inputs(self, x))


def under_a_mode(module: Any, x: Tensor) -> Tensor:
    with Below():
        return x.tanh()


def seeded(module: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x @ torch.randn(WIDTH, WIDTH)


def in_a_fork(draw: Callable[[Any, Tensor], Tensor], module: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return draw(module, x)


def remembered(keep: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], Tensor]:
    def of_inputs(module: Any, x: Tensor) -> Tensor:
        before = module.memory[-1] if module.memory else 0.0
        keep(module, x.detach())
        return x + 5 * before

    return of_inputs


def written(module: Any, x: Tensor) -> Tensor:
    module.running.data.copy_(torch.maximum(module.running, x.detach().abs().max()))
    return x / (1 + module.running)


def assigned(module: Any, x: Tensor) -> Tensor:
    module.running = torch.maximum(module.running, x.detach().abs().max())
    return x / (1 + module.running)


def on_the_weight(module: Any, x: Tensor) -> Tensor:
    before = getattr(module.head.weight, "memo", 0.0)
    module.head.weight.memo = x.detach().mean()
    return x + before


def by_default(module: Any, x: Tensor, memory: list[Tensor] = []) -> Tensor:  # noqa: B006
    memory.append(x.detach().mean())
    return x + 5 * memory[0]


LOOKING: dict[str, Callable[[], nn.Module]] = {
    "where, on a rare value": lambda: Between(lambda m, h: torch.where(rare(h), mixed(h), h)),
    "if, on a rare value": lambda: Between(lambda m, h: mixed(h) if rare(h) else h),
    "by NumPy": lambda: Between(lambda m, h: mixed(h) if h.detach().numpy().max() > 8 else h),
    "by tolist": lambda: Between(lambda m, h: mixed(h) if max(h.detach().flatten().tolist()) > 8 else h),
    "compiled": lambda: torch.compile(Between(lambda m, h: torch.where(rare(h), mixed(h), h))),
    "checkpointed": lambda: Between(
        lambda m, h: checkpoint(lambda h: torch.where(rare(h), mixed(h), h), h, use_reentrant=False)
    ),
    "checkpointed, reentrant": lambda: Between(lambda m, h: checkpoint(mixed, h, use_reentrant=True)),
    "a function with a vmap of its own": lambda: OnInputs(lambda m, x: OwnRule.apply(x)),
    "the same inside": lambda: Between(lambda m, h: OwnRule.apply(h)),
    "an operator with a batching rule of its own": lambda: OnInputs(lambda m, x: own_rule(x)),
    "a dispatch mode": lambda: OnInputs(under_a_mode),
    "a generator of its own": lambda: OnInputs(
        lambda m, x: x * torch.rand(x.shape, generator=m.own), own=torch.Generator().manual_seed(0)
    ),
    "a NumPy generator of its own": lambda: OnInputs(
        lambda m, x: x * m.own.random(), own=np.random.default_rng(0)
    ),
    "a Python generator of its own": lambda: OnInputs(lambda m, x: x * m.own.random(), own=random.Random(0)),
    "the global generator, seeded": lambda: OnInputs(seeded),
    "the global generator, seeded in a fork": lambda: OnInputs(lambda m, x: in_a_fork(seeded, m, x)),
    "an iterator": lambda: OnInputs(lambda m, x: x * (1 + next(m.own) % 3), own=iter(range(10**6))),
    "a list": lambda: OnInputs(remembered(lambda m, x: m.memory.append(x.mean()))),
    "a list of a mean of wrappers": lambda: OnInputs(remembered(lambda m, x: m.memory.append(x))),
    "a buffer written behind the counter": lambda: OnInputs(written),
    "a buffer assigned": lambda: OnInputs(assigned),
    "an attribute of a weight": lambda: OnInputs(on_the_weight),
    "a default argument": lambda: OnInputs(by_default),
    "the norm of the batch": lambda: OnInputs(lambda m, x: x / x.norm()),
}


@pytest.mark.parametrize("name", LOOKING)
def test_a_look_past_the_isolation_is_refused_or_moves_by_at_most_c(name):
    try:
        assert_bounded(LOOKING[name], loss, table(count=40), extreme(table()))
    except (RuntimeError, TypeError, ValueError) as error:  # the model's own, on made-up examples
        assert re.search("vmap|size|escaped", str(error))  # noqa: PT017


@pytest.mark.parametrize("kind", ENGINES)
def test_what_a_model_does_in_one_mode_is_not_taken_for_what_it_does_in_another(kind):
    def drop(module: Any, x: Tensor) -> Tensor:
        return x * random.random() if module.training else x

    alone: list[bool] = []

    def watched(model: Any, rows: Rows) -> Tensor:
        alone.append(not is_functorch_wrapped_tensor(rows[0]))
        return loss(model, rows)

    model = OnInputs(drop).eval()
    engine = make_engine(model, watched, kind)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))
    engine.clipped_sum([MicroBatch(table())], query)
    assert sum(alone) < 10
    model.train()
    engine.clipped_sum([MicroBatch(table())], query)
    assert sum(alone) > ROWS


@pytest.mark.parametrize("draw", [seeded, lambda m, x: in_a_fork(seeded, m, x)])
def test_a_generator_that_the_model_seeds_is_refused(draw):
    """Its numbers are known and go by an example's place, so one example more gives all others other numbers."""
    with pytest.raises(ModelError, match="seeds torch's generator"):
        why_not_isolated(OnInputs(draw), loss, table())


@pytest.mark.parametrize(
    ("draw", "whose"),
    [(random.random, "Python's"), (lambda: float(np.random.rand()), "NumPy's")],  # noqa: NPY002
)
def test_numbers_that_vectorised_examples_would_share_are_drawn_example_by_example(draw, whose):
    """One example more moves the ends of the chunks, and so would give their neighbours other numbers."""
    reason = why_not_isolated(OnInputs(lambda m, x: x * draw()), loss, table())
    assert reason is not None
    assert whose in reason


@pytest.mark.parametrize(
    "leaf", [np.arange(9), [object()] * 9, {"a": {1, 2}}], ids=["an array", "objects", "a set"]
)
def test_a_batch_that_cannot_be_taken_apart_by_example_is_refused(leaf):
    """Every example would be given all of it: lengths in an array, for example."""
    with pytest.raises(SparseDPError, match="cannot be taken apart"):
        MicroBatch((torch.zeros(9, 2), leaf))
