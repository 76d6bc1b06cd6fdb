import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import network, rows
from sparsedp.diagnostics import SplitEnergies, WarmupStatistics, look, statistics_of
from sparsedp.errors import DataError
from sparsedp.methods import build_plan, get_method
from sparsedp.parameters import Layout
from sparsedp.results import StepReport
from sparsedp.runs.reader import Run

pytestmark = pytest.mark.usefixtures("checked_once")

PLAN = build_plan(
    get_method("tp-topk"), None, units=1000, batch_size=100, epochs=10, epsilon=3.0, delta=1e-5, clip_norm=1.0,
    accountant="rdp",
)  # fmt: skip
NOISE = PLAN.phases[-1].noise_multiplier / 100


def statistics(gradient, seed, steps=40, noise=NOISE):
    """A simulated warm-up of a fixed gradient."""
    rng = np.random.default_rng(seed)
    released = gradient + noise * rng.standard_normal((steps, gradient.size))
    first, rest = released[: steps // 2], released[steps // 2 :]
    orders = {"energy": -(first**2).mean(0), "coherent": -(first.mean(0) ** 2)}
    even, odd = (torch.from_numpy(rest[i::2].mean(0)) for i in range(2))
    v = noise**2 / (steps // 4)
    splits = {
        name: SplitEnergies(torch.from_numpy(np.argsort(key, kind="stable")), even, odd, v, v)
        for name, key in orders.items()
    }
    return WarmupStatistics(splits, steps, steps, noise)


def a_run(out, method="tp-topk", callbacks=()):
    model = network()
    result = sparsedp.fit(
        model, TensorDataset(*rows(80)), nn.CrossEntropyLoss(reduction="none"), method=method, epsilon=8.0,
        delta=1e-3, epochs=5, batch_size=20, clip_norm=0.5, seed=3, progress=False, accountant="rdp",
        out=out, callbacks=callbacks,
    )  # fmt: skip
    return Layout.of(model).flatten(result.model)


@pytest.mark.parametrize("method", ["tp-topk", "dp-sgd"])
def test_a_run_keeps_its_warm_up(tmp_path, method):
    released = []

    def keep(event):
        if isinstance(event, StepReport):
            released.append(event.released.dense())

    out = tmp_path / "run"
    a_run(out, method, (keep,))
    found = statistics_of(Run.open(out))
    assert (found.steps, found.planned) == (6, 6)
    seen = torch.stack(released[:6]).double()
    split = found.splits["energy"]
    torch.testing.assert_close(split.first, seen[4])
    torch.testing.assert_close(split.second, seen[[3, 5]].mean(0))
    energy_order = torch.sort((seen[:3] ** 2).mean(0), descending=True, stable=True).indices
    assert torch.equal(split.order, energy_order)
    coherent_order = torch.sort(seen[:3].mean(0) ** 2, descending=True, stable=True).indices
    assert torch.equal(found.splits["coherent"].order, coherent_order)
    phase = Run.open(out).plan.phases[0]
    noise = phase.noise_multiplier * phase.clip_norm / 20
    assert found.noise_std == pytest.approx(noise)
    assert (split.first_variance, split.second_variance) == pytest.approx((noise**2, noise**2 / 2))


@pytest.mark.parametrize(("method", "active"), [("head", 18), ("head-first", 43), ("on-rand", 8)])
def test_a_run_that_is_sparse_from_the_start_is_told_r_alone(tmp_path, method, active):
    out = tmp_path / "run"
    a_run(out, method)
    with pytest.raises(DataError, match=f"{method} has no warm-up"):
        statistics_of(Run.open(out))
    seen, phase = look(out), Run.open(out).plan.phases[-1]
    assert f"{method} has no warm-up" in seen.missing
    for name, count in {"all": 43, "head": 18, "bias": 8, "support": active}.items():
        assert seen.noise.noise_ratios[name] == pytest.approx(phase.noise_multiplier / 20 * count**0.5)


def test_a_run_that_is_not_private_has_no_noise_to_tell_of(tmp_path):
    out = tmp_path / "run"
    sparsedp.fit(
        network(), TensorDataset(*rows(80)), nn.CrossEntropyLoss(reduction="none"), method="clipped-sgd", epochs=5,
        batch_size=20, seed=3, progress=False, out=out,
    )  # fmt: skip
    with pytest.raises(DataError, match="is not private"):
        statistics_of(Run.open(out))
    assert look(out).noise.noise_ratios == {}
