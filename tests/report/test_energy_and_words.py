"""Noise energy against what was really released, and the guarantee in words."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from report_runs import train

import sparsedp
from sparsedp import MethodOptions, Result, StepReport
from sparsedp.methods import Constant, EverySteps, build_plan, get_method
from sparsedp.privacy import plan_epsilon
from sparsedp.privacy.plan import Plan
from sparsedp.report import trajectory
from sparsedp.report.energy import energy_share, stretches
from sparsedp.report.words import in_words


def a_plan(unit: str = "row", epsilon: float = 3.0) -> Plan:
    return build_plan(
        get_method("tp-topk"),
        units=500,
        batch_size=50,
        epochs=4,
        epsilon=epsilon,
        delta=1e-4,
        max_grad_norm=1.0,
        unit_name=unit,
        accountant="rdp",
    )


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk", "on-rand", "ranked"])
def test_the_stretches_add_up_to_the_noise_every_release_carried(method):
    released: list[float] = []

    def watch(event: object) -> None:
        if isinstance(event, StepReport):
            released.append(float(event.released.noise_scale.square().sum()))

    result: Result = train(method, seed=0, callbacks=[watch])
    parts = stretches(result.plan, result.supports, result.d, result.plan.total_steps)
    assert sum(part.steps for part in parts) == result.plan.total_steps
    by_step = [part.energy for part in parts for _ in range(part.steps)]
    assert by_step == pytest.approx(released, rel=1e-9)
    share = energy_share(parts, result.d)
    assert share == pytest.approx(
        sum(released) / sum(result.d * part.noise_std**2 * part.steps for part in parts)
    )
    assert (share == pytest.approx(1.0)) == (method == "dp-sgd")


def test_no_noise_has_no_share():
    result = train("clipped-sgd", epsilon=None, seed=0)
    assert energy_share(stretches(result.plan, result.supports, result.d, 5), result.d) is None


def test_words_name_the_unit_the_relation_and_the_odds():
    words = in_words(a_plan(), seeded=False, complete=True, evaluated=True)
    said = " ".join(words.promises)
    assert words.warning is None
    assert f"{math.exp(3.0):.3g}" in said
    assert "one row added or removed" in said
    assert "The unit is a row, not a person or patient" in said
    patients = " ".join(in_words(a_plan("patient"), seeded=False, complete=True, evaluated=False).promises)
    assert "one patient with all its rows: 500" in patients
    assert "not a person" not in patients


def test_the_odds_of_a_plan_with_less_noise_than_it_was_calibrated_to_are_those_it_has():
    plan = a_plan()
    louder = replace(
        plan, phases=tuple(replace(p, noise_multiplier=p.noise_multiplier / 2) for p in plan.phases)
    )
    said = in_words(louder, seeded=False, complete=True, evaluated=False).promises[0]
    odds = math.exp(plan_epsilon(louder))
    shown = re.search(r"= ([\d.e+]+) times", said)
    assert shown is not None
    assert odds <= float(shown[1]) < 1.01 * odds


def test_words_warn_of_seeds_of_early_stops_and_of_exact_held_out_numbers():
    plain = in_words(a_plan(), seeded=False, complete=True, evaluated=False)
    seeded = in_words(a_plan(), seeded=True, complete=False, evaluated=True)
    assert seeded.warning is not None
    assert "not for release" in seeded.warning
    extra = [limit for limit in seeded.limits if limit not in plain.limits]
    assert len(extra) == 2
    assert any("stopped before" in limit for limit in extra)
    assert any("Held-out" in limit for limit in extra)
    assert any("Tuning" in limit for limit in plain.limits)


def test_a_plan_that_protects_nobody_promises_nothing():
    plan = build_plan(
        sparsedp.get_method("clipped-sgd"),
        units=50,
        batch_size=5,
        epochs=1,
        epsilon=None,
        delta=None,
        max_grad_norm=1.0,
    )
    words = in_words(plan, seeded=True, complete=True, evaluated=True)
    assert words.promises == ()
    assert words.warning is not None
    assert "protects nobody" in words.warning


def test_a_support_that_changes_at_every_step_keeps_the_page_small(tmp_path, monkeypatch):
    monkeypatch.setattr(trajectory, "MOST_ROWS", 20)
    result = train("on-rand", seed=0, options=MethodOptions(clock=EverySteps(1)), epochs=25)
    assert len(result.supports) > 90
    page = result.report(tmp_path / "report.html")
    assert page.stat().st_size < 200_000
    assert "more, in record.json" in page.read_text()
    constant = MethodOptions(clock=EverySteps(1), schedule=Constant(), active_ratio=0.5)
    steady = train("on-rand", seed=0, options=constant, epochs=10)
    parts = stretches(steady.plan, steady.supports, steady.d, steady.plan.total_steps)
    assert len(steady.supports) > 35
    assert [(part.steps, part.active) for part in parts] == [(40, steady.d // 2)]
