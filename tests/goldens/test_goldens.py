"""Every method still gives the same bits: final weights, supports, ledger and metrics, resumed runs included.

Goldens make a refactoring honest. They are robust to nothing: a change that is *meant* to change what a run gives
(the noise, the coins, how batches are cut, the model's own randomness) records them anew in the same commit,
`python -m tests.goldens.make_goldens`, and its message says which quantities changed and why. Any other change
must leave the file alone. Last bits of sums depend on processor and libraries, so elsewhere than where they were
recorded (seen by `arithmetic`) only resumed runs are compared, with their uninterrupted twins.
"""

from __future__ import annotations

import json

import pytest
import torch
from golden_runs import FILE, arithmetic, cases, digests

GOLDENS = json.loads(FILE.read_text())
EVERY_DAY = [(method, "linear") for method in ("dp-sgd", "tp-topk", "on-rand", "adadpigu")]
"""Not left to `make heavy`."""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_method_of_the_table_has_goldens():
    assert set(GOLDENS["runs"]) == {f"{method}, {model}" for method, model in cases()}


@pytest.mark.parametrize(
    ("method", "model"),
    [case if case in EVERY_DAY else pytest.param(*case, marks=pytest.mark.heavy) for case in cases()],
)
def test_a_run_gives_what_it_gave(method, model, tmp_path):
    straight = digests(method, model, tmp_path / "straight")
    resumed = digests(method, model, tmp_path / "resumed", interrupted=True)
    assert resumed == {quantity: straight[quantity] for quantity in resumed}
    if arithmetic() != GOLDENS["arithmetic"]:
        pytest.skip("this machine's sums have other last bits than where the goldens were recorded")
    assert straight == GOLDENS["runs"][f"{method}, {model}"]
