"""Held-out metrics of a classifier. The held-out data is outside the guarantee: these numbers are exact."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.evaluation.evaluate import Evaluator, Metrics
from sparsedp.evaluation.metrics import classification_metrics, ranking_metrics, recall_at
from sparsedp_experiments.data.bundle import Split

_BATCH = 1024


def evaluator(split: Split, *, ranked: bool = False) -> Evaluator:
    """Loss and accuracy on a split; two classes add AUC, average precision and the threshold metrics.

    Sensitivity, specificity and balanced accuracy are at the fixed threshold of 1/2. `ranked` adds `recall_at_10`:
    each unit's records are ranked among each other.
    """

    def evaluate(model: nn.Module) -> Metrics:
        starts = range(0, len(split), _BATCH)
        logits = torch.cat([model(split.rows_at(_range(start, len(split)))[0]) for start in starts])
        loss = float(functional.cross_entropy(logits.double(), split.targets))
        metrics = {"loss": loss, **classification_metrics(logits, split.targets)}
        if "auc" in metrics:
            scores = logits[:, 1] - logits[:, 0]
            metrics |= ranking_metrics(scores, split.targets == 1)
            if ranked and split.units is not None:
                metrics["recall_at_10"] = recall_at(10, scores, split.targets == 1, split.units)
        return metrics

    return evaluate


def _range(start: int, size: int) -> Tensor:
    return torch.arange(start, min(start + _BATCH, size))
