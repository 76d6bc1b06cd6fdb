"""The clipped sums and the layers of Opacus."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_cases import Case, by, clipped_sum, loss, measured, median_norm, plain_loop, supports
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

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


# The layers that Opacus's own grad-sample tests go through, with their options: fast, and equal to a plain loop.


opacus = pytest.importorskip("opacus")


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


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


def packed(kind: Callable[..., nn.Module], *, in_order: bool, **kwargs: object) -> Callable[[], nn.Module]:
    """Lengths by a row's own content, or all rows in order of a public length."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 2) if in_order else 1 + (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0)
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order)
        return pad_packed_sequence(m.layer(rows)[0], batch_first=True, total_length=3)[0]

    return by(run, layer=of(kind, 4, 5, batch_first=True, **kwargs))


RECURRENT = {"rnn": (nn.RNN, DPRNN), "gru": (nn.GRU, DPGRU), "lstm": (nn.LSTM, DPLSTM)}
OPTIONS = {
    "": {},
    "-deep": {"num_layers": 2, "batch_first": True},
    "-both-ways": {"bidirectional": True, "batch_first": True},
    "-deep-both-ways-no-bias": {"num_layers": 2, "bidirectional": True, "bias": False},
}

LAYERS: dict[str, dict[str, Case]] = {
    "linear_test": {
        "flat": Case(of(nn.Linear, 10, 12), (10,)),
        "sequence": Case(of(nn.Linear, 10, 12, bias=False), (3, 10)),
        "grid": Case(of(nn.Linear, 10, 12), (3, 2, 10)),
        "sequence-first": Case(sequence_first(of(nn.Linear, 10, 12)), (3, 10)),
    },
    "conv1d_test": {
        "plain": Case(of(nn.Conv1d, 3, 6, 2), (3, 7)),
        "everything": Case(of(nn.Conv1d, 32, 64, 3, 2, 2, 2, 4), (32, 9)),
        "same": Case(of(nn.Conv1d, 3, 1, 3, padding="same"), (3, 6)),
        "depthwise": Case(of(nn.Conv1d, 6, 12, 3, 2, 1, 2, 6), (6, 9)),
    },
    "conv2d_test": {
        "plain": Case(of(nn.Conv2d, 1, 2, 4), (1, 11, 12)),
        "everything": Case(of(nn.Conv2d, 32, 16, 3, 2, 2, 3, 8), (32, 11, 12)),
        "by-axis": Case(of(nn.Conv2d, 3, 4, (2, 3), (1, 2), (0, 2), (3, 1)), (3, 11, 13)),
        "same": Case(of(nn.Conv2d, 3, 6, 2, padding="same", dilation=2), (3, 11, 11)),
        "depthwise": Case(of(nn.Conv2d, 3, 6, (2, 3), (1, 2), 2, (3, 1), 3), (3, 11, 12)),
    },
    "conv3d_test": {
        "plain": Case(of(nn.Conv3d, 3, 6, 2), (3, 3, 6, 6)),
        "by-axis": Case(of(nn.Conv3d, 4, 2, (1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 2), 2), (4, 3, 6, 7)),
        "depthwise": Case(of(nn.Conv3d, 3, 3, 2, padding="same", groups=3), (3, 3, 6, 6)),
    },
    "embedding_test": {
        "sequence": Case(of(nn.Embedding, 32, 10), (5,), tokens=32),
        "grid": Case(of(nn.Embedding, 2, 10), (3, 2, 2), tokens=2),
        "sequence-first": Case(sequence_first(of(nn.Embedding, 7, 10)), (5,), tokens=7),
    },
    "embedding_bag_test": {
        mode: Case(of(nn.EmbeddingBag, 10, 12, mode=mode), (5,), tokens=10) for mode in ("sum", "mean")
    },
    "group_norm_test": {str(groups): Case(of(nn.GroupNorm, groups, 8), (8, 5, 4)) for groups in (1, 4, 8)},
    "instance_norm1d_test": {"affine": Case(of(nn.InstanceNorm1d, 3, affine=True), (3, 5))},
    "instance_norm2d_test": {"affine": Case(of(nn.InstanceNorm2d, 3, affine=True), (3, 5, 4))},
    "instance_norm3d_test": {"affine": Case(of(nn.InstanceNorm3d, 3, affine=True), (3, 3, 5, 4))},
    "layer_norm_test": {
        "one": Case(of(nn.LayerNorm, 5), (4, 3, 5)),
        "two": Case(of(nn.LayerNorm, (3, 5)), (4, 3, 5)),
        "three": Case(of(nn.LayerNorm, (4, 3, 5)), (4, 3, 5)),
    },
    "rms_norm_test": {
        "one": Case(of(nn.RMSNorm, 5), (4, 3, 5)),
        "two": Case(of(nn.RMSNorm, (3, 5)), (4, 3, 5)),
        "three": Case(of(nn.RMSNorm, (4, 3, 5)), (4, 3, 5)),
    },
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
        for kinds in RECURRENT.values()
        for kind in kinds
        for name, options in OPTIONS.items()
    },
}
"""By the file of Opacus's tests."""
BY_ITS_NORMS_ALONE = {"embedding_norm_sample_test"}
"""Holds Opacus's ghost norms of embeddings against its own gradients; `embedding_test` has the layer."""
EVERY = [(file, name) for file, cases in LAYERS.items() for name in cases]


def test_every_layer_that_opacus_tests_is_here():
    files = {
        path.stem for path in (Path(opacus.__file__).parent / "tests" / "grad_samples").glob("*_test.py")
    }
    if not files:
        pytest.skip("this Opacus comes without its tests")
    assert files - BY_ITS_NORMS_ALONE == set(LAYERS)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("file", "name"), EVERY)
def test_the_layer_is_fast_and_equals_a_plain_loop(file, name, caplog):
    model, rows = LAYERS[file][name].make(torch.float64, 4)
    gradients = plain_loop(model, loss, rows)
    engine = BookKeepingEngine(model, loss)
    with caplog.at_level(logging.INFO, logger="sparsedp"):
        for which in ("full", "random", "rows"):
            support = supports(engine.layout)[which]
            z = measured(gradients, support.indices.numpy())
            clip_norm = median_norm(z)
            found = engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(support, FlatClip(clip_norm)))
            error = np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm))
            least = 1e-6 * np.abs(gradients).max()  # a key's bias has no gradient but rounding
            assert error <= 1e-9 * max(clip_norm, least) * len(gradients), which
    assert caplog.records == []


@pytest.mark.parametrize("in_order", [True, False], ids=["sorted", "lengths-of-their-own"])
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_packed_sequences_equal_a_plain_loop(kind, in_order):
    case = Case(packed(RECURRENT[kind][0], in_order=in_order, num_layers=2, bidirectional=True), (3, 4))
    model, rows = case.make(torch.float64, 5)
    gradients = plain_loop(model, loss, rows)
    engine = BookKeepingEngine(model, loss)
    query = ClippedSumQuery(supports(engine.layout)["full"], FlatClip(median_norm(gradients)))
    found = engine.clipped_sum([MicroBatch(rows)], query)
    np.testing.assert_allclose(found.numpy(), clipped_sum(gradients, query.clip.norm), atol=1e-9)
    assert "example's values" in engine.notes[0]
