"""Held-out metrics of a classifier. The held-out data is outside the guarantee: these numbers are exact."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.evaluation import Evaluator, Metrics, classification_metrics, score_ranks
from sparsedp_experiments.data.bundle import Split

_BATCH = 1024
SPECIFICITY = 0.9
"""Where `recall_at_90_specificity` is read off."""


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


def ranking_metrics(scores: Tensor, positive: Tensor) -> dict[str, float]:
    """Average precision, and the recall at two thresholds, each the lowest that does not go too far.

    One keeps 90 % of the negatives out; the other flags no more records than are positive: with their share, the
    prevalence, for a public number, it can be set without labels.
    **Edge cases.** Both classes must be there. Tied scores are taken together.
    """
    from sklearn.metrics import average_precision_score, roc_curve

    actual, ranks = positive.cpu().numpy(), score_ranks(scores)
    false_alarms, recall, _ = roc_curve(actual, ranks, drop_intermediate=False)
    positives = float(actual.sum())
    flagged = recall * positives + false_alarms * (len(actual) - positives)
    return {
        "average_precision": float(average_precision_score(actual, ranks)),
        "recall_at_90_specificity": float(recall[false_alarms <= 1 - SPECIFICITY + 1e-12][-1]),
        "recall_at_prevalence": float(recall[flagged <= positives + 1e-6][-1]),
    }


def recall_at(most: int, scores: Tensor, positive: Tensor, units: Tensor) -> float:
    """The share of a unit's positives among its `most` best-scored records, of as many as could be there.

    The mean over units with a positive; of tied scores the earlier record is taken first.
    """
    _, owner = torch.unique(units, return_inverse=True)
    best = torch.argsort(scores, descending=True, stable=True)
    order = best[torch.argsort(owner[best], stable=True)]
    owner, hits = owner[order], positive[order].double()
    place = torch.arange(len(owner)) - torch.searchsorted(owner, owner)
    found = torch.bincount(owner, weights=hits * (place < most))
    there = torch.bincount(owner, weights=hits)
    some = there > 0
    return float((found[some] / there[some].clamp(max=most)).mean())
