"""What a run's folder shows anyone, against a plain computation from its files."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import network, rows
from sparsedp.diagnostics import RunView, SplitEnergies, WarmupStatistics, look
from sparsedp.runs.reader import Run


def a_run(out, method="tp-topk", **more):
    return sparsedp.fit(
        network(), TensorDataset(*rows(60)), nn.CrossEntropyLoss(reduction="none"), method=method, epsilon=8.0,
        delta=1e-3, epochs=4, batch_size=20, clip_norm=0.5, seed=3, progress=False, accountant="rdp", out=out, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, a_run(out)


@pytest.fixture
def run(trained, monkeypatch):
    """A sparse run, with a warm-up made up by hand: three coordinates hold nearly all energy."""
    means = torch.full((43,), 0.01, dtype=torch.float64)
    means[:3] = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    split = SplitEnergies(torch.arange(43), means, means.clone(), 1e-4, 1e-4)
    made_up = WarmupStatistics({"energy": split}, 4, 4, 0.02)
    monkeypatch.setattr("sparsedp.diagnostics._statistics", lambda run: (made_up, None))
    return trained


def test_the_split_estimate_is_that_of_the_support_size(run):
    seen = look(run[0])
    assert (seen.size, seen.dimension) == (8, 43)
    whole = 4 + 9 + 1 + 40 * 1e-4
    assert seen.splits["energy"].share.value == pytest.approx((14 + 5 * 1e-4) / whole)
    assert seen.splits["energy"].active_ratio == pytest.approx(8 / 43)
    assert seen.missing is None


def test_layers_and_overlap_follow_from_the_files(run):
    out, result = run
    seen = look(out)
    assert {layer.name: layer.active for layer in seen.layers} == dict(result.supports[-1].by_parameter)
    (pair,) = seen.overlaps
    assert pair[2].shared == len(set(range(8)) & set(result.support.indices.tolist()))
    tensors = load_file(out / "checkpoint.safetensors")
    assert tensors["journal/support"].tolist() == result.support.indices.tolist()


def test_noise_facts_are_the_plans(run):
    plan, noise = run[1].plan, look(run[0]).noise
    nu = plan.phases[-1].noise_multiplier * 0.5 / 20
    assert (noise.sparse_energy, noise.dense_energy) == pytest.approx((8 * nu**2, 43 * nu**2))


def test_as_json_it_has_every_part(run):
    found = look(run[0]).to_json()
    assert found["proxy"]["surprise"] == pytest.approx(
        (found["proxy"]["seen"] - found["proxy"]["null"]["mean"]) / found["proxy"]["null"]["std"]
    )
    assert found["splits"]["energy"]["share"]["value"] > 0.99


def test_a_dense_run_is_looked_at_as_if_it_kept_a_fifth(tmp_path):
    a_run(tmp_path / "run", "dp-sgd")
    seen = look(tmp_path / "run")
    assert seen.size == 8
    assert seen.overlaps == ()
    assert set(seen.splits) == {"energy", "coherent"}


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9), 2.0),
        (lambda p: torch.optim.SGD(p, lr=0.2), 0.2),
        (lambda p: torch.optim.Adam(p, lr=0.2), None),
    ],
)
def test_the_learning_rate_of_the_bounds_counts_momentum(tmp_path, optimizer, rate):
    a_run(tmp_path / "run", "dp-sgd", optimizer=optimizer)
    assert RunView.of(Run.open(tmp_path / "run")).learning_rate == pytest.approx(rate)
