"""Every door is the same run, with equal bits, epsilons and refusals; and the public names are few."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import sparsedp
from runs import loss_fn, network, rows, sgd, weights
from sparsedp import PrivacyError, Result, get_method
from sparsedp.loading import DataConfig

pytestmark = pytest.mark.usefixtures("checked_once")


BUDGET = {"epsilon": 8.0, "delta": 1e-3, "epochs": 3, "max_grad_norm": 0.7, "accountant": "rdp"}

UNITS = torch.arange(60) // 3


def by_fit(method, seed, budget, unit_ids, criterion) -> Result:
    return sparsedp.fit(
        network(), rows(1), criterion, method=method, batch_size=10, optimizer=sgd, seed=seed, unit_ids=unit_ids,
        progress=False, **budget,
    )  # fmt: skip


def by_trainer(method, seed, budget, unit_ids, criterion) -> Result:
    count, name = (60, "row") if unit_ids is None else (len(unit_ids.unique()), "unit")
    plan = sparsedp.plan(method, units=count, unit_name=name, batch_size=10, **budget)
    trainer = sparsedp.Trainer(
        network(), rows(1), criterion, plan=plan, optimizer=sgd, seed=seed, data=DataConfig(unit_ids=unit_ids)
    )
    for batch in trainer:
        trainer.step(batch)
    return trainer.finish()


def by_make_private(method, seed, budget, unit_ids, criterion) -> Result:
    model = network()
    private = sparsedp.make_private(
        model, sgd(model.parameters()), DataLoader(rows(1), batch_size=10), criterion, method=method, seed=seed,
        unit_ids=unit_ids, **budget,
    )  # fmt: skip
    for _ in range(3):
        for x, y in private.loader:
            private.criterion(private.model(x), y).backward()
            private.optimizer.step()
    return private.result


DOORS = {"Trainer": by_trainer, "make_private": by_make_private}

RUNS = {
    "dense": {},
    "sparse, changed": {"method": get_method("tp-topk", active_ratio=0.4, warmup_fraction=0.5)},
    "renewed": {"method": "on-rand"},
    "standardized": {"method": "adadpigu"},
    "by noise": {"budget": {**BUDGET, "epsilon": None, "noise_multiplier": 1.3}},
    "units": {"unit_ids": UNITS},
    "a loss of units": {"unit_ids": UNITS, "budget": {**BUDGET, "private_loss": 2.0}},
    "clipped automatically": {"budget": {**BUDGET, "max_grad_norm": "auto"}},
    "clipped layer by layer": {"budget": {**BUDGET, "max_grad_norm": {"0.*": 0.4, "*": 0.7}}},
    "a mean": {"criterion": nn.CrossEntropyLoss()},
}


@pytest.mark.parametrize("what", RUNS)
@pytest.mark.parametrize("door", DOORS)
def test_a_door_gives_the_bits_and_the_epsilon_of_fit(door, what):
    told = {
        "method": "dp-sgd", "seed": 4, "budget": BUDGET, "unit_ids": None, "criterion": loss_fn, **RUNS[what],
    }  # fmt: skip
    wanted, found = by_fit(**told), DOORS[door](**told)
    assert torch.equal(weights(found.model), weights(wanted.model))
    assert (found.epsilon, found.delta, found.noise_multiplier) == (
        wanted.epsilon, wanted.delta, wanted.noise_multiplier,
    )  # fmt: skip
    assert found.plan == wanted.plan
    assert not found.publishable


@pytest.mark.parametrize("door", {"fit": by_fit, **DOORS}.values(), ids=["fit", *DOORS])
def test_a_door_refuses_a_budget_that_is_told_twice(door):
    with pytest.raises(PrivacyError, match="expected one of them"):
        door("dp-sgd", 0, {**BUDGET, "noise_multiplier": 1.0}, None, loss_fn)


@pytest.mark.parametrize("door", {"fit": by_fit, **DOORS}.values(), ids=["fit", *DOORS])
def test_a_run_without_a_seed_may_be_published_and_is_another_each_time(door):
    first, second = (door("dp-sgd", None, BUDGET, None, loss_fn) for _ in range(2))
    assert first.publishable
    assert not torch.equal(weights(first.model), weights(second.model))


def test_every_public_name_resolves_to_something_documented() -> None:
    assert len(sparsedp.__all__) <= 33
    for name in sparsedp.__all__:
        value = getattr(sparsedp, name)
        assert inspect.getdoc(value), name
        assert name in dir(sparsedp)


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
    tree = ast.parse(Path(sparsedp.__file__).read_text())
    typed = {
        (alias.name, node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == set(sparsedp._HOMES.items())


def test_importing_the_package_loads_nothing_heavy() -> None:
    check = (
        "import sys, sparsedp; print([m for m in ('torch', 'rich') if m in sys.modules]);"
        "sparsedp.fit; print([m for m in ('dp_accounting', 'sklearn', 'scipy', 'matplotlib') if m in sys.modules]);"
        "print(sparsedp.sklearn.SparseDPClassifier.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["[]", "[]", "SparseDPClassifier"]


def test_training_needs_no_data_set_and_the_command_line_no_torch_until_it_is_asked_something() -> None:
    check = (
        "import sys; import sparsedp.cli; print('torch' in sys.modules); import sparsedp.training.fit;"
        "print([m for m in sys.modules if m == 'PIL' or m.startswith('sparsedp_experiments')])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False", "[]"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(sparsedp, "no_such_thing")
