"""How good a classifier is, in numbers: scikit-learn's, of logits and targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_AIMING_AT_THE_TARGET = (nn.BCELoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
SPECIFICITY = 0.9
"""Where `recall_at_90_specificity` is read off."""


def threshold_of(loss_fn: object) -> float:
    """Where one output a row decides for class 1: halfway for losses that pull it to the target itself, else 0.

    **Edge cases.** A function says nothing of what it takes, so its outputs are taken for logits.
    """
    return 0.5 if isinstance(loss_fn, _AIMING_AT_THE_TARGET) else 0.0


def classification_metrics(outputs: Tensor, targets: Tensor, threshold: float = 0.0) -> dict[str, float]:
    """Accuracy from logits of shape [n, classes], or from one output a row for two classes; empty if neither fits.

    The second class is what lies above the threshold: 0 for logits, 0.5 for probabilities.
    """
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        outputs = outputs.squeeze(1)
    targets = targets.reshape(-1)
    if outputs.shape[0] != targets.shape[0] or outputs.dim() > 2:
        return {}
    if outputs.dim() == 2:
        if targets.is_floating_point():
            return {}
        predicted = outputs.argmax(dim=1)
        scores = outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else None
    else:
        if not bool(((targets == 0) | (targets == 1)).all()):
            return {}
        predicted, scores = (outputs > threshold).long(), outputs
    actual = targets.long()
    metrics = {"accuracy": float((predicted == actual).sum()) / len(actual)}
    if scores is not None:
        metrics |= _binary_metrics(scores, predicted == 1, actual == 1)
    return metrics


def ranking_metrics(scores: Tensor, positive: Tensor) -> dict[str, float]:
    """Average precision, and the recall at two thresholds, each the lowest that does not go too far.

    One keeps 90 % of the negatives out; the other flags no more records than are positive: with their share, the
    prevalence, for a public number, it can be set without labels.
    **Edge cases.** Both classes must be there. Tied scores are taken together.
    """
    from sklearn.metrics import average_precision_score, roc_curve

    actual, ranks = positive.cpu().numpy(), _ranks(scores)
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


def _binary_metrics(scores: Tensor, predicted: Tensor, positive: Tensor) -> dict[str, float]:
    """What two classes add; nothing when one of them is missing."""
    if positive.all() or not positive.any():
        return {}
    from sklearn.metrics import balanced_accuracy_score, recall_score, roc_auc_score

    actual, found = positive.cpu().numpy(), predicted.cpu().numpy()
    return {
        "auc": float(roc_auc_score(actual, _ranks(scores))),
        "balanced_accuracy": float(balanced_accuracy_score(actual, found)),
        "sensitivity": float(recall_score(actual, found)),
        "specificity": float(recall_score(~actual, ~found)),
    }


def _ranks(scores: Tensor) -> npt.NDArray[Any]:
    """Each score's place among the different ones, NaN highest: scikit-learn refuses scores that are not finite."""
    _, ranks = torch.unique(scores.double(), return_inverse=True)
    return np.asarray(ranks.cpu())
