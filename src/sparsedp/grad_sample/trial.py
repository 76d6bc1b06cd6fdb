"""A trial of a model before it is trained: rows in different company, in several numbers, under several seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from sparsedp.batch import MicroBatch, PerSampleLoss, Rows, row_count, select_rows
from sparsedp.core.clip import FlatClip
from sparsedp.errors import ModelError
from sparsedp.grad_sample.alone import RowsAlone, distances, single_row
from sparsedp.grad_sample.bookkeeping import BookkeepingEngine
from sparsedp.grad_sample.company import CHANGES, ORDINARY, as_many, in_other_company
from sparsedp.grad_sample.outcomes import (
    LOSS,
    ForwardOutcome,
    Place,
    batched_outputs,
    first_difference,
    run,
    same,
)
from sparsedp.grad_sample.query import Query
from sparsedp.parameters import Layout, Support
from sparsedp.randomness import SEED_BYTES, Chance, PublicRandomness, StepSecret

SIZES = (2, 3, 9, 17)
"""Numbers of rows tried, and then as many as the engine takes at once."""
IN_COMPANY, ALONE = 8, 2
"""Rows compared in one trial with what they are in other company, and with what they are alone."""
COORDINATES = 1 << 14
"""About so many coordinates of a gradient are compared."""

REMEDY = (
    "use a layer that looks at one sample at a time, such as nn.GroupNorm, nn.LayerNorm or nn.InstanceNorm"
)


@dataclass
class Trial:
    """The model in one state of its parameters."""

    model: nn.Module
    loss: PerSampleLoss
    pool: Rows
    fast: bool
    largest: int
    first_seed: int
    before: dict[str, Tensor] = field(init=False)
    batched: frozenset[Place] = field(default=frozenset(), init=False)
    engine: BookkeepingEngine = field(init=False)
    alone: RowsAlone = field(init=False)
    query: Query = field(init=False)
    tolerance: float = field(init=False)

    def __post_init__(self) -> None:
        self.before = state_of(self.model)
        self.engine = BookkeepingEngine(self.model, self.loss)
        self.alone = RowsAlone(self.model, self.loss)
        self.query = Query(_some_coordinates(self.engine.layout), FlatClip(1.0))
        two, three = (self._run(as_many(self.pool, n, 0), range(n), 0) for n in (2, 3))
        self.batched = batched_outputs(two, three)
        self.tolerance = max(two.coarsest, three.coarsest)

    def refuse_by_outputs(self) -> None:
        """Look at what modules give, and the loss."""
        self._refuse_memory()
        for turn, count in enumerate(self._sizes()):
            for parity in (0, 1):
                self._refuse_influence_of_company(count, parity, self.first_seed + 2 * turn + parity)
        self._refuse_writing()
        with _modes_put_back(self.model):
            self._switch_off_randomness()
            for turn, count in enumerate(self._sizes()):
                self._refuse_influence_of_number(count, self.first_seed + turn)

    def refuse_by_gradients(self) -> None:
        """Look at what the fast engine would clip."""
        if not self.fast:
            return
        sizes = self._sizes()[1::2]
        for turn, count in enumerate(sizes):
            self._refuse_gradients_of_company(count, self.first_seed + turn)
        with _modes_put_back(self.model):
            self._switch_off_randomness()
            for turn, count in enumerate(sizes):
                self._refuse_gradients_of_number(count, self.first_seed + turn)

    def _sizes(self) -> list[int]:
        """Numbers of rows to try, the largest that go through the model at once last."""
        most = max(self.largest, 2)
        if self.fast and not self.engine.falls_back:
            self._gradients(as_many(self.pool, 2, 0), [0], 0)
            most = min(most, self.engine.largest_chunk or most)
        smaller = [n for n in SIZES if n < most]
        return [*smaller[len(smaller) % 2 == 0 :], most]

    def _refuse_memory(self) -> None:
        """A forward pass may not make the next one come out otherwise."""
        rows = as_many(self.pool, 8, 1)
        first = self._run(rows, range(8), 0)
        self._refuse_writing()
        self._run(as_many(self.pool, 8, 2), range(8), 1)
        second = self._run(rows, range(8), 0)
        if (place := first_difference(first, second, self.batched)) is not None:
            raise ModelError(
                f"{_at(self.model, place)} gives another result for the same rows and the same random numbers: it "
                "remembers earlier batches, without noise. Make its forward pass depend on its input alone"
            )

    def _refuse_writing(self) -> None:
        """A forward pass may write to no parameter or buffer."""
        for name, value in state_of(self.model).items():
            if not same(self.before[name], value):
                owner = name.rpartition(".")[0]
                raise ModelError(
                    f"{describe(owner, self.model.get_submodule(owner))} updates {name!r} in the forward pass: what "
                    "it remembers of the data is released without noise. Freeze it (for example "
                    f"track_running_stats=False), or {REMEDY}"
                )

    def _refuse_influence_of_company(self, count: int, parity: int, seed: int) -> None:
        """Every other row stays, the rest is exchanged; dropout masks agree by position."""
        rows = as_many(self.pool, count, seed)
        stay = torch.arange(count) % 2 == parity
        which = _spread(stay.nonzero().reshape(-1).tolist(), IN_COMPANY)
        usual, other = self._run(rows, which, seed), self._company(rows, stay, which, seed)[1]
        if (name := first_difference(usual, other, self.batched)) is not None:
            raise _mixing(self.model, name)

    def _refuse_influence_of_number(self, count: int, seed: int) -> None:
        """Rows alone against rows among others, with dropout off, as its masks depend on the number."""
        rows = as_many(self.pool, count, seed)
        which = _spread(list(range(count)), ALONE)
        together = self._run(rows, which, seed)
        for number, place in enumerate(which):
            alone = self._run(select_rows(rows, slice(place, place + 1)), [0], seed)
            if (name := first_difference(together.only(number), alone, self.batched)) is not None:
                raise _mixing(self.model, name)

    def _refuse_gradients_of_company(self, count: int, seed: int) -> None:
        rows = as_many(self.pool, count, seed)
        stay = torch.arange(count) % 2 == 0
        which = _spread(stay.nonzero().reshape(-1).tolist(), IN_COMPANY)
        usual, other = (
            self._gradients(x, which, seed) for x in (rows, self._company(rows, stay, [0], seed)[0])
        )
        if usual is not None and other is not None and self._differ(usual, other, None):
            raise _mixing(self.model, None)

    def _refuse_gradients_of_number(self, count: int, seed: int) -> None:
        rows = as_many(self.pool, count, seed)
        which = _spread(list(range(count)), ALONE)
        if (found := self._gradients(rows, which, seed)) is not None:
            singles = [single_row(_named(rows, seed), i) for i in which]
            expected = torch.stack([self._gradient_alone(single, seed) for single in singles])
            if self._differ(found, expected, singles):
                raise _mixing(self.model, None)

    def _company(self, rows: Rows, stay: Tensor, which: list[int], seed: int) -> tuple[Rows, ForwardOutcome]:
        """Others around the rows that stay, as unlike them as the model can take, and what that gives."""
        for changes in (CHANGES, ORDINARY):
            changed = in_other_company(rows, stay, seed, changes)
            try:
                return changed, self._run(changed, which, seed)
            except Exception:  # for example a sequence of no tokens, or a model that refuses NaN
                continue
        reordered = in_other_company(rows, stay, seed, ())
        return reordered, self._run(reordered, which, seed)

    def _run(self, rows: Rows, which: range | list[int], seed: int) -> ForwardOutcome:
        _seed_everything(seed)
        return run(self.model, self.loss, rows, list(which))

    def _gradients(self, rows: Rows, which: list[int], seed: int) -> Tensor | None:
        """What the fast engine has for these rows among the others; None if it does not answer for this model."""
        if not self.fast or self.engine.falls_back:
            return None
        found: dict[int, Tensor] = {}
        start = 0

        def see(chunk: MicroBatch, in_company: Callable[[int], Tensor], norms: Tensor | None) -> None:
            nonlocal start
            for place in which:
                if start <= place < start + chunk.row_count:
                    found[place] = in_company(place - start)
            start += chunk.row_count

        _seed_everything(seed)
        self.engine.clipped_sum([_named(rows, seed)], self.query, see)
        return None if self.engine.falls_back else torch.stack([found[place] for place in which])

    def _gradient_alone(self, single: MicroBatch, seed: int) -> Tensor:
        _seed_everything(seed)
        return self.query.support.gather(self.alone.gradient(single)).double()

    def _differ(self, one: Tensor, two: Tensor, singles: list[MicroBatch] | None) -> bool:
        """Whether rows have two different gradients, beyond what rounding does; a single one of several may."""
        apart = distances(one, two)
        sizes = torch.maximum(torch.linalg.vector_norm(one, dim=1), torch.linalg.vector_norm(two, dim=1))
        usual = float(sizes.nan_to_num().square().mean().sqrt())
        differing = 0
        for number in (
            (~(apart <= self.tolerance * sizes.clamp(min=usual / 10))).nonzero().reshape(-1).tolist()
        ):
            rounding = 0.0
            if singles is not None:
                moved = self.alone.jittered(singles[number])
                rounding = max(
                    (float(distances(self.query.support.gather(g), two[number])) for g in moved), default=0.0
                )
            differing += not float(apart[number]) <= 4 * rounding
        return differing >= min(2, len(one))

    def _is_random(self) -> bool:
        rows = as_many(self.pool, 8, 1)
        return not same(self._run(rows, range(8), 0).losses, self._run(rows, range(8), 1).losses)

    def _switch_off_randomness(self) -> None:
        if not self._is_random():
            return
        for module in self.model.modules():
            if isinstance(module, _DropoutNd):
                module.eval()
        if self._is_random():
            self.model.eval()


def _mixing(model: nn.Module, name: str | None) -> ModelError:
    if name is None:
        return ModelError(
            "the gradient of one sample changes with the others in the batch, though no module's output does, so "
            f"clipping protects nobody; look for rows that are sorted, averaged or counted, and {REMEDY}"
        )
    if name == LOSS:
        return ModelError(
            "the loss of one sample changes with the others in the batch, though no module's output does; write the "
            "loss (and anything the model computes outside its modules) so that each row stands alone"
        )
    return ModelError(
        f"{_at(model, name)} mixes samples, or is handed mixed ones: its output for one sample changes with the "
        f"others in the batch, so clipping protects nobody; {REMEDY}"
    )


def _named(rows: Rows, seed: int) -> MicroBatch:
    """Rows with random numbers of their own."""
    secret = StepSecret(seed.to_bytes(SEED_BYTES, "little"))
    return MicroBatch(rows, chance=Chance(secret, torch.arange(row_count(rows))))


def _spread(places: list[int], most: int) -> list[int]:
    """Some of these places, the first and the last among them."""
    if len(places) <= most:
        return places
    return [places[round(i * (len(places) - 1) / (most - 1))] for i in range(most)]


def _some_coordinates(layout: Layout) -> Support:
    """Coordinates of every parameter, all of the small ones."""
    each = max(16, COORDINATES // len(list(layout)))
    public = PublicRandomness(0)
    parts = [
        slot.offset
        + (torch.arange(slot.size) if slot.size <= each else public.permutation(slot.size, (0,))[:each])
        for slot in layout
    ]
    return Support(torch.cat(parts), layout.dimension)


def _seed_everything(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


@contextmanager
def _modes_put_back(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _at(model: nn.Module, name: str) -> str:
    return "the loss" if name == LOSS else describe(name, model.get_submodule(name))


def describe(name: str, module: nn.Module) -> str:
    """A module in words."""
    kind = type(module).__name__
    return f"module {name!r} ({kind})" if name else f"the model itself ({kind})"
