"""What a run without a folder, and an optimizer made for it, do not cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsedp import fit
from sparsedp.methods import get_method

DATA = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
SETTINGS = {"epsilon": 8.0, "delta": 1e-3, "epochs": 4, "batch_size": 20, "seed": 0, "progress": False}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 2))


def run(model: nn.Module, **settings: object) -> None:
    fit(
        model, DATA, nn.CrossEntropyLoss(reduction="none"), method=get_method("tp-topk", active_ratio=0.1),
        **{**SETTINGS, **settings},
    )  # fmt: skip


def test_an_optimizer_made_for_a_run_goes_with_its_state_and_a_given_one_keeps_its():
    made, model = [], network()

    def make(parameters):
        made.append(torch.optim.Adam(parameters, lr=0.01))
        return made[-1]

    run(model, optimizer=make)
    assert not made[0].state
    assert set(made[0].param_groups[0]["params"]) == set(model.parameters())
    other = network()
    given = torch.optim.Adam(other.parameters(), lr=0.01)
    run(other, optimizer=given)
    assert {parameter: state["exp_avg"].shape for parameter, state in given.state.items()} == {
        parameter: parameter.shape for parameter in other.parameters()
    }
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_run_without_a_folder_makes_no_checkpoint(monkeypatch, tmp_path):
    def refuse(*given: object) -> None:
        raise AssertionError("nobody keeps this")

    monkeypatch.setattr("sparsedp.training.recorder.checkpoint_of", refuse)
    run(network(), ema_decay=0.9)
    with pytest.raises(AssertionError, match="nobody keeps this"):
        run(network(), run_dir=tmp_path / "run")
