"""Rates by part: the same as torch.optim with parameter groups, whatever holds the support."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import a_plan, loss_fn, network, rows
from torch.optim.lr_scheduler import CosineAnnealingLR

from sparsedp.core.errors import SparseDPError
from sparsedp.methods import get_method
from sparsedp.training.trainer import Trainer
from sparsedp_experiments.runs.execute import execute
from sparsedp_experiments.runs.settings import Settings

pytestmark = pytest.mark.usefixtures("checked_once")

HEAD = ("3.weight", "3.bias")


def trained(method="tp-topk", *, optimizer=None, out=None, resume=False, steps=None, model=None, **options):
    trainer = Trainer(
        network() if model is None else model, rows(1), loss_fn, plan=a_plan(get_method(method)),
        optimizer=optimizer or (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9)),
        seed=4, out=out, resume=resume, **options,
    )  # fmt: skip
    with trainer:
        for number, batch in enumerate(trainer):
            trainer.step(batch)
            if number + 1 == steps:
                return trainer.model.state_dict()
        return trainer.finish().model.state_dict()


def by_hand(kind, model, rate, **options):
    """Groups as torch.optim takes them."""
    named = dict(model.named_parameters())
    return kind(
        [
            {"params": [named[name] for name in named if name not in HEAD]},
            {"params": [named[name] for name in HEAD], "lr": 5 * rate},
        ],
        lr=rate,
        **options,
    )


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk", "on-rand"])
@pytest.mark.parametrize(
    ("kind", "rate", "options"),
    [(torch.optim.SGD, 0.2, {"momentum": 0.9}), (torch.optim.AdamW, 0.01, {"weight_decay": 0.1})],
)
@pytest.mark.parametrize(
    "scheduler",
    [
        None,
        pytest.param(lambda optimizer, steps: CosineAnnealingLR(optimizer, steps), marks=pytest.mark.heavy),
    ],
)
def test_factors_give_what_parameter_groups_give(method, kind, rate, options, scheduler):
    model = network()
    expected = trained(
        method, optimizer=by_hand(kind, model, rate, **options), model=model, scheduler=scheduler
    )
    found = trained(
        method, optimizer=lambda p: kind(p, lr=rate, **options), scheduler=scheduler, lr_factors={"head": 5}
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_step_moves_each_part_by_its_factor():
    start = network().state_dict()
    plain, scaled = (
        trained("dp-sgd", steps=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.2), **given)
        for given in ({}, {"lr_factors": {"0.*": 0.25, "3.bias": 3.0}})
    )
    for name, factor in (("0.weight", 0.25), ("0.bias", 0.25), ("3.weight", 1.0), ("3.bias", 3.0)):
        moved, expected = scaled[name] - start[name], factor * (plain[name] - start[name])
        assert float(expected.abs().max()) > 0
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lr_factors": {"tail": 2.0}}, "fits none"),
        ({"lr_factors": {"head": 0.0}}, "a number > 0"),
        ({"lr_factors": {"head": True}}, "a number > 0"),
        ({"lr_factors": {"head": 2.0, "3.bias": 3.0}}, "both fit 3.bias"),
    ],
)
def test_factors_without_a_meaning_are_refused(given, says):
    with pytest.raises(SparseDPError, match=says):
        trained(**given)


def test_an_optimizer_that_is_made_already_is_refused():
    model = network()
    with pytest.raises(SparseDPError, match="made already"):
        trained(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lr_factors={"head": 2.0})


def test_a_run_resumes_with_its_factors_alone(tmp_path: Path):
    factors = {"head": 5.0}
    whole = trained(lr_factors=factors)
    trained(lr_factors=factors, out=tmp_path / "run", steps=7)
    with pytest.raises(SparseDPError, match="lr was 1"):
        trained(lr_factors={"head": 4.0}, out=tmp_path / "run", resume=True)
    resumed = trained(lr_factors=factors, out=tmp_path / "run", resume=True)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_settings_take_factors():
    base = {
        "dataset": "digits",
        "model": "mlp",
        "subset": 64,
        "epochs": 1,
        "batch_size": 16,
        "seed": 0,
        "lr": 0.1,
    }
    given = {**base, "method": "dp-sgd", "epsilon": 8.0, "lr_factors": {"head": 3.0}}
    settings = Settings.from_json(given)
    assert Settings.from_json(settings.to_json()) == settings
    rates = []
    execute(settings, callbacks=[lambda report: rates.append(getattr(report, "learning_rates", None))])
    assert rates[0] == pytest.approx((0.1, 0.3))
