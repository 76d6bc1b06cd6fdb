"""Held-out metrics of a classifier. The held-out data is outside the guarantee: these numbers are exact."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.datasets.bundle import Split
from sparsedp.training.evaluate import Evaluator, Metrics, classification_metrics

_BATCH = 1024
SPECIFICITY = 0.9
"""Where `recall_at_90_specificity` is read off."""


def evaluator(split: Split) -> Evaluator:
    """Loss and accuracy on a split; two classes add AUC, average precision and the threshold metrics.

    Sensitivity, specificity and balanced accuracy are at the fixed threshold of 1/2.
    """

    def evaluate(model: nn.Module) -> Metrics:
        starts = range(0, len(split), _BATCH)
        logits = torch.cat([model(split.rows_at(_range(start, len(split)))[0]) for start in starts])
        loss = float(functional.cross_entropy(logits.double(), split.targets))
        metrics = {"loss": loss, **classification_metrics(logits, split.targets)}
        if "auc" in metrics:
            metrics |= ranking_metrics(logits[:, 1] - logits[:, 0], split.targets == 1)
        return metrics

    return evaluate


def ranking_metrics(scores: Tensor, positive: Tensor) -> dict[str, float]:
    """Average precision, and the recall at the lowest threshold that keeps 90 % of the negatives out.

    Tied scores are taken together, as scikit-learn does.
    """
    order = torch.argsort(scores, descending=True, stable=True)
    ranked, hits = scores[order], positive[order].double()
    last_of_tie = torch.ones_like(positive)
    last_of_tie[:-1] = ranked[1:] != ranked[:-1]
    found, taken = hits.cumsum(0)[last_of_tie], (last_of_tie.nonzero().squeeze(1) + 1).double()
    recall, precision = found / hits.sum(), found / taken
    gained = torch.diff(recall, prepend=recall.new_zeros(1))
    false_alarms = (taken - found) / (len(hits) - hits.sum())
    allowed = recall[false_alarms <= 1 - SPECIFICITY + 1e-12]
    return {
        "average_precision": float((gained * precision).sum()),
        "recall_at_90_specificity": float(allowed[-1]) if len(allowed) else 0.0,
    }


def _range(start: int, size: int) -> Tensor:
    return torch.arange(start, min(start + _BATCH, size))
