"""Every kind of run still gives the same: final weights, supports, ledger and metrics, resumed runs included.

Goldens make a refactoring honest. A change that is *meant* to change what a run gives (the noise, the coins, how
batches are cut) records them anew in the same commit, `python -m tests.goldens.make_goldens`, and its message says
which quantities changed and why. Any other change must leave the file alone.

Digests are of bits, and last bits of sums depend on processor and libraries: there is a set of digests for each
arithmetic it was recorded under (`arithmetic`), and they decide there alone. Sketches of the weights, the noise of
plans, and resumed runs against their uninterrupted twins decide everywhere. When digests differ and the sketch
agrees, only rounding changed.
"""

from __future__ import annotations

import json

import pytest
import torch
from golden_doors import ESTIMATOR, FEDERATED, RANKS, estimator, federated, plans, two_ranks
from golden_runs import arithmetic, cases, run, sketches_agree
from make_goldens import FILE

GOLDENS = json.loads(FILE.read_text())
DIGESTS = GOLDENS["digests"].get(arithmetic(), {})
CASES = cases()
EVERY_DAY = [
    "dp-sgd, linear",
    "tp-topk, linear",
    "on-rand, linear",
    "adadpigu, linear",
    "pld: tp-topk",
    "units of three rows, seven at once: tp-topk",
    "adam: on-rand",
    "average: on-rand",
    "one cycle: tp-topk",
    "normalised: tp-topk",
]
"""Not left to `make nightly`."""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(name, found):
    """Against the record: the sketch everywhere, the bits where they were recorded."""
    assert sketches_agree(found["sketch"], GOLDENS["sketches"][name]), "other weights than recorded"
    if DIGESTS:
        changed = [q for q, digest in DIGESTS[name].items() if found[q] != digest]
        assert not changed, f"{changed} differ in their bits; the weights are the same up to rounding"


def test_every_case_has_goldens():
    assert set(GOLDENS["sketches"]) == {*CASES, *FEDERATED, *ESTIMATOR, *RANKS}


@pytest.mark.parametrize(
    "name", [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_a_run_gives_what_it_gave(name, tmp_path):
    straight = run(tmp_path / "straight", CASES[name])
    resumed = run(tmp_path / "resumed", CASES[name], interrupted=True)
    assert resumed == {quantity: straight[quantity] for quantity in resumed}
    check(name, straight)


@pytest.mark.parametrize("name", [*FEDERATED, *ESTIMATOR])
def test_another_door_gives_what_it_gave(name, tmp_path):
    check(name, (federated if name in FEDERATED else estimator)(name, tmp_path / "run"))


@pytest.mark.nightly
def test_two_ranks_give_what_they_gave_and_up_to_rounding_what_one_gives(tmp_path):
    for number, (name, found) in enumerate(two_ranks(tmp_path).items()):
        check(name, found)
        alone = run(tmp_path / f"alone-{number}", RANKS[name])
        assert sketches_agree(found["sketch"], alone["sketch"]), name


@pytest.mark.nightly
def test_plans_have_the_noise_they_had():
    found = plans()
    assert found.keys() == GOLDENS["plans"].keys()
    for name, numbers in found.items():
        assert numbers == pytest.approx(GOLDENS["plans"][name], rel=1e-6), name
