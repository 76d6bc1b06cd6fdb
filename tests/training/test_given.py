"""`given`: public scores, masks and names choose what is trained, and nothing is charged for them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flat_settings import placed
from sparsedp.errors import SparseDPError
from sparsedp.methods import Granularity, MethodOptions, PublicScores, build_plan
from sparsedp.parameters import ParameterLayout
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.training.fit import fit
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.settings import Settings

pytestmark = pytest.mark.usefixtures("checked_once")

LOSS = nn.CrossEntropyLoss(reduction="none")
ROWS, WORDS, WIDTH = 60, 12, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Flatten(), nn.Linear(2 * WIDTH, 2))


def data() -> TensorDataset:
    rng = np.random.default_rng(0)
    return TensorDataset(
        torch.from_numpy(rng.integers(0, WORDS, (ROWS, 2))), torch.from_numpy(rng.integers(0, 2, ROWS))
    )


def trained(model=None, **how):
    asked = {"epsilon": 4.0, "delta": 1e-3, "epochs": 2, "batch_size": 20, "accountant": "rdp", "lr": 0.5}
    if "public_scores" in how and {"active_ratio", "options"} & set(how):
        how = {"method": "given", **how}
    return fit(model or network(), data(), LOSS, **placed({**asked, **how}), seed=3, progress=False)


def active(result) -> dict[str, list[int]]:
    layout = ParameterLayout.of(result.model)
    return {name: places.tolist() for name, places in result.support.split(layout).items()}


def test_rows_by_a_public_count_with_the_head_always():
    counts = torch.tensor([0.0, 5, 9, 1, 9, 2, 0, 0, 3, 0, 0, 0])
    result = trained(
        public_scores={"0.weight": counts}, active_ratio=0.25,
        options=MethodOptions(granularity=Granularity.ROWS, always=("dense",)),
    )  # fmt: skip
    rows = [1, 2, 4]  # a quarter of twelve: the counts 9, 9 and 5
    assert active(result)["0.weight"] == [row * WIDTH + i for row in rows for i in range(WIDTH)]
    assert len(active(result)["2.weight"]) == 2 * WIDTH * 2
    assert result.method == "given"


def test_a_mask_and_names_are_all_that_is_trained():
    mask = torch.zeros(WORDS, WIDTH, dtype=torch.bool)
    mask[3, 1] = mask[7] = True
    before = network()
    result = trained(public_scores={"0.weight": mask, "bias": 2.0})
    assert active(result) == {"0.weight": [10, 21, 22, 23], "2.weight": [], "2.bias": [0, 1]}
    moved = {
        name: int((p != q).sum())
        for (name, p), q in zip(result.model.named_parameters(), before.parameters(), strict=True)
    }
    assert moved["2.weight"] == 0
    assert 0 < moved["0.weight"] <= 4


def test_without_scores_it_is_the_magnitude_of_the_initial_weights():
    weights = ParameterLayout.of(network()).flatten(network())
    result = trained(method="given", active_ratio=0.3)
    best = np.argsort(-weights.abs().numpy(), kind="stable")[: result.k]
    assert result.k == int(0.3 * weights.numel())
    assert result.support.indices.tolist() == sorted(best.tolist())


def test_it_costs_what_dense_training_costs_and_the_record_names_the_scores(tmp_path):
    scores = {"head": 1.0}
    result = trained(public_scores=scores, run_dir=tmp_path / "run")
    dense = build_plan(
        "dp-sgd", units=ROWS, epsilon=4.0, delta=1e-3, epochs=2, batch_size=20, accountant="rdp"
    )
    assert result.plan.events() == dense.events()
    assert plan_epsilon(result.plan) <= 4.0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert PublicScores.of(scores).checksum in json.dumps(record)


def test_a_run_resumes_with_the_same_scores_alone(tmp_path):
    def stop(event):
        if getattr(event, "step", None) == 3 and hasattr(event, "released"):
            raise KeyboardInterrupt

    scores = {"0.weight": torch.arange(float(WORDS))}
    how = {"active_ratio": 0.3, "options": MethodOptions(granularity=Granularity.ROWS)}
    straight = trained(public_scores=scores, run_dir=tmp_path / "straight", **how)
    with pytest.raises(KeyboardInterrupt):
        trained(public_scores=scores, run_dir=tmp_path / "stopped", callbacks=[stop], **how)
    with pytest.raises(SparseDPError, match="ranking was"):
        trained(public_scores={"head": 1.0}, run_dir=tmp_path / "stopped", resume=True, **how)
    resumed = trained(public_scores=scores, run_dir=tmp_path / "stopped", resume=True, **how)
    assert resumed.support == straight.support
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"public_scores": {}}, "got nothing"),
        ({"public_scores": torch.ones(WORDS)}, "got Tensor, expected a mapping"),
        ({"public_scores": ["bias"]}, "got list, expected a mapping"),
        ({"public_scores": "bias"}, "got str, expected a mapping"),
        ({"public_scores": {0: 1.0}}, "the key 0 of type int, expected the name"),
        ({"public_scores": {"head": 1j}}, "complex numbers for 'head', expected real"),
        ({"public_scores": {"0.weight": torch.zeros(5)}}, "got shape"),
        ({"public_scores": {"no.such": 1.0}}, "fits none"),
        ({"public_scores": {"head": float("nan")}}, "NaN"),
        ({"public_scores": {"head": False}}, "nothing would be trained"),
        ({"public_scores": {"head": "much"}}, "expected numbers"),
        ({"public_scores": {"head": 1.0}, "method": "tp-topk"}, "does not rank by them"),
    ],
)
def test_scores_that_make_no_sense_are_refused(how, message):
    with pytest.raises(SparseDPError, match=message):
        trained(**how)


def test_rows_that_a_mask_takes_in_part_are_refused_and_whole_ones_are_taken():
    by_rows = MethodOptions(granularity=Granularity.ROWS, always=("dense",))
    mask = torch.zeros(WORDS, WIDTH, dtype=torch.bool)
    mask[7] = True
    result = trained(public_scores={"0.weight": mask}, options=by_rows)
    assert active(result)["0.weight"] == [21, 22, 23]
    mask[3, 1] = mask[4, :2] = True
    scores = torch.where(mask, 2.0, float("-inf"))
    for given in (mask, scores):
        with pytest.raises(SparseDPError, match=r"2 of the 12 rows of '0\.weight'.*mask whole rows"):
            trained(public_scores={"0.weight": given}, options=by_rows)


def test_a_file_of_scores_is_a_setting(tmp_path):
    path = tmp_path / "scores.npz"
    np.savez(path, **{"*.bias": np.array(True)})
    settings = {
        "dataset": "zipf", "data_options": {"records": 60, "vocabulary": 40}, "method": "given", "seed": 1,
        "epochs": 1, "batch_size": 20, "delta": 1e-3, "public_scores": str(path), "lr": 0.1,
    }  # fmt: skip
    result = execute(Settings.from_json(settings))
    assert {name for name, places in active(result).items() if places} == {
        slot.name for slot in ParameterLayout.of(result.model) if slot.name.endswith(".bias")
    }
    with pytest.raises(SparseDPError, match="cannot be read"):
        execute(Settings.from_json({**settings, "public_scores": str(tmp_path / "none.npz")}))
