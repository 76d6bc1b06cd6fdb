import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from diagnostic_probes import network, rows
from sparsedp.callbacks.reports import StepReport
from sparsedp.core.errors import DataError
from sparsedp.core.layout import Layout
from sparsedp.diagnostics.advice import RATIOS, advise, advise_run, in_words
from sparsedp.diagnostics.criteria import SplitEnergies
from sparsedp.diagnostics.splits import WarmupStatistics, statistics_of
from sparsedp.methods import build_plan, get_method
from sparsedp.runs.reader import Run

pytestmark = pytest.mark.usefixtures("checked_once")

OLD = Path(__file__).parents[1] / "runs_on_disk" / "written_by_0_1"
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


def test_a_few_strong_coordinates_are_found_and_recommended():
    gradient = np.zeros(2000)
    gradient[:60] = 8 * NOISE
    advice = advise(statistics(gradient, 0), PLAN)
    assert advice.recommendation.startswith("Fewer coordinates suffice: train 5%")
    assert advice.sure == "very sure"
    assert any("clearly better than chance" in reason for reason in advice.reasons)
    assert len(advice.options) == 2 * len(RATIOS)


def test_energy_everywhere_means_keep_every_coordinate_however_loud_the_noise():
    for scale in (0.7, 3.0):
        gradient = scale * NOISE * np.sign(np.random.default_rng(1).standard_normal(2000))
        advice = advise(statistics(gradient, 1), PLAN)
        assert advice.recommendation.startswith("Keep every coordinate")
        assert advice.confidence > 0.99


def test_without_signal_the_advice_is_that_it_cannot_tell():
    advice = advise(statistics(np.zeros(2000), 2), PLAN)
    assert "does not tell" in advice.recommendation
    assert advice.options == ()
    assert not any("clearly better" in reason for reason in advice.reasons)
    assert any("too little energy" in reason for reason in advice.reasons)


def test_sparsity_is_never_sold_where_no_support_can_pay():
    """Equal energies: every support makes about k/d of the progress. Forty warm-ups, false-alarm rate below 1e-3."""
    for seed in range(40):
        advice = advise(statistics(0.5 * NOISE * np.ones(500), seed), PLAN)
        assert "suffice: train" not in advice.recommendation


def test_options_are_those_of_the_split_estimates():
    found = statistics(np.random.default_rng(3).standard_normal(400) * NOISE, 3)
    for option in advise(found, PLAN).options:
        k = round(option.ratio * 400)
        split = found.splits[option.ranking]
        assert option.progress == split.progress(k, NOISE)
        assert option.gain == pytest.approx(split.gain(k, NOISE).value / (400 * NOISE**2))


def test_words_follow_the_confidence():
    assert [in_words(c) for c in (0.999, 0.96, 0.85, 0.3)] == [
        "very sure", "fairly sure", "leaning this way", "noise could have made this up",
    ]  # fmt: skip


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
    advice = advise_run(out)
    assert advice.text().startswith(advice.recommendation)
    assert set(advice.to_json()) == {
        "recommendation", "confidence", "sure", "reasons", "caveats", "options",
    }  # fmt: skip


@pytest.mark.parametrize(("method", "active"), [("head", 18), ("head-first", 43), ("on-rand", 8)])
def test_a_run_that_is_sparse_from_the_start_is_told_r_alone(tmp_path, method, active):
    out = tmp_path / "run"
    a_run(out, method)
    with pytest.raises(DataError, match=f"{method} has no warm-up"):
        statistics_of(Run.open(out))
    advice, phase = advise_run(out), Run.open(out).plan.phases[-1]
    ratios = {count: phase.noise_multiplier / 20 * count**0.5 for count in (43, 18, 8, active)}
    assert advice.recommendation.startswith(
        f"Public numbers alone, on the {active} coordinates trained: r is {ratios[active]:.2f}, "
    )
    assert advice.recommendation.endswith("Advice on scores needs a warm-up.")
    loudness, why = advice.reasons
    for name, count in {"all": 43, "head": 18, "bias": 8, "support": active}.items():
        assert f"{ratios[count]:.2f} on {name} ({count})" in loudness
    assert f"{method} has no warm-up" in why
    assert (advice.confidence, advice.sure, advice.options) == (None, None, ())
    assert "As far as noise goes" not in advice.text()


def test_a_run_that_is_not_private_has_no_noise_to_tell_of(tmp_path):
    out = tmp_path / "run"
    sparsedp.fit(
        network(), TensorDataset(*rows(80)), nn.CrossEntropyLoss(reduction="none"), method="clipped-sgd", epochs=5,
        batch_size=20, seed=3, progress=False, out=out,
    )  # fmt: skip
    with pytest.raises(DataError, match="is not private"):
        advise_run(out)


@pytest.mark.parametrize("name", ["seeded-finished", "unseeded-stopped"])
def test_a_run_of_version_0_1_has_them_in_a_file_of_its_own(name):
    found = statistics_of(Run.open(OLD / name))
    assert list(found.splits) == ["energy", "coherent"]
    assert (found.steps, found.planned) == (5, 5)
    split = found.splits["energy"]
    assert split.first_variance == pytest.approx(found.noise_std**2 / 2)
    assert split.second_variance == pytest.approx(found.noise_std**2)
    assert advise_run(OLD / name).text()


def test_a_file_of_version_0_1_that_is_damaged_is_an_error(tmp_path):
    run = shutil.copytree(OLD / "seeded-finished", tmp_path / "run")
    (run / "warmup.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match="damaged"):
        advise_run(run)
