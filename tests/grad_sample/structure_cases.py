"""Small models with what real ones are made of, and what they share, freeze and overwrite."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from gradient_cases import Case, bare, linear, recurrent, written
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint


def with_class_token(m: nn.Module, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), m.embed(x)], dim=1) + m.positions
    return m.head(x)[:, 0]


def cosine(m: nn.Module, x: Tensor) -> Tensor:
    return F.normalize(m.body(x), dim=-1) @ F.normalize(m.prototypes, dim=-1).T * m.temperature.exp()


def sequence_first_attention(m: nn.Module, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    keys = x[..., : m.attention.kdim]
    return m.attention(x, keys, keys)[0].transpose(0, 1)


def own_attention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, dim=-1)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_padding_mask(m: nn.Module, x: Tensor) -> Tensor:
    return m.layer(m.words(x), src_key_padding_mask=(x == 0) & (torch.arange(x.shape[1]) > 0))


def frozen_batch_norm(kind: type[nn.Module], features: int) -> nn.Module:
    layer = kind(features)
    layer.running_mean.uniform_(-1, 1)
    layer.running_var.uniform_(0.5, 2)
    return layer.eval()


def mean_of_packed(m: nn.Module, x: Tensor) -> Tensor:
    """Rows as wide as the longest of a chunk, and a padding token that no step ever sees."""
    lengths = (x > 0).sum(1).clamp(min=1)
    rows = pack_padded_sequence(m.words(x), lengths, batch_first=True, enforce_sorted=False)
    outputs, _ = pad_packed_sequence(m.cell(rows)[0], batch_first=True)
    return m.head(outputs.sum(1) / lengths.unsqueeze(1))


def learned_start(m: nn.Module, x: Tensor) -> Tensor:
    outputs, last = m.cell(x, m.start.unsqueeze(1).expand(-1, len(x), -1).contiguous())
    return outputs.mul_(2) + last.sum(0).unsqueeze(1)


def transposed(dims: int, *args, **kwargs) -> Callable[[], nn.Module]:
    return lambda: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](*args, **kwargs)


def encoder_layer(**kwargs) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, **kwargs)


def autocast(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.head(m.norm(m.body(x)).relu() * m.gain).float()


BARE = {
    "class-token": written(
        (3, 3),
        with_class_token,
        embed=linear(3, 4),
        token=bare(1, 1, 4),
        positions=bare(1, 4, 4),
        head=linear(4, 2),
    ),
    "temperature": written((3,), cosine, body=linear(3, 4), prototypes=bare(5, 4), temperature=bare()),
    "divided": written(
        (2, 3),
        lambda m, x: m.body(x) / (m.scale.exp() + 1) - m.shift,
        body=linear(3, 4),
        scale=bare(4),
        shift=bare(1),
    ),
    "einsum": written(
        (5, 3), lambda m, x: torch.einsum("bti,hio->bhto", x, m.heads).tanh(), heads=bare(2, 3, 4)
    ),
    "left-matrix": written((3,), lambda m, x: (m.one @ x.T).T.tanh(), one=bare(4, 3)),
    "addcmul": written(
        (2, 3), lambda m, x: torch.addcmul(m.bias, m.gain, x * x, value=2), gain=bare(3), bias=bare(3)
    ),
}
"""Parameters a module uses directly."""

ATTENTION = {
    **{
        f"attention-{name}": written(
            (5, 4),
            sequence_first_attention,
            attention=lambda options=options: nn.MultiheadAttention(4, 2, **options),
        )
        for name, options in {
            "no-bias": {"bias": False},
            "key-bias": {"add_bias_kv": True},
            "zeros": {"add_zero_attn": True, "add_bias_kv": True},
            "other-sizes": {"kdim": 3, "vdim": 3},
        }.items()
    },
    "own-attention": written((3, 4), own_attention, qkv=linear(4, 12)),
    "encoder-layer-norm-first": Case(lambda: encoder_layer(batch_first=True, norm_first=True), (3, 4)),
    "padding-mask": written(
        (4,),
        with_padding_mask,
        tokens=5,
        words=lambda: nn.Embedding(5, 4),
        layer=lambda: encoder_layer(batch_first=True),
    ),
    "position-table": written(
        (5,),
        lambda m, x: m.words(x) + m.places(torch.arange(x.shape[1]).unsqueeze(0)).sin(),
        tokens=6,
        words=lambda: nn.Embedding(6, 4),
        places=lambda: nn.Embedding(9, 4, padding_idx=1),
    ),
}

RECURRENT = {
    **{
        f"{kind.__name__.lower()}{name}": Case(recurrent(kind, **options), (3, 3))
        for kind in (nn.RNN, nn.GRU, nn.LSTM)
        for name, options in {
            "": {},
            "-deep": {"num_layers": 2, "batch_first": True},
            "-deep-both-ways-no-bias": {"num_layers": 2, "bidirectional": True, "bias": False},
        }.items()
    },
    "lstm-projected": Case(recurrent(nn.LSTM, proj_size=2, batch_first=True), (3, 3)),
    "gru-learned-start": written(
        (3, 3), learned_start, start=bare(2, 4), cell=lambda: nn.GRU(3, 4, num_layers=2, batch_first=True)
    ),
    "packed-tokens": written(
        (4,),
        mean_of_packed,
        tokens=4,
        words=lambda: nn.Embedding(4, 3),
        cell=lambda: nn.LSTM(3, 4, batch_first=True),
        head=linear(4, 2),
    ),
    "lstm-cell": written(
        (2, 3), lambda m, x: m.cell(x[:, 1], m.cell(x[:, 0]))[0], cell=lambda: nn.LSTMCell(3, 4)
    ),
    "gru-cell": written((3,), lambda m, x: m.cell(x), cell=lambda: nn.GRUCell(3, 4)),
}

OTHER_LAYERS = {
    "conv-transpose-2d": Case(transposed(2, 2, 3, (3, 2), stride=2, padding=1, output_padding=1), (2, 3, 3)),
    "conv-transpose-3d": Case(transposed(3, 2, 2, 2, stride=(1, 2, 1), bias=False), (2, 2, 3, 2)),
    "bilinear": written((5,), lambda m, x: m.layer(x[:, :3], x[:, 3:]), layer=lambda: nn.Bilinear(3, 2, 4)),
    "frozen-batch-norm-2d": Case(lambda: frozen_batch_norm(nn.BatchNorm2d, 3), (3, 2, 4)),
    "standardised-weights": written(
        (2, 3, 3),
        lambda m, x: F.conv2d(x, (m.conv.weight - m.conv.weight.mean((1, 2, 3), True)) * m.gain, m.conv.bias),
        conv=lambda: nn.Conv2d(2, 3, 2),
        gain=bare(3, 1, 1, 1),
    ),
}

LAYOUTS = {
    "positions-and-rows-merged": written(
        (5, 3),
        lambda m, x: m.one(x.transpose(0, 1).reshape(-1, 3)).reshape(5, -1, 4).transpose(0, 1),
        one=linear(3, 4),
    ),
    "frames-of-a-film": written(
        (3, 2, 3, 3),
        lambda m, x: m.conv(x.flatten(0, 1)).relu().reshape(len(x), 3, -1),
        conv=lambda: nn.Conv2d(2, 3, 2),
    ),
    "channels-last": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), frozen_batch_norm(nn.BatchNorm2d, 4), nn.Conv2d(4, 2, 2, stride=2)
        ).to(memory_format=torch.channels_last),
        (3, 4, 4),
    ),
    "checkpointed": written(
        (3,),
        lambda m, x: checkpoint(m.body, x, use_reentrant=False),
        body=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    ),
}

STRUCTURES = BARE | ATTENTION | RECURRENT | OTHER_LAYERS | LAYOUTS


def tied(build: Callable[[], nn.Sequential], to: int, source: int = 0) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build()
        model[to].weight = model[source].weight
        return model

    return make


def frozen(build: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build()
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return make


def without_gradient(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        features = m.body(x)
    return m.head(features)


def turned_in_place(m: nn.Module, x: Tensor) -> Tensor:
    turned = m.body(x).transpose(0, 1)
    turned.relu_()
    return m.head(turned).transpose(0, 1)


def part_in_place(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.body(x)
    hidden[:, :2] *= 3
    return m.head(hidden)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def in_place() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ELU(inplace=True))


BODIES = {"body": linear(4, 5), "head": linear(5, 3)}
SHARING = {
    "two layers with one weight": Case(
        tied(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 2), (4,)
    ),
    "two convolutions with one weight": Case(
        tied(
            lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, stride=2)), 2
        ),
        (2, 5, 5),
    ),
    "an embedding tied to the output": Case(
        tied(lambda: nn.Sequential(nn.Embedding(6, 4), nn.Tanh(), nn.Linear(4, 6, bias=False)), 2),
        (5,),
        tokens=6,
    ),
    "a layer called twice": written((4,), lambda m, x: m.layer(m.layer(x).tanh()), layer=linear(4, 4)),
    "a convolution on two sizes": written(
        (17, 4, 4),
        lambda m, x: m.conv(x).flatten(1).sum(1, keepdim=True) + m.conv(x[:, :, ::2, ::2]).flatten(1),
        conv=lambda: nn.Conv2d(17, 3, 2),
    ),
    "a weight used by hand too": written(
        (3,), lambda m, x: m.layer(x) + F.linear(x.sin(), m.layer.weight), layer=linear(3, 4)
    ),
    "frozen layers": Case(frozen(perceptron, "0.weight", "0.bias"), (4,)),
    "a frozen bias": Case(frozen(lambda: nn.Sequential(nn.Conv1d(4, 3, 2), nn.Tanh()), "0.bias"), (4, 5)),
    "a frozen weight": Case(frozen(lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Tanh()), "0.weight"), (4, 3)),
    "never called": written((4,), lambda m, x: m.used(x), other=linear(4, 3), used=linear(4, 3)),
    "called without gradient": written((4,), without_gradient, **BODIES),
    "in place": Case(in_place, (4,)),
    "in place, turned": written((3, 4), turned_in_place, **BODIES),
    "a part in place": written((4,), part_in_place, **BODIES),
}
