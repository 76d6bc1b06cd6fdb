"""Small models with what real ones are made of: bare parameters, attention, recurrent layers, parametrisations.

The layers of Opacus's own grad-sample tests are among them, here or in `gradient_cases`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from gradient_cases import Case
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint


class By(nn.Module):
    """A model out of named layers, bare parameters and a forward function."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def by(forward, **parts) -> Callable[[], nn.Module]:
    """Parts are made anew with every model."""
    return lambda: By(forward, **{name: make() for name, make in parts.items()})


def bare(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.ones(shape)


def linear(*size: int, **kwargs) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(*size, **kwargs)


def with_class_token(m: nn.Module, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), m.embed(x)], dim=1) + m.positions
    return m.head(x)[:, 0]


def written_in_place(m: nn.Module, x: Tensor) -> Tensor:
    x = m.embed(x) * 2
    x[:, 0] = m.token
    return x.tanh()


def cosine(m: nn.Module, x: Tensor) -> Tensor:
    return F.normalize(m.body(x), dim=-1) @ F.normalize(m.prototypes, dim=-1).T * m.temperature.exp()


def cross_attention(m: nn.Module, x: Tensor) -> Tensor:
    queries = m.queries.unsqueeze(0).expand(len(x), -1, -1)
    return m.attention(queries, x, x, need_weights=False)[0]


def own_attention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, dim=-1)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def positions_looked_up(m: nn.Module, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1]).unsqueeze(0)
    return m.head(m.norm(m.tokens(x) + m.places(places)))


def with_padding_mask(m: nn.Module, x: Tensor) -> Tensor:
    return m.layer(m.tokens(x), src_key_padding_mask=(x == 0) & (torch.arange(x.shape[1]) > 0))


def frozen_batch_norm(kind: type[nn.Module], features: int) -> nn.Module:
    layer = kind(features)
    layer.running_mean.uniform_(-1, 1)
    layer.running_var.uniform_(0.5, 2)
    return layer.eval()


class LayerNorm2d(nn.LayerNorm):
    """As in timm: over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2: a linear layer whose weight is [inputs, outputs], on flattened rows."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Block(nn.Module):
    """A convolution block with layer scale, as in ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = LayerNorm2d(channels)
        self.mix = nn.Conv2d(channels, channels, 1)
        self.gamma = nn.Parameter(1e-1 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma.reshape(1, -1, 1, 1) * F.gelu(self.mix(self.norm(self.spatial(x))))


def recurrent(kind: type[nn.RNNBase], take: str = "outputs", **kwargs) -> Callable[[], nn.Module]:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        outputs, state = m.cell(x if m.cell.batch_first else x.transpose(0, 1))
        if take == "outputs":
            return outputs if m.cell.batch_first else outputs.transpose(0, 1)
        parts = state if isinstance(state, tuple) else (state,)
        return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1)

    return by(forward, cell=lambda: kind(3, 4, **kwargs))


def packed(kind: type[nn.RNNBase], take: str = "outputs", **kwargs) -> Callable[[], nn.Module]:
    """Rows of one to three steps, as their own content says."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0)
        first = m.cell.batch_first
        x = m.body(x) if first else m.body(x).transpose(0, 1)
        outputs, state = m.cell(pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False))
        if take == "outputs":
            return pad_packed_sequence(outputs, batch_first=True, padding_value=0.5, total_length=4)[0]
        parts = state if isinstance(state, tuple) else (state,)
        return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1)

    return by(forward, body=linear(3, 3), cell=lambda: kind(3, 4, **kwargs))


def mean_of_packed(m: nn.Module, x: Tensor) -> Tensor:
    """Rows as wide as the longest of a chunk, and a padding token that no step ever sees."""
    lengths = (x > 0).sum(1).clamp(min=1)
    rows = pack_padded_sequence(m.tokens(x), lengths, batch_first=True, enforce_sorted=False)
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
    "class-token": Case(
        by(
            with_class_token,
            embed=linear(3, 4),
            token=bare(1, 1, 4),
            positions=bare(1, 4, 4),
            head=linear(4, 2),
        ),
        (3, 3),
    ),
    "token-written-in-place": Case(by(written_in_place, embed=linear(3, 4), token=bare(4)), (3, 3)),
    "layer-scale": Case(lambda: nn.Sequential(Block(3), Block(3)), (3, 4, 4)),
    "temperature": Case(by(cosine, body=linear(3, 4), prototypes=bare(5, 4), temperature=bare()), (3,)),
    "divided": Case(
        by(
            lambda m, x: m.body(x) / (m.scale.exp() + 1) - m.shift,
            body=linear(3, 4),
            scale=bare(4),
            shift=bare(1),
        ),
        (2, 3),
    ),
    "mask-token": Case(
        by(lambda m, x: m.body(torch.where(x[..., :1] > 0, m.token, x)), body=linear(3, 4), token=bare(3)),
        (4, 3),
    ),
    "parameter-alone": Case(
        by(lambda m, x: m.head(m.latents.expand(len(x), -1)) * x, head=linear(4, 3), latents=bare(4)), (3,)
    ),
    "einsum": Case(
        by(lambda m, x: torch.einsum("bti,hio->bhto", x, m.heads).tanh(), heads=bare(2, 3, 4)), (5, 3)
    ),
    "matrix-by-hand": Case(
        by(lambda m, x: (x @ m.one).tanh() @ m.two.T, one=bare(3, 4), two=bare(2, 4)), (5, 3)
    ),
    "left-matrix": Case(by(lambda m, x: (m.one @ x.T).T.tanh(), one=bare(4, 3)), (3,)),
    "vector": Case(by(lambda m, x: (x @ m.one).unsqueeze(1), one=bare(3)), (3,)),
    "filters-by-hand": Case(
        by(lambda m, x: F.conv2d(x, m.filters, padding=1), filters=bare(2, 3, 3, 3)), (3, 4, 4)
    ),
    "addcmul": Case(
        by(lambda m, x: torch.addcmul(m.bias, m.gain, x * x, value=2), gain=bare(3), bias=bare(3)), (2, 3)
    ),
}
"""Parameters a module uses directly."""

ATTENTION = {
    "attention-weights-too": Case(
        by(
            lambda m, x: m.attention(x, x, x)[0],
            attention=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        (3, 4),
    ),
    "attention-other-sizes": Case(
        by(
            lambda m, x: m.attention(x, x[..., :3], x[..., :2])[0],
            attention=lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True),
        ),
        (3, 4),
    ),
    "attention-bias-of-keys": Case(
        by(
            lambda m, x: m.attention(x, x, x)[0],
            attention=lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True),
        ),
        (3, 4),
    ),
    "learned-queries": Case(
        by(
            cross_attention,
            queries=bare(2, 4),
            attention=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        (3, 4),
    ),
    "own-attention": Case(by(own_attention, qkv=linear(4, 12)), (3, 4)),
    "encoder-layer": Case(lambda: encoder_layer(batch_first=True), (3, 4)),
    "encoder-layer-eval": Case(lambda: encoder_layer(batch_first=True).eval(), (3, 4)),
    "encoder-layer-norm-first": Case(lambda: encoder_layer(batch_first=True, norm_first=True), (3, 4)),
    "encoder-sequence-first": Case(
        by(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=encoder_layer), (3, 4)
    ),
    "padding-mask": Case(
        by(
            with_padding_mask,
            tokens=lambda: nn.Embedding(5, 4),
            layer=lambda: encoder_layer(batch_first=True),
        ),
        (4,),
        tokens=5,
    ),
    "decoder-layer": Case(
        by(
            lambda m, x: m.layer(x, x.flip(1)),
            layer=lambda: nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        ),
        (3, 4),
    ),
    "position-table": Case(
        by(
            positions_looked_up,
            tokens=lambda: nn.Embedding(6, 4),
            places=lambda: nn.Embedding(9, 4, padding_idx=1),
            norm=lambda: nn.LayerNorm(4),
            head=linear(4, 2),
        ),
        (5,),
        tokens=6,
    ),
    "tied-by-hand": Case(
        by(
            lambda m, x: F.linear(m.body(m.table(x)).tanh(), m.table.weight),
            table=lambda: nn.Embedding(6, 4),
            body=linear(4, 4),
        ),
        (5,),
        tokens=6,
    ),
    "gpt2-linear": Case(lambda: nn.Sequential(Conv1D(5, 4), nn.GELU(), Conv1D(3, 5)), (3, 4)),
}

RECURRENT = {
    "lstm-deep-both-ways": Case(
        recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True), (3, 3)
    ),
    "lstm-sequence-first": Case(recurrent(nn.LSTM, "state"), (3, 3)),
    "lstm-projected": Case(recurrent(nn.LSTM, proj_size=2, batch_first=True), (3, 3)),
    "gru-deep": Case(recurrent(nn.GRU, num_layers=2, batch_first=True), (3, 3)),
    "gru-no-bias": Case(recurrent(nn.GRU, "state", bias=False, batch_first=True), (3, 3)),
    "rnn": Case(recurrent(nn.RNN, batch_first=True), (4, 3)),
    "rnn-relu-both-ways": Case(
        recurrent(nn.RNN, nonlinearity="relu", bidirectional=True, batch_first=True), (3, 3)
    ),
    "gru-learned-start": Case(
        by(
            learned_start,
            start=bare(2, 4),
            cell=lambda: nn.GRU(3, 4, num_layers=2, batch_first=True),
        ),
        (3, 3),
    ),
    "packed-lstm-deep-both-ways": Case(
        packed(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True), (3, 3)
    ),
    "packed-lstm-states": Case(packed(nn.LSTM, "state", num_layers=2, bidirectional=True), (3, 3)),
    "packed-gru-deep-both-ways": Case(
        packed(nn.GRU, num_layers=2, bidirectional=True, batch_first=True), (3, 3)
    ),
    "packed-gru-states": Case(packed(nn.GRU, "state", bias=False, batch_first=True), (3, 3)),
    "packed-rnn-both-ways": Case(packed(nn.RNN, bidirectional=True, batch_first=True), (3, 3)),
    "packed-rnn-relu-deep": Case(
        packed(nn.RNN, "state", nonlinearity="relu", num_layers=2, batch_first=True), (3, 3)
    ),
    "packed-tokens": Case(
        by(
            mean_of_packed,
            tokens=lambda: nn.Embedding(4, 3),
            cell=lambda: nn.LSTM(3, 4, batch_first=True),
            head=linear(4, 2),
        ),
        (4,),
        tokens=4,
    ),
    "lstm-cell": Case(
        by(lambda m, x: m.cell(x[:, 1], m.cell(x[:, 0]))[0], cell=lambda: nn.LSTMCell(3, 4)), (2, 3)
    ),
    "gru-cell": Case(by(lambda m, x: m.cell(x), cell=lambda: nn.GRUCell(3, 4)), (3,)),
}

OTHER_LAYERS = {
    "conv-transpose-1d": Case(transposed(1, 2, 3, 3, padding=1), (2, 4)),
    "conv-transpose-2d": Case(transposed(2, 2, 3, (3, 2), stride=2, padding=1, output_padding=1), (2, 3, 3)),
    "conv-transpose-2d-groups": Case(transposed(2, 4, 6, 2, groups=2, dilation=2), (4, 3, 3)),
    "conv-transpose-2d-shifts": Case(transposed(2, 3, 16, 2), (3, 3, 3)),
    "conv-transpose-3d": Case(transposed(3, 2, 2, 2, stride=(1, 2, 1), bias=False), (2, 2, 3, 2)),
    "prelu-by-channel": Case(lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.PReLU(3)), (2, 4)),
    "prelu-one": Case(lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU()), (3,)),
    "bilinear": Case(by(lambda m, x: m.layer(x[:, :3], x[:, 3:]), layer=lambda: nn.Bilinear(3, 2, 4)), (5,)),
    "bilinear-sequence": Case(
        by(lambda m, x: m.layer(x, x.tanh()), layer=lambda: nn.Bilinear(3, 3, 2, bias=False)), (4, 3)
    ),
    "frozen-batch-norm-1d": Case(lambda: frozen_batch_norm(nn.BatchNorm1d, 3), (3,)),
    "frozen-batch-norm-2d": Case(lambda: frozen_batch_norm(nn.BatchNorm2d, 3), (3, 2, 4)),
    "frozen-batch-norm-3d": Case(lambda: frozen_batch_norm(nn.BatchNorm3d, 2), (2, 2, 2, 3)),
    "channel-norm": Case(lambda: LayerNorm2d(3), (3, 2, 4)),
    "weight-norm-conv": Case(lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 2)), (2, 3, 3)),
    "orthogonal": Case(lambda: parametrizations.orthogonal(nn.Linear(3, 3)), (3,)),
    "spectral-norm": Case(lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), (4,)),
    "standardised-weights": Case(
        by(
            lambda m, x: F.conv2d(
                x, (m.conv.weight - m.conv.weight.mean((1, 2, 3), True)) * m.gain, m.conv.bias
            ),
            conv=lambda: nn.Conv2d(2, 3, 2),
            gain=bare(3, 1, 1, 1),
        ),
        (2, 3, 3),
    ),
}

LAYOUTS = {
    "rows-and-positions-merged": Case(
        by(
            lambda m, x: m.two(m.one(x.reshape(-1, 3)).tanh()).reshape(len(x), -1),
            one=linear(3, 4),
            two=linear(4, 2),
        ),
        (5, 3),
    ),
    "positions-and-rows-merged": Case(
        by(
            lambda m, x: m.one(x.transpose(0, 1).reshape(-1, 3)).reshape(5, -1, 4).transpose(0, 1),
            one=linear(3, 4),
        ),
        (5, 3),
    ),
    "frames-of-a-film": Case(
        by(
            lambda m, x: m.conv(x.flatten(0, 1)).relu().reshape(len(x), 3, -1),
            conv=lambda: nn.Conv2d(2, 3, 2),
        ),
        (3, 2, 3, 3),
    ),
    "norm-on-merged-rows": Case(
        by(
            lambda m, x: (m.norm(x.reshape(-1, 3)) * m.gain).reshape(x.shape),
            norm=lambda: nn.LayerNorm(3),
            gain=bare(3),
        ),
        (4, 3),
    ),
    "channels-last": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), frozen_batch_norm(nn.BatchNorm2d, 4), nn.Conv2d(4, 2, 2, stride=2)
        ).to(memory_format=torch.channels_last),
        (3, 4, 4),
    ),
    "checkpointed": Case(
        by(
            lambda m, x: checkpoint(m.body, x, use_reentrant=False),
            body=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        ),
        (3,),
    ),
    "shared-by-two-paths": Case(
        by(lambda m, x: m.layer(x) + F.linear(x.sin(), m.layer.weight), layer=linear(3, 4)), (3,)
    ),
}

STRUCTURES = BARE | ATTENTION | RECURRENT | OTHER_LAYERS | LAYOUTS
