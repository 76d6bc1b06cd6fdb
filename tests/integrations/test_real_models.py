"""Models of Hugging Face, timm and peft with random weights, on the fast path alone: equal to a plain loop.

`make integrations` installs Hugging Face's packages and runs these; what is not installed is skipped. timm needs a
torchvision that was built for the same torch, so it is left to machines that have one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "grad_sample"))

from gradient_cases import clipped_sum, measured, median_norm, plain_loop

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.grad_sample import BookKeepingEngine, ClippedSumQuery
from sparsedp.parameters import Support

pytestmark = pytest.mark.filterwarnings("default")

VOCABULARY, LENGTH, SAMPLES = 60, 9, 4
TINY = {"vocab_size": VOCABULARY, "num_labels": 3, "pad_token_id": 0}


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT_SIZES = {
    "Bert": SMALL | NO_DROPOUT,
    "DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    | {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Llama": {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def text_model(name: str) -> nn.Module:
    hf = pytest.importorskip("transformers")
    config = getattr(hf, f"{name}Config")(**TINY, **TEXT_SIZES[name])
    return getattr(hf, f"{name}ForSequenceClassification")(config)


def bert_with_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.0, target_modules=["query", "value"])
    return peft.get_peft_model(text_model("Bert"), config)


def timm_model(name: str, **kwargs) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm").create_model(name, num_classes=3, **kwargs)


def group_norm(channels: int, **kwargs) -> nn.Module:
    return nn.GroupNorm(4, channels)


PICTURES = {
    "vit-tiny": timm_model("vit_tiny_patch16_224", img_size=32, depth=2),
    "convnext-atto": timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "resnet18-gn": timm_model("resnet18", norm_layer=group_norm, channels=(8, 16, 24, 32), stem_width=8),
    "mobilenet-frozen-norm": lambda: timm_model("mobilenetv3_small_050")().eval(),
}


def text_loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(input_ids=rows[0], attention_mask=torch.ones_like(rows[0])).logits
    return F.cross_entropy(logits, rows[1], reduction="none")


def picture_loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(rows[0]), rows[1], reduction="none")


def assert_right(model: nn.Module, loss: Callable[..., Tensor], inputs: Tensor) -> None:
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():  # heads and low-rank factors start at zero, which hides mistakes
            parameter.add_(0.02 * torch.randn_like(parameter))
    rows = (inputs, torch.arange(SAMPLES) % 3)
    gradients = plain_loop(model, loss, rows)
    engine = BookKeepingEngine(model, loss)
    d = engine.layout.dimension
    for support in (Support.full(d), Support(torch.randperm(d)[: d // 5], d)):
        z = measured(gradients, support.indices.numpy())
        clip_norm = median_norm(z)
        found = engine.clipped_sum([MicroBatch(rows)], ClippedSumQuery(support, FlatClip(clip_norm)))
        assert np.linalg.norm(found.numpy() - clipped_sum(z, clip_norm)) <= 1e-9 * clip_norm
    assert engine.notes == ()


@pytest.mark.parametrize("name", [*TEXT_SIZES, "Bert with LoRA"])
def test_text_models_stay_on_the_fast_path(name):
    torch.manual_seed(0)
    model = text_model(name) if name in TEXT_SIZES else bert_with_lora()
    assert_right(model, text_loss, torch.randint(2, VOCABULARY, (SAMPLES, LENGTH)))


@pytest.mark.parametrize("name", PICTURES)
def test_picture_models_stay_on_the_fast_path(name):
    torch.manual_seed(0)
    assert_right(PICTURES[name](), picture_loss, torch.randn(SAMPLES, 3, 32, 32, dtype=torch.float64))
