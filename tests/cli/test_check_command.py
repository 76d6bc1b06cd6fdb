"""`sparsedp check`: models by name and by import path, what is slow in them, and what is refused."""

from __future__ import annotations

import re

import pytest

OWN = """
import torch
from torch import nn
from sparsedp import PerExampleLoss


class Blends(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.target = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return torch.lerp(self.body(x), self.target, 0.5)


def slow():
    loss = PerExampleLoss(lambda model, rows: model(rows).square().sum(1))
    return Blends(), loss, torch.randn(4, 3)


def mixing():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.CrossEntropyLoss(reduction="none"), (
        torch.randn(4, 3), torch.arange(4))


def nothing():
    return None


def broken():
    raise ValueError("my own mistake")


def ok():
    return nn.Linear(3, 4), nn.CrossEntropyLoss(reduction="none"), (torch.randn(4, 3), torch.arange(4))
"""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    (tmp_path / "own_models_to_check.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("own_models")
def test_a_model_of_linear_layers_is_all_fast(typed):
    told = typed("check", "own_models_to_check:ok", "--json").json
    assert 0 < told.pop("times_plain") < 100  # measured, on whatever runs here
    assert told == {"model": "own_models_to_check:ok", "parameters": 16, "fast": True, "notes": []}


@pytest.mark.usefixtures("own_models")
def test_what_is_slow_in_ones_own_model_is_named(typed):
    shown = typed("check", "own_models_to_check:slow").out
    assert "'target': LerpBackward0 has no formula" in shown
    assert re.search(r"32 examples takes \d+\.\d times an ordinary gradient", " ".join(shown.split()))


@pytest.mark.usefixtures("own_models")
def test_a_path_is_shown_as_it_was_typed(typed):
    assert "own_models_to_check:ok: 16 parameters" in typed("check", "own_models_to_check:ok").out


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("own_models_to_check:mixing", "statistics of the whole batch"),
        ("own_models_to_check:nothing", "expected (model, loss_fn, rows)"),
        ("own_models_to_check:broken", "raised ValueError (my own mistake); expected it to give"),
        ("own_models_to_check:absent", "expected package.module:function"),
        ("no_such_module_at_all:f", "expected package.module:function"),
        ("nonsense", "expected package.module:function"),
    ],
)
def test_mistakes_are_said(typed, path, complaint):
    refused = typed("check", path)
    assert refused.code == 2
    assert complaint in " ".join(refused.err.split())
