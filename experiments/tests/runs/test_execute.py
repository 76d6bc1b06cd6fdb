"""A run from its settings: what reaches fit, and that an audit sees the same."""

import pytest
import torch

from sparsedp.auditing import AuditResult
from sparsedp.batch import per_sample_loss
from sparsedp.errors import ModelError, PrivacyError, PrivacyWarning, SparseDPError
from sparsedp.parameters import ParameterLayout
from sparsedp.randomness import PublicRandomness
from sparsedp_experiments import data
from sparsedp_experiments.attacks import audits
from sparsedp_experiments.data import DATASETS, DataBundle, Dense, Split, registry
from sparsedp_experiments.data.spec import DatasetRow
from sparsedp_experiments.runs import settings as settings_module
from sparsedp_experiments.runs.ablations import support_of, train_ablation
from sparsedp_experiments.runs.execute import _load, build_model, execute, load_data, ranking_metrics
from sparsedp_experiments.runs.settings import Settings

# Settings carried out: data, model, privacy unit and optimizer are those asked for.


pytestmark = pytest.mark.usefixtures("checked_once")

TINY = {"dataset": "digits", "subset": 120, "epochs": 1, "batch_size": 30, "epsilon": 8.0, "seed": 0}


def settings(**changes):
    return Settings.from_json({**TINY, **changes})


@pytest.fixture
def patients(monkeypatch):
    """60 rows of 20 patients to train on, 20 rows of 10 others to test on."""
    generator = torch.Generator().manual_seed(0)

    def side(rows, people, first):
        inputs, targets = torch.rand(rows, 4, generator=generator), torch.arange(rows) % 2
        return Split(Dense(inputs), targets, first + torch.arange(rows) % people)

    bundle = DataBundle(
        "clinic", "made up", side(60, 20, 0), side(20, 10, 100), ("well", "ill"), unit="patient"
    )
    row = DatasetRow(name="clinic", title="c", source=None, loader=lambda root: bundle, model="logistic")
    for module in (data, registry, settings_module):
        monkeypatch.setattr(module, "DATASETS", {**DATASETS, "clinic": row})
    _load.cache_clear()
    return {"dataset": "clinic", "epochs": 1, "batch_size": 5, "seed": 0}


def test_people_are_protected_where_the_data_knows_them(patients):
    result = execute(Settings.from_json(patients))
    assert (result.unit, result.plan.units) == ("patient", 20)
    assert set(result.metrics) >= {
        "auc",
        "average_precision",
        "balanced_accuracy",
        "sensitivity",
        "specificity",
    }


def test_rows_are_protected_only_when_asked_for_and_with_a_warning(patients):
    with pytest.warns(PrivacyWarning, match="rows are protected"):
        result = execute(Settings.from_json({**patients, "unit": "row"}))
    assert (result.unit, result.plan.units) == ("row", 60)


def test_inputs_are_normalised_for_each_patient_where_that_is_asked_for(patients):
    asked = {"normalise": {"noise_multiplier": 6.0}, "epsilon": 8.0}
    result = execute(Settings.from_json({**patients, **asked, "rows_per_unit": 3}))
    first = result.plan.phases[0]
    assert (first.name, first.noise_multiplier, first.clip_norm, first.trains) == (
        "normalise",
        6.0,
        1.0,
        False,
    )
    assert result.plan.expected_batch_size(first) == 20
    assert result.epsilon <= 8.0
    assert result.model.centre.shape == (4,)


def test_a_seed_decides_everything():
    first, again, other = (execute(settings(seed=seed)) for seed in (3, 3, 4))
    weights = [
        torch.cat([p.flatten() for p in result.model.parameters()]) for result in (first, again, other)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_initial_weights_come_from_the_seed_and_leave_torch_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two = (build_model("mlp", {"hidden": [4]}, (1, 8, 8), 10, seed=1) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one[1].weight, two[1].weight)
    assert one[1].weight.shape == (4, 64)


def test_a_validation_split_takes_the_test_sets_place():
    whole, split = (
        load_data(settings(subset=None or 10**6)),
        load_data(settings(subset=10**6, validation=0.25)),
    )
    assert len(split.train) + len(split.test) == len(whole.train)
    assert abs(len(split.test) - 0.25 * len(whole.train)) < 1
    kept = {tuple(row) for row in whole.train.inputs.flatten(1).tolist()}
    assert {tuple(row) for row in split.test.inputs.flatten(1).tolist()} <= kept


ABLATION = {"dataset": "digits", "subset": 120, "epochs": 3, "batch_size": 30, "lr": 0.2, "seed": 0}


def test_train_ablation_without_noise_and_with_a_far_clip_both_are_the_same_plain_sgd():
    noisy = train_ablation(Settings.from_json({**ABLATION, "method": "noisy-sgd", "noise_std": 0.0}))
    clipped = train_ablation(Settings.from_json({**ABLATION, "method": "clipped-sgd", "clip_norm": 1e6}))
    assert noisy["metrics"]["loss"] == pytest.approx(clipped["metrics"]["loss"], rel=1e-5)
    loud = train_ablation(Settings.from_json({**ABLATION, "method": "noisy-sgd", "noise_std": 5.0}))
    assert loud["metrics"]["loss"] != pytest.approx(noisy["metrics"]["loss"], rel=1e-2)
    assert (noisy["private"], noisy["epsilon"], noisy["steps_charged"]) == (False, None, 0)


def test_train_ablation_trains_the_supports_of_on_rand():
    sparse = {**ABLATION, "active_ratio": 0.25}
    private = execute(Settings.from_json({**sparse, "method": "on-rand", "epsilon": 8.0}))
    layout = ParameterLayout.of(private.model)
    ours = [support_of(layout, PublicRandomness(0), epoch, 3, 0.25) for epoch in range(3)]
    assert ours[-1] == private.support
    assert [span.active for span in private.supports] == [support.size for support in ours]
    record = train_ablation(Settings.from_json({**sparse, "method": "clipped-sgd"}))
    assert (record["k"], record["d"]) == (private.k, private.d)


def test_execute_of_an_ablation_is_refused():
    with pytest.raises(PrivacyError, match="protects nobody"):
        execute(Settings.from_json({**ABLATION, "method": "clipped-sgd"}))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "cnn"}, ModelError, "mnist-cnn"),
        ({"model_options": {"width": 3}}, ModelError, "knows no"),
        ({"data_options": {"groups": 9}}, SparseDPError, "knows no"),
        ({"momentum": 0.5, "model": "logistic"}, SparseDPError, "lr: not given"),
        ({"dataset": "mnist-scattering", "data_options": {"colour": 1}}, SparseDPError, "knows no"),
    ],
)
def test_what_cannot_be_done_is_said(changes, error, words):
    with pytest.raises(error, match=words):
        execute(settings(**changes))


def test_least_squares_is_one_release_over_all_units_unless_told_otherwise():
    asked = {"dataset": "digits", "model": "least-squares", "method": "auto"}
    asked |= {"epsilon": 8.0, "delta": 1e-5, "seed": 0}
    result = execute(Settings.from_json(asked))
    (phase,) = result.plan.phases
    assert (phase.steps, phase.sampling_rate) == (1, 1.0)
    assert phase.clip_norm == pytest.approx((1 + 0.9) ** 0.5), "what a record of ten classes adds"
    assert result.metrics["accuracy"] > 0.8
    sampled = execute(Settings.from_json({**asked, "epochs": 2, "batch_size": 500}))
    assert sampled.plan.phases[0].steps > 2
    assert sampled.metrics["accuracy"] > 0.8


# What is audited is what `execute` would run, least squares among it.


MOMENTS = {"dataset": "digits", "model": "least-squares", "method": "auto", "epsilon": 8.0, "delta": 1e-5}

LOGISTIC = {**MOMENTS, "model": "logistic", "epochs": 1}


@pytest.fixture
def attacked(monkeypatch):
    """What an audit of some settings attacks, without the attack."""

    def subject(asked):
        seen = {}
        monkeypatch.setattr(audits, "audit_plan", lambda *given, **how: seen.update(given=given, **how))
        audits.audit_settings(Settings.from_json(asked))
        return seen

    return subject


@pytest.mark.parametrize(
    "changes", [{}, {"normalise": {"noise_multiplier": 20.0}}, {"epochs": 2, "batch_size": 500}]
)
@pytest.mark.parametrize("asked", [MOMENTS, LOGISTIC], ids=["least-squares", "logistic"])
def test_an_audit_has_the_plan_of_the_run_and_a_loss_with_gradients(attacked, asked, changes):
    found = attacked({**asked, **changes})
    model, data, loss = found["given"]
    run = execute(Settings.from_json({**asked, **changes, "seed": 0}))
    assert found["plan"] == run.plan
    losses = per_sample_loss(loss)(model, data.rows_at(torch.arange(20)))
    losses.sum().backward()
    assert all(float(parameter.grad.norm()) > 0 for parameter in model.parameters())


def test_the_one_release_of_least_squares_passes_its_audit():
    found = audits.audit_settings(Settings.from_json(MOMENTS), steps=2, confidence=0.9999999)
    assert isinstance(found, AuditResult)
    assert found.passed
    assert 4 < found.lower_bound <= found.claimed_epsilon <= 8


@pytest.mark.parametrize("levels", [100_000, 7, 1])
def test_ranking_metrics_go_through_the_thresholds_ties_included(levels):
    generator = torch.Generator().manual_seed(levels)
    targets = (torch.rand(300, generator=generator) < 0.3).long()
    raw = torch.rand(300, generator=generator, dtype=torch.float64) - 0.6 + 0.3 * targets
    scores = torch.floor(levels * raw) / levels
    positives, negatives = int(targets.sum()), int((1 - targets).sum())
    precision, before, recall, at_prevalence = 0.0, 0, 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        taken = targets[scores >= threshold]
        hits, alarms = int(taken.sum()), int((1 - taken).sum())
        precision += (hits - before) / positives * hits / (hits + alarms)
        before = hits
        recall = hits / positives if alarms <= 0.1 * negatives + 1e-9 else recall
        at_prevalence = hits / positives if hits + alarms <= positives else at_prevalence
    wanted = {
        "average_precision": precision,
        "recall_at_90_specificity": recall,
        "recall_at_prevalence": at_prevalence,
    }
    assert ranking_metrics(scores, targets == 1) == pytest.approx(wanted, abs=1e-12)
