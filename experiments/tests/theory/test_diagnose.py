import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import LOSS, batches, gradients_by_loop, network, rows
from sparsedp.diagnostics import RunView
from sparsedp.randomness import PublicRandomness
from sparsedp.runs.run import Run
from sparsedp_experiments.theory.diagnose import diagnose_nonprivate


def a_run(out, method):
    return sparsedp.fit(
        network(), TensorDataset(*rows(80)), nn.CrossEntropyLoss(reduction="none"), method=method, epsilon=8.0,
        delta=1e-3, epochs=4, batch_size=20, max_grad_norm=0.5, seed=3, progress=False, accountant="rdp", run_dir=out,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tp-topk"
    return out, a_run(out, "tp-topk")


def test_the_view_is_the_runs_public_state_and_its_proxy_has_a_null(run):
    out, result = run
    view = RunView.of(Run.open(out))
    assert view.support == result.support
    assert torch.equal(view.scores, result.scores)
    proxy = view.proxy()
    positive = result.scores.clamp(min=0)
    assert proxy.seen == pytest.approx(float(positive[view.support.indices].sum() / positive.sum()))
    assert 0.5 < proxy.null.mean < 1


def test_methods_without_scores_have_no_proxy(tmp_path):
    for method in ("tp-rand", "dp-sgd"):
        a_run(tmp_path / method, method)
        assert RunView.of(Run.open(tmp_path / method)).proxy() is None


def test_the_file_holds_what_a_plain_loop_finds_and_nothing_else_changes(run):
    out, result = run
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    said = []
    path = diagnose_nonprivate(out, network(7), LOSS, batches(), PublicRandomness(0), said.append)
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(after) - set(before) == {"nonprivate.json"}
    assert all(after[name] == content for name, content in before.items())
    document = json.loads(path.read_text())
    values = {entry["name"]: entry["value"] for entry in document["values"]}
    energies = gradients_by_loop(result.model, *rows()).mean(0) ** 2
    share = float(energies[result.support.indices].sum() / energies.sum())
    assert values["gradient energy on the support (alpha_oracle)"] == pytest.approx(share, rel=1e-3)
    assert values["random support, lower end of 95 %"] < 8 / 43 < values["random support, upper end of 95 %"]
    assert values["clipping bias"] <= values["bound on the clipping bias (Lemma 6.4)"] + 1e-12
    assert values["smoothness (largest curvature)"] > 0
    assert all("Not private" in entry["note"] for entry in document["values"] + document["figures"])
    recovered = document["figures"][1]["series"]
    assert [line["name"] for line in recovered] == ["ranked by the run", "random", "oracle"]
    assert recovered[0]["y"][-1] == pytest.approx(1.0)
    assert said
