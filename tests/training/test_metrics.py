"""Metrics agree to 1e-12 with counting by hand: pairs for AUC, thresholds one by one for the others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparsedp.evaluation import classification_metrics
from sparsedp_experiments.runs.execute import ranking_metrics


def example(levels: int) -> tuple[Tensor, Tensor]:
    """Scores around 0, with few `levels` many of them tied, and 0/1 targets they know something of."""
    generator = torch.Generator().manual_seed(levels)
    targets = (torch.rand(300, generator=generator) < 0.3).long()
    raw = torch.rand(300, generator=generator, dtype=torch.float64) - 0.6 + 0.3 * targets
    return torch.floor(levels * raw) / levels, targets


def pairs_in_order(scores: Tensor, targets: Tensor) -> float:
    above, below = scores[targets == 1], scores[targets == 0]
    apart = above[:, None] - below[None, :]
    return float((apart > 0).sum() + (apart == 0).sum() / 2) / apart.numel()


def thresholds(scores: Tensor, targets: Tensor) -> list[tuple[int, int]]:
    """Positives and negatives at or above each score there is, from the highest on."""
    found = []
    for threshold in sorted(set(scores.tolist()), reverse=True):
        taken = targets[scores >= threshold]
        found.append((int(taken.sum()), int((1 - taken).sum())))
    return found


@pytest.mark.parametrize("levels", [100_000, 7])
@pytest.mark.parametrize("form", ["two logits", "one logit", "one column"])
def test_binary_metrics_count_right_ties_included(form: str, levels: int) -> None:
    scores, targets = example(levels)
    outputs = {
        "two logits": torch.stack([-scores / 2, scores / 2], dim=1),
        "one logit": scores,
        "one column": scores.unsqueeze(1),
    }[form]
    found = classification_metrics(outputs, targets if form == "two logits" else targets.double())
    hits = [(int(scores[i] > 0), int(targets[i])) for i in range(len(targets))]
    sensitivity = hits.count((1, 1)) / int(targets.sum())
    specificity = hits.count((0, 0)) / int((1 - targets).sum())
    assert found == pytest.approx(
        {
            "accuracy": (hits.count((1, 1)) + hits.count((0, 0))) / len(hits),
            "auc": pairs_in_order(scores, targets),
            "balanced_accuracy": (sensitivity + specificity) / 2,
            "sensitivity": sensitivity,
            "specificity": specificity,
        },
        abs=1e-12,
    )


@pytest.mark.parametrize("levels", [100_000, 7, 1])
def test_ranking_metrics_go_through_the_thresholds_ties_included(levels: int) -> None:
    scores, targets = example(levels)
    positives, negatives = int(targets.sum()), int((1 - targets).sum())
    precision, before, recall, at_prevalence = 0.0, 0, 0.0, 0.0
    for hits, alarms in thresholds(scores, targets):
        precision += (hits - before) / positives * hits / (hits + alarms)
        before = hits
        if alarms <= 0.1 * negatives + 1e-9:
            recall = hits / positives
        if hits + alarms <= positives:
            at_prevalence = hits / positives
    assert ranking_metrics(scores, targets == 1) == pytest.approx(
        {
            "average_precision": precision,
            "recall_at_90_specificity": recall,
            "recall_at_prevalence": at_prevalence,
        },
        abs=1e-12,
    )


def test_one_score_for_all_recalls_nothing_at_a_threshold() -> None:
    found = ranking_metrics(torch.zeros(4), torch.tensor([True, False, False, False]))
    assert found == {
        "average_precision": 0.25,
        "recall_at_90_specificity": 0.0,
        "recall_at_prevalence": 0.0,
    }


def test_scores_that_are_not_finite_are_ranked_nan_highest() -> None:
    scores = torch.tensor([-math.inf, 0.0, math.inf, math.nan])
    targets = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert classification_metrics(scores, targets)["auc"] == 3 / 4
    assert ranking_metrics(scores, targets == 1)["average_precision"] == pytest.approx(1 / 2 + 1 / 2 * 2 / 3)


@pytest.mark.parametrize("target", [0, 1])
def test_one_class_alone_gives_accuracy_only(target: int) -> None:
    found = classification_metrics(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([target, target]))
    assert found == {"accuracy": 0.5}


def test_targets_that_are_no_classes_give_no_accuracy() -> None:
    assert classification_metrics(torch.randn(3), torch.tensor([0.5, 2.0, 1.0])) == {}
