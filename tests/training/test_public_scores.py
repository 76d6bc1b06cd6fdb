"""`given`: public scores, masks and names choose what is trained, and nothing is charged for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flat_settings import placed
from runs import loss_fn, weights
from sparsedp.errors import SparseDPError
from sparsedp.methods import Granularity, PublicScores, build_plan
from sparsedp.parameters import ParameterLayout
from sparsedp.results import Result
from sparsedp.training.fit import fit

pytestmark = pytest.mark.usefixtures("checked_once")

ROWS, WORDS, WIDTH = 60, 12, 3
BUDGET = {"epsilon": 4.0, "delta": 1e-3, "epochs": 2, "batch_size": 20, "accountant": "rdp"}
BY_ROWS = {"granularity": Granularity.ROWS, "always": ("dense",)}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Flatten(), nn.Linear(2 * WIDTH, 2))


def data() -> TensorDataset:
    rng = np.random.default_rng(0)
    pairs = torch.from_numpy(rng.integers(0, WORDS, (ROWS, 2)))
    return TensorDataset(pairs, torch.from_numpy(rng.integers(0, 2, ROWS)))


def trained(**how: Any) -> Result:
    if {"active_ratio", "options"} & set(how):
        how = {"method": "given", **how}
    return fit(network(), data(), loss_fn, **placed({**BUDGET, "lr": 0.5, **how}), seed=3, progress=False)


def active(result: Result) -> dict[str, list[int]]:
    layout = ParameterLayout.of(result.model)
    return {name: places.tolist() for name, places in result.support.split(layout).items()}


def test_public_scores_by_a_count_train_the_best_rows_and_the_head() -> None:
    counts = torch.tensor([0.0, 5, 9, 1, 9, 2, 0, 0, 3, 0, 0, 0])
    result = trained(public_scores={"0.weight": counts}, active_ratio=0.25, options=BY_ROWS)
    rows = [1, 2, 4]  # a quarter of twelve: the counts 9, 9 and 5
    assert active(result)["0.weight"] == [row * WIDTH + i for row in rows for i in range(WIDTH)]
    assert len(active(result)["2.weight"]) == 2 * WIDTH * 2
    assert result.method == "given"


def test_public_scores_by_a_mask_and_names_are_all_that_is_trained() -> None:
    mask = torch.zeros(WORDS, WIDTH, dtype=torch.bool)
    mask[3, 1] = mask[7] = True
    result = trained(public_scores={"0.weight": mask, "bias": 2.0})
    assert active(result) == {"0.weight": [10, 21, 22, 23], "2.weight": [], "2.bias": [0, 1]}
    moved = weights(result.model) != weights(network())
    assert 0 < int(moved[: WORDS * WIDTH].sum()) <= 4
    assert not bool((moved & ~result.support.mask()).any())


def test_public_scores_that_are_not_given_are_the_magnitudes_of_the_initial_weights() -> None:
    initial = weights(network())
    result = trained(method="given", active_ratio=0.3)
    best = np.argsort(-initial.abs().numpy(), kind="stable")[: result.k]
    assert result.k == int(0.3 * initial.numel())
    assert result.support.indices.tolist() == sorted(best.tolist())


def test_public_scores_cost_nothing_and_the_record_names_them(tmp_path: Path) -> None:
    scores = {"head": 1.0}
    result = trained(public_scores=scores, run_dir=tmp_path / "run")
    assert result.plan.events() == build_plan("dp-sgd", units=ROWS, **BUDGET).events()
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert PublicScores.of(scores).checksum in json.dumps(record)
    with pytest.raises(SparseDPError, match="ranking was"):
        trained(public_scores={"bias": 1.0}, run_dir=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "got nothing"),
        (torch.ones(WORDS), "got Tensor"),
        (["bias"], "got list"),
        ("bias", "got str"),
        ({0: 1.0}, "type int"),
        ({"head": 1j}, "complex"),
        ({"0.weight": torch.zeros(5)}, "got shape"),
        ({"no.such": 1.0}, "fits none"),
        ({"head": float("nan")}, "NaN"),
        ({"head": False}, "nothing would be trained"),
        ({"head": "much"}, "expected numbers"),
    ],
)
def test_public_scores_without_meaning_are_refused(scores: Any, message: str) -> None:
    with pytest.raises(SparseDPError, match=message):
        trained(public_scores=scores)


def test_public_scores_for_a_method_that_does_not_rank_by_them_are_refused() -> None:
    with pytest.raises(SparseDPError, match="does not rank by them"):
        trained(public_scores={"head": 1.0}, method="tp-topk")


def test_public_scores_that_take_rows_in_part_are_refused_and_whole_ones_are_taken() -> None:
    mask = torch.zeros(WORDS, WIDTH, dtype=torch.bool)
    mask[7] = True
    assert active(trained(public_scores={"0.weight": mask}, options=BY_ROWS))["0.weight"] == [21, 22, 23]
    mask[3, 1] = mask[4, :2] = True
    for given in (mask, torch.where(mask, 2.0, float("-inf"))):
        with pytest.raises(SparseDPError, match=r"2 of the 12 rows of '0\.weight'"):
            trained(public_scores={"0.weight": given}, options=BY_ROWS)
