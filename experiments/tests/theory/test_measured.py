"""The bounds with measured numbers put in, by hand; and the whole diagnosis of a run against a plain loop."""

import json
import math
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import LOSS, batches, gradients_by_loop, network, rows
from sparsedp.diagnostics import RunView
from sparsedp.grad_sample import make_engine
from sparsedp.methods import build_plan, get_method
from sparsedp.parameters import Support
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments.theory.diagnose import Limits, diagnose_nonprivate
from sparsedp_experiments.theory.measured import MOST_POINTS, symmetry_findings
from sparsedp_experiments.theory.measured_bounds import Measured, bound_findings
from sparsedp_experiments.theory.nonprivate import Findings, NonPrivate
from sparsedp_experiments.theory.oracle import deviations
from sparsedp_experiments.theory.snapshots import SnapshotFiles

PLAN = build_plan(
    get_method("on-rand"), units=1000, batch_size=100, epochs=4, epsilon=8.0, delta=1e-5, max_grad_norm=0.5,
    accountant="rdp",
)  # fmt: skip
PHASE = PLAN.phases[-1]
MEASURED = Measured(
    smoothness=2.0, start_loss=3.0, end_loss=1.0, retained=0.25, captured=0.5, largest_deviation=4.0,
    symmetry_error=0.01, kappa=0.4, squared_biases=(0.09, 0.01), unit_variance=0.2,
)  # fmt: skip


def found(measured=MEASURED, rate=0.1, plan=PLAN):
    view = RunView(plan, Support(torch.arange(20), 100), None, None, rate)
    return bound_findings(NonPrivate(measured, "made up"), view)


def value(findings, name):
    return findings.values[name].value


def test_bounds_by_hand():
    """Steps 40, clip 1/2, batch 100, k/d = 20/100, noise s of the plan."""
    got, s = found(), PHASE.noise_multiplier
    delta_c = 3 / (0.1 * 40) + 0.1 * 2 * 0.25 / 2 - 0.01
    delta_s = 0.25 * s**2 * 100 * 2 / (2 * 100**2)
    assert value(got, "Delta_C (RS)") == pytest.approx(delta_c)
    assert value(got, "Delta_sigma (RS)") == pytest.approx(delta_s)
    assert value(got, "best share to freeze, r* (RS)") == pytest.approx(max(0, 1 - delta_c / (0.1 * delta_s)))
    assert value(got, "bound of RS, Theorem 3.4 (clip, no noise)") == pytest.approx(delta_c / 0.4)
    assert value(got, "bound of RS, Theorem 3.5") == pytest.approx((delta_c + 0.2 * 0.1 * delta_s) / 0.4)
    assert value(got, "bound of RS, eq. 15 (all coordinates)") == pytest.approx(delta_c + 0.1 * delta_s)
    spread = 16 / 100 + 100 * (s / 2) ** 2 / 100**2
    assert value(got, "bound of RS, Theorem 3.2 (noise, no clip)") == pytest.approx(
        (2 * 2 * 3 / 0.2 + spread) / math.sqrt(40)
    )
    assert value(got, "bound of AdaDPIGU, Theorem 13") == pytest.approx(3 / 4 + 0.1 * 2 * 0.25 / 2)
    kept = 16 / 100 + 20 * (s / 2) ** 2 / 100**2
    assert value(got, "bound of AdaDPIGU, Theorem 16") == pytest.approx((12 + kept) / (0.25 * math.sqrt(40)))
    noise = 20 * (s * 0.5 / 100) ** 2
    assert value(got, "bound of AdaDPIGU, Theorem 17") == pytest.approx(2 / 40 / 0.1 + 0.1 * (0.25 + noise))
    total = 2 * 3 / 4 + 0.05 + 0.2 * 0.2 / 100 + 0.2 * noise
    assert value(got, "bound of Theorem 6.3 (gradient on the support)") == pytest.approx(total)
    assert value(got, "bound of Corollary 6.6 (whole gradient)") == pytest.approx(total / 0.5)
    assert len(got.remarks) == 1


def test_the_budget_bound_takes_the_constant_that_gives_the_plans_noise():
    """With u so chosen, C u q sqrt(log(1/delta))/epsilon is C s/sqrt(T): RS, Corollary C.1.1 by hand."""
    noise = 100 * (0.5 * PHASE.noise_multiplier / math.sqrt(40)) ** 2 / (2 * math.sqrt(40))
    rest = 3 * 2 / math.sqrt(40) + 0.25 / (2 * math.sqrt(40)) - 0.01
    assert value(found(), "bound of RS, Corollary C.1.1") == pytest.approx((rest + 0.2 * noise) / 0.4)


def test_a_rate_beyond_the_theorem_is_cut_and_said():
    got = found(rate=5.0)
    assert value(got, "Theorem 6.3, progress") == pytest.approx(2 * 3 / (0.5 * 40))
    assert any("1/smoothness" in remark for remark in got.remarks)


def test_what_cannot_be_measured_is_said():
    def changed(**what):
        return Measured(**{name: getattr(MEASURED, name) for name in MEASURED.__slots__} | what)

    unknown = found(changed(kappa=None))
    assert value(unknown, "kappa (RS), measured or sqrt(k/d)") == pytest.approx(math.sqrt(0.2))
    assert any("kappa cannot be measured" in remark for remark in unknown.remarks)
    assert "another optimizer" in found(rate=None).remarks[0]
    for flat in (0.0, math.nan, math.inf):
        assert "no curvature" in found(changed(smoothness=flat)).remarks[0]
    empty = found(changed(retained=0.0, captured=0.0))
    assert "bound of AdaDPIGU, Theorem 16" not in empty.values
    assert "bound of Corollary 6.6 (whole gradient)" not in empty.values


def test_symmetry_values_of_a_mirrored_and_of_a_lopsided_cloud():
    """Sign flips of a mirrored cloud are never less lopsided than it, so its p-value is exactly 1."""
    half = torch.randn(300, 2, generator=torch.Generator().manual_seed(0)).double()
    mirrored = symmetry_findings(NonPrivate(torch.cat([half, -half]), "made up"), PublicRandomness(0))
    assert value(mirrored, "lopsidedness of gradient deviations (0 to 1)") == pytest.approx(0, abs=1e-12)
    assert value(mirrored, "p-value of symmetry") == pytest.approx(1)
    lopsided = symmetry_findings(NonPrivate(half.abs(), "made up"), PublicRandomness(0))
    assert value(lopsided, "p-value of symmetry") == pytest.approx(1 / 1000)
    assert value(lopsided, "lopsidedness of gradient deviations (0 to 1)") > value(
        lopsided, "lopsidedness of a symmetric cloud, 95 % point"
    )
    figure = mirrored.figures[0].value
    assert (figure.kind, len(figure.lines[0].x)) == ("points", MOST_POINTS)


def test_deviations_are_those_of_a_plain_loop():
    model, told = network(), []
    mean, found = deviations(make_engine(model, LOSS), batches(), 10, lambda *p: told.append(p)).value
    expected = gradients_by_loop(model, *rows())[:10]
    torch.testing.assert_close(mean, expected.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found, expected - expected.mean(0), rtol=1e-4, atol=1e-6)
    assert told[-1] == (10, 10)


def test_findings_add_up():
    one, two = Findings({"a": NonPrivate(1.0, "x")}, (), ("r",)), Findings({"b": NonPrivate(2.0, "x")})
    both = one | two
    assert list(both.values) == ["a", "b"]
    assert both.remarks == ("r",)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    model = network()
    sparsedp.fit(
        model, TensorDataset(*rows(80)), nn.CrossEntropyLoss(reduction="none"), method="tp-topk", epsilon=8.0,
        delta=1e-3, epochs=4, batch_size=20, max_grad_norm=0.5, seed=3, progress=False, accountant="rdp", run_dir=out,
        callbacks=[SnapshotFiles(model, out, count=3)],
    )  # fmt: skip
    return out


def diagnosed(out, **more):
    said, told = [], []
    path = diagnose_nonprivate(
        out, network(7), LOSS, batches(), PublicRandomness(0), said.append, progress=lambda *p: told.append(p), **more
    )  # fmt: skip
    document = json.loads(path.read_text())
    return {entry["name"]: entry["value"] for entry in document["values"]}, document, said, told


def test_with_snapshots_the_energy_along_the_run_is_measured(run):
    values, document, said, told = diagnosed(run)
    assert 0 <= values["energy captured along the run (alpha_T)"] <= 1
    assert values["bound of Corollary 6.6 (whole gradient)"] == pytest.approx(
        values["bound of Theorem 6.3 (gradient on the support)"]
        / values["energy captured along the run (alpha_T)"]
    )
    assert [figure["title"] for figure in document["figures"]][-2:] == [
        "Energy captured along the run", "Clipping along the run",
    ]  # fmt: skip
    assert "gradients along the run" in said
    assert all(0 < done <= whole for done, whole in told)


def test_without_snapshots_bounds_start_from_a_fresh_model_or_are_left_out(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(out / "snapshots")
    values, document, *_ = diagnosed(out)
    assert not any(name.startswith("bound of RS") for name in values)
    assert any("start of the run is not known" in remark for remark in document["remarks"])
    values, *_ = diagnosed(out, fresh=network(9), limits=Limits(unit_rows=4, curvature_rows=4))
    x, y = rows()
    expected = float(nn.functional.cross_entropy(network(9)(x), y).detach())
    assert values["loss where the run began"] == pytest.approx(expected, rel=1e-5)
    assert "bound of RS, Theorem 3.5" in values


def test_a_value_that_is_not_finite_is_left_out_and_said(run, tmp_path):
    out = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(out / "snapshots")
    diverged = network(9)
    with torch.no_grad():
        diverged[0].weight.fill_(math.nan)
    values, document, *_ = diagnosed(out, fresh=diverged)
    assert "loss where the run began" not in values
    assert "bound of RS, Theorem 3.5" not in values
    assert "smoothness (largest curvature)" in values
    assert any("left out: loss where the run began" in remark for remark in document["remarks"])
