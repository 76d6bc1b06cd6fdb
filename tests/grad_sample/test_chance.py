"""Random numbers inside a model belong to the row: the same in any company, any chunk and either engine."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsedp.batch import MicroBatch
from sparsedp.core.clip import FlatClip
from sparsedp.errors import ModelError
from sparsedp.grad_sample import ENGINES, Query, make_engine
from sparsedp.grad_sample.chances import Chances
from sparsedp.parameters import Support
from sparsedp.randomness import Chance, SeededRandomness, StepSecret, SystemRandomness

CLIP = 0.1
SECRET = SeededRandomness(5).secret((0,))


class DropPath(nn.Module):
    """Stochastic depth: a row skips its branch as a whole."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.7)
        return x + self.inner(x) * keep / 0.7


class SharedMask(nn.Module):
    """One mask for all rows of a step."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[1:]) < 0.5)


class Layerdrop(nn.Module):
    """Control flow on a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x if float(torch.rand(())) < 0.5 else F.dropout(self.inner(x), 0.3)


class Gumbel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(x) + 0.1 * torch.randn_like(x)


class NumpyNoise(nn.Module):
    """Draws as many numbers as there are rows, from NumPy's and Python's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() + torch.from_numpy(np.random.standard_normal(x.shape)).to(x)  # noqa: NPY002


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Sequence(nn.Module):
    """A transformer or recurrent layer over three positions."""

    def __init__(self, layer: nn.Module, batch_first: bool = True) -> None:
        super().__init__()
        self.layer, self.batch_first = layer, batch_first

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.stack([x, x.roll(1, 1), -x], dim=1)
        found = self.layer(steps if self.batch_first else steps.transpose(0, 1))
        found = found[0] if isinstance(found, tuple) else found
        return found.mean(1 if self.batch_first else 0)


class Attention(nn.Module):
    """With weights asked for, heads and samples share an axis of the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


MODELS = {
    "dropout": lambda: nn.Dropout(0.5),
    "nested dropout": lambda: nn.Sequential(
        nn.Dropout(0.2), nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Dropout(0.4)), nn.AlphaDropout(0.1)
    ),
    "feature dropout": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.Dropout1d(0.5), nn.Conv1d(3, 3, 1), nn.Flatten()
    ),
    "stochastic depth": lambda: DropPath(nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
    "shared mask": SharedMask,
    "gumbel and normal": Gumbel,
    "checkpointed": Checkpointed,
    "layer drop": Layerdrop,
    "NumPy and Python": NumpyNoise,
    "random slope": nn.RReLU,
    "transformer": lambda: Sequence(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)),
    "transformer, sequence first": lambda: Sequence(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3), False),
    "attention": lambda: Sequence(Attention()),
    "gru": lambda: Sequence(nn.GRU(6, 6, 2, dropout=0.5, batch_first=True)),
}
FAST = {
    "dropout",
    "nested dropout",
    "feature dropout",
    "stochastic depth",
    "shared mask",
    "gumbel and normal",
}


def model_with(name: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), MODELS[name](), nn.Linear(6, 2))


def loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def data(count: int, features: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = 3 * torch.randn(count, features, generator=generator)
    return inputs, torch.randint(0, 2, (count,), generator=generator)


def total(
    engine: object,
    rows: tuple[Tensor, Tensor],
    names: list[int],
    split: int | None = None,
    secret: StepSecret = SECRET,
) -> Tensor:
    """The clipped sum of the rows with these names, in that order, cut into micro-batches."""
    query = Query(Support.full(engine.layout.dimension), FlatClip(CLIP))
    index = torch.tensor(names)
    batches = [
        MicroBatch(tuple(part[piece] for part in rows), chance=Chance(secret, piece))
        for piece in index.split(split or len(names))
    ]
    return engine.clipped_sum(batches, query)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_one_record_moves_the_sum_by_the_clip_norm_at_most_wherever_it_stands(name, kind):
    engine, rows = make_engine(model_with(name), loss, kind), data(12)
    without = total(engine, rows, list(range(11)))
    for place in (0, 5, 11):
        order = [*range(place), 11, *range(place, 11)]
        moved = float((total(engine, rows, order) - without).norm())
        assert 0 < moved <= CLIP * 1.0001


@pytest.mark.parametrize("name", MODELS)
def test_engines_and_micro_batches_agree(name):
    model, rows = model_with(name), data(10)
    fast, plain = (make_engine(model, loss, kind) for kind in ("bookkeeping", "reference"))
    expected = total(plain, rows, list(range(10)))
    for found in (
        total(fast, rows, list(range(10))),
        total(fast, rows, list(range(10)), split=4),
        total(plain, rows, list(reversed(range(10))), split=3),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * CLIP * 10)
    assert not torch.allclose(
        total(fast, rows, list(range(10)), secret=StepSecret(bytes(32))), expected, rtol=1e-2
    )
    assert not (fast.falls_back and name in FAST)


@pytest.mark.parametrize("kind", ENGINES)
def test_the_attacked_model_moves_by_c_and_not_by_fifty(kind):
    """Dropout and a linear layer, N = 3000, full batches: 47 to 60 C before."""
    torch.manual_seed(0)
    count = 3000 if kind == "bookkeeping" else 50
    engine = make_engine(nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 2)), loss, kind)
    rows = data(count + 1, 40)
    without = total(engine, rows, list(range(count)))
    for order in ([*range(count), count], [*range(count // 2), count, *range(count // 2, count)]):
        assert 0 < float((total(engine, rows, order) - without).norm()) <= CLIP * 1.0001


@pytest.mark.parametrize("kind", ENGINES)
def test_dropout_and_gradient_are_those_of_pytorch_given_the_mask(kind):
    """The keyed mask keeps the rate, and the gradient is the ordinary one through it."""
    model = nn.Sequential(nn.Dropout(0.25), nn.Linear(4000, 1, bias=False))
    engine = make_engine(model, lambda model, rows: model(rows)[:, 0], kind)
    query = Query(Support.full(4000), FlatClip(1e9))
    for name in range(3):
        batch = MicroBatch(torch.ones(1, 4000), chance=Chance(SECRET, torch.tensor([name])))
        gradient = engine.clipped_sum([batch], query)
        torch.testing.assert_close(
            gradient[gradient != 0], torch.full_like(gradient[gradient != 0], 1 / 0.75)
        )
        assert stats.binomtest(int((gradient != 0).sum()), 4000, 0.75).pvalue > 1e-6


DISTRIBUTIONS = {
    "rand": (lambda n: torch.rand(n, 500), stats.uniform()),
    "rand in float64": (lambda n: torch.rand(n, 500, dtype=torch.float64), stats.uniform()),
    "uniform": (lambda n: torch.empty(n, 500).uniform_(-1, 3), stats.uniform(-1, 4)),
    "normal": (lambda n: torch.empty(n, 500).normal_(2, 3), stats.norm(2, 3)),
    "randn": (lambda n: torch.randn(n, 500), stats.norm()),
    "exponential": (lambda n: torch.empty(n, 500).exponential_(2.0), stats.expon(scale=0.5)),
}


def drawn(draw: object, rows: Tensor, secret: StepSecret = SECRET) -> Tensor:
    """What a model draws for rows of these names, seen through the gradient of a weight of ones."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(500, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return draw(len(x)).to(torch.float64) @ self.weight

    engine = make_engine(Drawing(), lambda model, rows: model(rows), "reference")
    query = Query(Support.full(500), FlatClip(1e9))
    single = [MicroBatch(torch.ones(1, 1), chance=Chance(secret, rows[i : i + 1])) for i in range(len(rows))]
    return torch.stack([engine.clipped_sum([batch], query) for batch in single])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_keyed_numbers_have_pytorchs_distribution(name):
    draw, law = DISTRIBUTIONS[name]
    found = drawn(draw, torch.arange(10)).flatten().numpy()
    assert stats.kstest(found, law.cdf).pvalue > 1e-6
    assert len(np.unique(found)) > 0.98 * len(found)


def test_keyed_integers_are_uniform():
    found = drawn(lambda n: torch.randint(2, 9, (n, 500)), torch.arange(10)).flatten().long()
    counts = torch.bincount(found, minlength=9)
    assert int(counts[:2].sum()) == 0
    assert stats.chisquare(counts[2:].numpy()).pvalue > 1e-6


def test_rows_steps_and_draws_have_nothing_to_do_with_each_other():
    first = drawn(lambda n: torch.randn(n, 500), torch.arange(40))
    other_step = drawn(lambda n: torch.randn(n, 500), torch.arange(40), SeededRandomness(5).secret((1,)))
    second_draw = drawn(lambda n: (torch.randn(n, 500), torch.randn(n, 500))[1], torch.arange(40))
    every = torch.cat([first, other_step, second_draw]).numpy()
    correlation = np.corrcoef(every) - np.eye(len(every))
    assert np.abs(correlation).max() < 7 / np.sqrt(500)


def test_system_secrets_are_fresh_and_never_shown():
    one, other = (SystemRandomness().secret((0,)) for _ in range(2))
    assert one.key != other.key
    assert repr(one) == "StepSecret()"
    assert one.key.hex() not in repr(MicroBatch(torch.ones(1), chance=Chance(one, torch.tensor([0]))))


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_generator_of_its_own_is_refused_by_the_name_of_the_module(kind):
    engine = make_engine(nn.Sequential(nn.Linear(6, 6), OwnGenerator(), nn.Linear(6, 2)), loss, kind)
    with pytest.raises(ModelError, match=r"module '1' \(OwnGenerator\) draws from a torch.Generator"):
        total(engine, data(4), [0, 1, 2, 3])


class DrawsForSome(nn.Module):
    """Draws when it meets a negative number; the first row of the data has none."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        if self.extra:
            x = F.dropout(x, 0.5)
        return F.dropout(x, 0.5) if bool((x < -100).any()) else x


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("extra", [False, True])
def test_draws_that_depend_on_the_rows_are_refused(kind, extra):
    rows = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    rows[0][3] = -1000.0
    engine = make_engine(nn.Sequential(DrawsForSome(extra), nn.Linear(6, 2)), loss, kind)
    total(engine, rows, [0, 1, 2])
    with pytest.raises(ModelError, match="for a trial"):
        total(engine, rows, [0, 1, 2, 3])


@pytest.mark.parametrize("kind", ENGINES)
def test_rows_without_names_are_refused_only_where_numbers_are_drawn(kind):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))
    engine = make_engine(model, loss, kind)
    query = Query(Support.full(14), FlatClip(1.0))
    with pytest.raises(ModelError, match=r"model.eval\(\)"):
        engine.clipped_sum([MicroBatch(data(4))], query)
    model.eval()
    assert bool(engine.clipped_sum([MicroBatch(data(4))], query).isfinite().all())


def test_a_model_that_draws_nothing_is_told_from_one_that_does():
    rows = data(3)
    assert Chances(nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 2)), loss).of(rows) == ()
    model = nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 2))
    chances = Chances(model, loss)
    assert chances.of(rows) == ()
    model[0].p = 0.5
    assert [draw.expected(9) for draw in chances.of(rows)] == [(9, 6)]
