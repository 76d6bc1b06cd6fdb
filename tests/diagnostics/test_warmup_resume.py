"""The warm-up's statistics survive a stop, a kill and a resume."""

import shutil
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import network, rows
from sparsedp.diagnostics import SplitEnergies, WarmupStatistics, statistics_of, summarize_warmup, summary_of
from sparsedp.errors import DataError
from sparsedp.parameters import Layout
from sparsedp.results import StepReport
from sparsedp.runs.reader import Run

pytestmark = pytest.mark.usefixtures("checked_once")

STEPS, WARM_UP = 300, 90
"""So a ledger block is three steps."""


KILLED_AT = (30, 31, 32, WARM_UP - 1)


def a_run(out, callbacks=(), seed=3, resume=False):
    """A run that is stopped by Ctrl-C soon after its warm-up; gives the weights it had then."""
    model = network()
    with pytest.raises(KeyboardInterrupt):
        sparsedp.fit(
            model, TensorDataset(*rows(80)), nn.CrossEntropyLoss(reduction="none"), method="tp-topk", epsilon=8.0,
            delta=1e-3, epochs=30, batch_size=8, clip_norm=0.5, seed=seed, progress=False, accountant="rdp",
            out=out, callbacks=(*callbacks, at_step(WARM_UP + 2, stop)), resume=resume,
        )  # fmt: skip
    return Layout.of(model).flatten(model)


def at_step(step, do):
    def act(event):
        if isinstance(event, StepReport) and event.step == step:
            do()

    return act


def stop():
    signal.raise_signal(signal.SIGINT)


def same(one, other):
    assert (one.steps, one.planned, one.noise_std) == (other.steps, other.planned, other.noise_std)
    for name, split in one.splits.items():
        twin = other.splits[name]
        assert torch.equal(split.order, twin.order)
        assert torch.equal(split.first, twin.first)
        assert torch.equal(split.second, twin.second)
        assert (split.first_variance, split.second_variance) == (twin.first_variance, twin.second_variance)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed until after its warm-up, and its folder as a kill at some steps would leave it."""
    base = tmp_path_factory.mktemp("whole")
    out = base / "run"
    copies = [at_step(step, lambda step=step: shutil.copytree(out, base / f"{step}")) for step in KILLED_AT]
    return out, a_run(out, copies)


def kept(folder):
    return statistics_of(Run.open(folder))


@pytest.mark.parametrize("step", [0, 44, WARM_UP - 2])
def test_ctrl_c_loses_nothing(whole, tmp_path, step):
    out = tmp_path / "run"
    a_run(out, (at_step(step, stop),))
    with pytest.raises(DataError, match=r"not over.*--resume"):
        kept(out)
    assert torch.equal(whole[1], a_run(out, resume=True))
    same(kept(out), kept(whole[0]))


@pytest.mark.parametrize("step", KILLED_AT)
def test_a_kill_at_any_place_of_a_block_loses_nothing(whole, tmp_path, step):
    killed = shutil.copytree(whole[0].parent / f"{step}", tmp_path / "killed")
    assert torch.equal(whole[1], a_run(killed, resume=True))
    same(kept(killed), kept(whole[0]))


@pytest.mark.parametrize(("step", "lost"), [(31, 3), (WARM_UP - 1, 10)])
def test_an_unseeded_run_leaves_the_lost_steps_out(tmp_path, step, lost):
    out, killed = tmp_path / "run", tmp_path / "killed"
    a_run(out, (at_step(step, lambda: (shutil.copytree(out, killed), stop())),), seed=None)
    a_run(killed, seed=None, resume=True)
    found = kept(killed)
    # Of the epoch at work all steps are lost that were charged: a block of three, or all ten.
    assert (found.steps, found.planned) == (WARM_UP - lost, WARM_UP)


def a_split(seed, dimension=50):
    """Energy that stands out: two means near one another."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(dimension, generator=generator, dtype=torch.float64)
    second = first + 0.1 * torch.randn(dimension, generator=generator, dtype=torch.float64)
    return SplitEnergies(torch.randperm(dimension, generator=generator), first, second, 0.01, 0.01)


def test_the_summary_holds_the_split_estimates():
    found = WarmupStatistics({"energy": a_split(0), "coherent": a_split(0)}, 9, 10, 0.1)
    summary = summary_of(found)
    assert (summary["steps"], summary["planned"]) == (9, 10)
    for curve in summary["curves"]:
        split = found.splits[curve["ranking"]]
        assert curve["ratio"] == [k / 50 for k in (1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50)]
        for ratio, share in zip(curve["ratio"], curve["share"], strict=True):
            inside = split.order[: round(50 * ratio)]
            by_hand = float((split.first * split.second)[inside].sum() / (split.first @ split.second))
            assert share == pytest.approx(by_hand)
        assert curve["std"][-1] < curve["std"][3]


def test_a_summary_without_clear_energy_has_no_curve(whole):
    """Eight rows a batch and this little signal: nothing stands out."""
    summary = summarize_warmup(Run.open(whole[0]))
    assert [curve["ranking"] for curve in summary["curves"]] == ["energy", "coherent"]
    assert all(curve["ratio"] == curve["share"] == [] for curve in summary["curves"])


def test_a_run_that_is_not_private_leaves_no_statistics_behind(tmp_path):
    folder = tmp_path / "run"
    sparsedp.fit(
        network(), TensorDataset(*rows(80)), nn.CrossEntropyLoss(reduction="none"), method="clipped-sgd", epochs=12,
        batch_size=8, clip_norm=0.5, seed=3, progress=False, out=folder,
    )  # fmt: skip
    assert summarize_warmup(Run.open(folder)) is None
    with pytest.raises(DataError, match="not private"):
        kept(folder)
