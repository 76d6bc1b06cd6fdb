"""The clipped sums and the layers of Opacus."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gradient_cases import KNOWN, Case, assert_equals_a_plain_loop, by, loss
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip
from sparsedp.grad_sample import ENGINES, BookKeepingEngine, ClippedSumQuery
from sparsedp.parameters import Support
from sparsedp_experiments.models import dp_cnn, mnist_cnn

# An outside check: the dense clipped sums of the papers' CNNs are those of Opacus's hooks.


MODELS = {"mnist-cnn": (mnist_cnn, (1, 28, 28), 24), "dp-cnn": (dp_cnn, (3, 32, 32), 6)}
CLIP_NORM = 0.5


def opacus_clipped_sum(model: nn.Module, rows: tuple[Tensor, Tensor], clip_norm: float) -> Tensor:
    """The sum Opacus's DPOptimizer forms before it adds noise."""
    opacus = pytest.importorskip("opacus")
    from opacus.optimizers import DPOptimizer

    wrapped = opacus.GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        expected_batch_size=len(rows[0]),
    )
    F.cross_entropy(wrapped(rows[0]), rows[1]).backward()
    norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]).norm(dim=0)
    assert float(norms.min()) > max(1.0, 1.5 * CLIP_NORM)
    optimizer.clip_and_accumulate()
    return torch.cat([p.summed_grad.reshape(-1) for p in model.parameters()]).double()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_dense_clipped_sums_are_those_of_opacus(name):
    build, shape, samples = MODELS[name]
    torch.manual_seed(0)
    model = build(shape, 10)
    rows = (4 * torch.randn(samples, *shape), torch.randint(0, 10, (samples,)))
    loss = from_criterion(nn.CrossEntropyLoss(reduction="none"))
    engine = ENGINES["bookkeeping"](model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(CLIP_NORM))
    ours = engine.clipped_sum([MicroBatch(rows)], query)
    theirs = opacus_clipped_sum(model, rows, CLIP_NORM / (1 + ROUNDING_MARGIN))
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


# The layers that Opacus's own grad-sample tests go through: PyTorch's are cases of ours, Opacus's own are here.


opacus = pytest.importorskip("opacus")


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

OURS = {
    **{f"conv{axes}d_test": f"conv{axes}d" for axes in (1, 2, 3)},
    **{f"instance_norm{axes}d_test": f"instance-norm-{axes}d" for axes in (1, 2, 3)},
    **{f"{kind}_norm_test": f"{kind}-norm" for kind in ("group", "layer", "rms")},
    "linear_test": "linear",
    "embedding_test": "embedding",
    "embedding_norm_sample_test": "embedding",
    "embedding_bag_test": "embedding-bag",
}
"""Opacus's files of tests, and how the names of our cases for them begin."""


def of(layer: Callable[..., nn.Module], *args: object, **kwargs: object) -> Callable[[], nn.Module]:
    return lambda: layer(*args, **kwargs)


def sequence_first(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return by(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=layer)


def attention(kind: Callable[..., nn.Module], heads: int, **kwargs: object) -> Callable[[], nn.Module]:
    """Sequences first, as both have it; keys and values of sizes of their own where `kdim` says so."""

    def attend(m: nn.Module, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        keys = x[..., : kwargs.get("kdim", 4)]
        return m.layer(x, keys, keys)[0].transpose(0, 1)

    return by(attend, layer=of(kind, 4, heads, **kwargs))


def recurrent(kind: Callable[..., nn.Module], **kwargs: object) -> Callable[[], nn.Module]:
    batch_first = bool(kwargs.get("batch_first"))

    def run(m: nn.Module, x: Tensor) -> Tensor:
        found = m.layer(x if batch_first else x.transpose(0, 1))[0]
        return found if batch_first else found.transpose(0, 1)

    return by(run, layer=of(kind, 4, 5, **kwargs))


LAYERS: dict[str, dict[str, Case]] = {
    "sequence_bias_test": {
        "batch-first": Case(of(SequenceBias, 4, True), (10, 4)),
        "sequence-first": Case(sequence_first(of(SequenceBias, 4, False)), (10, 4)),
    },
    "dp_multihead_attention_test": {
        f"{kind.__name__}-{name}": Case(attention(kind, heads, **options), (5, 4))
        for kind in (nn.MultiheadAttention, DPMultiheadAttention)
        for name, heads, options in (
            ("plain", 2, {}),
            ("no-bias", 1, {"bias": False}),
            ("key-bias", 2, {"add_bias_kv": True}),
            ("zeros", 2, {"add_zero_attn": True, "add_bias_kv": True}),
            ("other-sizes", 2, {"kdim": 3, "vdim": 3}),
        )
    },
    "dp_rnn_test": {
        f"{kind.__name__}{name}": Case(recurrent(kind, **options), (3, 4))
        for kind in (nn.RNN, DPRNN, nn.GRU, DPGRU, nn.LSTM, DPLSTM)
        for name, options in {
            "": {},
            "-deep": {"num_layers": 2, "batch_first": True},
            "-both-ways": {"bidirectional": True, "batch_first": True},
            "-deep-both-ways-no-bias": {"num_layers": 2, "bidirectional": True, "bias": False},
        }.items()
    },
}
"""By the file of Opacus's tests."""
EVERY = [(file, name) for file, cases in LAYERS.items() for name in cases]


def test_every_layer_that_opacus_tests_is_here():
    folder = Path(opacus.__file__).parent / "tests" / "grad_samples"
    files = {path.stem for path in folder.glob("*_test.py")}
    if not files:
        pytest.skip("this Opacus comes without its tests")
    assert files == LAYERS.keys() | OURS.keys()
    assert all(any(name.startswith(ours) for name in KNOWN) for ours in OURS.values())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("file", "name"), EVERY)
def test_the_layer_is_fast_and_equals_a_plain_loop(file, name, caplog):
    model, rows = LAYERS[file][name].make(torch.float64, 4)
    with caplog.at_level(logging.INFO, logger="sparsedp"):
        assert_equals_a_plain_loop(BookKeepingEngine(model, loss), model, rows, least=1e-6)
    assert caplog.records == []
