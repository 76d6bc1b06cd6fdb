"""The models of `benchmarks.models`, each with one fixed batch of made-up data."""

from __future__ import annotations

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

MODELS = {
    "bert-tiny": Workload(bert_tiny, (64,), classes=2, batch_size=64, tokens=True),
    "gpt2-2-layers": Workload(gpt2_two_layers, (64,), classes=2, batch_size=16, tokens=True),
    "vit-tiny": Workload(vit_tiny, (3, 96, 96), classes=10, batch_size=32),
    "resnet18-gn": Workload(resnet18_group_norm, (3, 32, 32), classes=10, batch_size=32),
    "convnext-tiny": Workload(convnext_tiny, (3, 64, 64), classes=10, batch_size=32),
    "lstm": Workload(lstm, (64,), classes=2, batch_size=64, tokens=True),
    "bert-lora": Workload(bert_lora, (64,), classes=2, batch_size=64, tokens=True),
}
