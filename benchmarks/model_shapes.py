"""Networks in the shapes people bring, written in plain PyTorch with random weights: nothing to download or install.

Each has what made it hard for per-sample gradients: position ids that all samples share, class tokens and layer scale
as bare parameters, GPT-2's turned linear layers on flattened rows, a norm over channels, packed recurrent weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 2**14


class Attention(nn.Module):
    """Attention over several heads, by projections of its own."""

    def __init__(
        self,
        width: int,
        heads: int,
        linear: type[nn.Module] = nn.Linear,
        causal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TurnedLinear(nn.Module):
    """GPT-2's `Conv1D`: a linear layer whose weight is [inputs, outputs], on rows and positions flattened."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply and add."""
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class LowRank(nn.Module):
    """LoRA: a frozen linear layer and the product of two small trained ones."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Both, added."""
        return self.frozen(x) + 2.0 * self.up(self.down(x))


class Block(nn.Module):
    """Attention and two linear layers, each with a residual; normed before (GPT-2, ViT) or after (BERT)."""

    def __init__(
        self,
        width: int,
        heads: int,
        linear: type[nn.Module] = nn.Linear,
        causal: bool = False,
        first: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.first = first
        self.attention = Attention(width, heads, linear, causal, dropout)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Both halves."""
        if self.first:
            x = x + self.dropout(self.attention(self.norms[0](x)))
            return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))
        x = self.norms[0](x + self.dropout(self.attention(x)))
        return self.norms[1](x + self.dropout(self.down(F.gelu(self.up(x)))))


class Text(nn.Module):
    """Token and position tables, blocks, a head on the first position (or the last, if causal)."""

    def __init__(self, length: int, classes: int, width: int, blocks: list[nn.Module], causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.places_by_row = False
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """The logits; one row of position ids serves all samples, unless each is to have its own."""
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        places = places.expand_as(ids) if self.places_by_row else places
        x = self.norm(self.blocks(self.tokens(ids) + self.places(places)))
        return self.head(x[:, -1 if self.causal else 0])


class ImageTransformer(nn.Module):
    """ViT: patches, a class token and a position table as bare parameters, blocks, a head."""

    def __init__(self, size: int, classes: int, width: int = 192, depth: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (size // 16) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class ChannelNorm(nn.LayerNorm):
    """timm's `LayerNorm2d`: over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise every position."""
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class NextBlock(nn.Module):
    """ConvNeXt's block, with layer scale as a bare parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """With a residual."""
        y = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        return x + (self.down(F.gelu(self.up(y))) * self.gamma).permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    """Two convolutions with group norm and a short cut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(32, outputs), nn.GroupNorm(32, outputs)])
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Both paths."""
        y = F.relu(self.norms[0](self.one(x)))
        return F.relu(self.norms[1](self.two(y)) + self.short(x))


class Recurrent(nn.Module):
    """A token table, an LSTM of two layers, a head on the last output."""

    def __init__(self, classes: int, embedded: int = 64, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, embedded)
        self.cells = nn.LSTM(embedded, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.cells(self.tokens(ids))[0][:, -1])


def bert_tiny(shape: tuple[int, ...], classes: int, dropout: float = 0.0) -> nn.Module:
    """Two blocks of width 128."""
    blocks: list[nn.Module] = [Block(128, 2, first=False, dropout=dropout) for _ in range(2)]
    return Text(shape[0], classes, 128, blocks, causal=False)


def bert_lora(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The same with all but low-rank additions and the head frozen."""
    blocks: list[nn.Module] = [Block(128, 2, LowRank, first=False) for _ in range(2)]
    model = Text(shape[0], classes, 128, blocks, causal=False)
    for part in (model.tokens, model.places, model.norm, *(block.norms for block in blocks)):
        part.requires_grad_(False)
    return model


def gpt2_two_layers(shape: tuple[int, ...], classes: int, dropout: float = 0.0) -> nn.Module:
    """Two blocks of GPT-2 small."""
    blocks: list[nn.Module] = [Block(768, 12, TurnedLinear, causal=True, dropout=dropout) for _ in range(2)]
    return Text(shape[0], classes, 768, blocks, causal=True)


def vit_tiny(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ViT-tiny with patches of 16."""
    return ImageTransformer(shape[1], classes)


def resnet18_group_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 with group norm, the first layers as for small images."""
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        parts += [
            ResidualBlock(inputs, outputs, 1 if outputs == 64 else 2),
            ResidualBlock(outputs, outputs, 1),
        ]
        inputs = outputs
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def convnext_tiny(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ConvNeXt-tiny's widths and depths."""
    widths, depths = (96, 192, 384, 768), (3, 3, 9, 3)
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if stage:
            parts += [ChannelNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
        parts += [NextBlock(width) for _ in range(depth)]
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, classes)
    )


def lstm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two recurrent layers of width 128."""
    return Recurrent(classes)
