"""What is audited is what `execute` would run, least squares among it."""

import pytest
import torch

from sparsedp.auditing import AuditResult
from sparsedp.batch import per_sample_loss
from sparsedp_experiments.attacks import audits
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.settings import Settings

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
