"""Every committed experiment parses and runs; every number of the papers is transcribed as printed."""

import math
from dataclasses import replace

import pytest
import small_data

from sparsedp.privacy.accounting import accountant
from sparsedp.privacy.plan import SampledGaussian
from sparsedp_experiments.runs.ablations import train_ablation
from sparsedp_experiments.runs.claims import read_claims
from sparsedp_experiments.runs.execute import _load, execute
from sparsedp_experiments.runs.grid import committed_families, label, read_experiment, records_of
from sparsedp_experiments.runs.papers import PAPER_NAMES, number_for, read_paper
from sparsedp_experiments.runs.partition import ADADPIGU, gaussian_epsilon, noise_multiplier
from sparsedp_experiments.runs.settings import ABLATIONS
from sparsedp_experiments.runs.tables import read_study

# Every experiment file parses, names what the claims ask of it, and runs an epoch on a few records.


NAMES = sorted(committed_families())

SMOKE = {"subset": 64, "batch_size": 16, "epochs": 1}

SLOW = {"eyepacs": {"subset": 12, "batch_size": 6}, "eyepacs-natural": {"subset": 12, "batch_size": 6}}
"""Fewer still where a picture takes long."""


@pytest.fixture(scope="module")
def small_root(tmp_path_factory):
    """Small data in the official formats."""
    root = tmp_path_factory.mktemp("small")
    small_data.write_all(root / "data")
    return root


@pytest.fixture
def small_files(small_root, private_cache, monkeypatch):
    """Where they are looked for, with a cache of their own for features and noise."""
    monkeypatch.setenv("SPARSEDP_DATA", str(small_root / "data"))
    monkeypatch.setenv("SPARSEDP_CACHE", str(small_root / "cache"))
    _load.cache_clear()
    yield
    _load.cache_clear()


def kinds_of_runs(experiment):
    """One run for each data set, model and method of an experiment."""
    found = {}
    for run in experiment.runs():
        settings = run.settings
        found.setdefault((str(settings.dataset), str(settings.model), str(settings.method)), run)
    return found.values()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:the data set knows which unit")  # hospital-row protects rows on purpose
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_takes_an_epoch_with_each_of_its_methods(name, small_files):
    experiment = read_experiment(name)
    for run in kinds_of_runs(experiment):
        settings = replace(run.settings, **{**SMOKE, **SLOW.get(run.settings.dataset, {})})
        if settings.method in ABLATIONS:
            assert math.isfinite(train_ablation(settings)["metrics"][experiment.metric]), run.title
            continue
        result = execute(settings)
        assert math.isfinite(result.metrics[experiment.metric]), run.title
        if settings.epsilon != math.inf:
            assert result.epsilon <= settings.epsilon, run.title


@pytest.mark.parametrize("name", NAMES)
def test_tests_use_other_seeds_than_tuning_and_never_the_validation_split(name):
    experiment = read_experiment(name)
    tuning = name.endswith("-tuning")
    assert all((run.settings.validation is not None) == tuning for run in experiment.runs())
    if tuning:
        final = name.removesuffix("-tuning")
        if final in NAMES:
            assert not set(experiment.seeds) & set(read_experiment(final).seeds)


def test_every_claim_names_cells_that_its_experiment_has():
    known = {name: read_study(read_experiment(name), records_of(name)) for name in NAMES}
    for claim in read_claims():
        for evidence in claim.evidence:
            study = known.get(evidence.experiment)
            if study is None:
                continue
            terms = [evidence.best] if evidence.best else [t for _, t in evidence.terms]
            for labels in terms:
                assert any(labels.items() <= dict(cell).items() for cell in study.cells), (claim.id, labels)
            axes = {axis.name: {level.label for level in axis.levels} for axis in study.experiment.axes}
            assert all(set(labels) <= axes[axis] for axis, labels in evidence.only.items()), claim.id
            assert set(evidence.among) <= set(axes)


# The papers' numbers: complete, in range, consistent where the papers repeat themselves.


METHODS = ("dp-sgd", "tp-rand", "tp-topk", "on-rand", "on-topk")


def rows(paper, table):
    return read_paper(paper).table(table).rows


def test_every_table_has_all_its_cells():
    count = {(name, table.id): len(table.rows) for name in PAPER_NAMES for table in read_paper(name).tables}
    assert count["tp-topk", "table2"] == 3 * 3 * 5
    assert count["tp-topk", "table3"] == 2 * 4 * 2
    assert count["tp-topk", "table4"] == 9
    assert count["tp-topk", "table5"] + count["tp-topk", "table5-auc"] == 4 * 4
    assert count["tp-topk", "table6"] == 2 * 3 * 3 + 2 * 3  # no AUTO-S on CIFAR-10
    assert count["rs", "table2"] == 6 * 2 * 2
    assert count["rs", "table3"] == 2 * 2 * 2
    assert count["adadpigu", "table3"] == 12
    assert count["adadpigu", "table4"] + count["adadpigu", "table4-others"] == 3 * (5 * 2 + 1)


def test_a_number_is_found_by_settings_and_never_for_another_data_set():
    settings = {"dataset": "fashion-mnist-scattering", "model": "m", "epsilon": 3.0, "method": "tp-topk"}
    number = number_for("tp-topk-table2-fashion-mnist", {"epsilon": "3"}, settings, "accuracy")
    assert number is not None
    assert (number.value, number.spread) == pytest.approx((0.8888, 0.0013))
    split = {**settings, "active_ratio": 0.4, "warmup_fraction": 0.3, "phase1_budget": 0.3}
    assert number_for("tp-topk-table4", {}, split, "accuracy") is None
    cifar = number_for("tp-topk-table4", {}, {**split, "dataset": "cifar10-scattering"}, "accuracy")
    assert cifar is not None
    assert cifar.value == pytest.approx(0.7105)
    assert number_for("imdb", {}, settings, "accuracy") is None


@pytest.mark.parametrize(("dataset", "epsilon"), [("mnist", 2.0), ("cifar10", 12.0)])
def test_adadpigus_noise_is_that_of_classic_rdp_at_the_steps_found(dataset, epsilon):
    training, printed = ADADPIGU[dataset], rows("adadpigu", "table3")[dataset, label(epsilon)].value
    ours = noise_multiplier(training, epsilon, "rdp-classic")
    assert ours == pytest.approx(printed, abs=0.005)
    rate, steps = (
        training.batch_size / training.units,
        training.epochs * training.units // training.batch_size,
    )
    spent = accountant("rdp-classic").epsilon((SampledGaussian(rate, ours, steps),), 1e-5)
    assert 0.995 * epsilon <= spent <= epsilon
    assert noise_multiplier(training, epsilon, "pld") < ours


@pytest.mark.parametrize(("noise", "epochs"), [(1.65, 48), (4.0, 48), (1.0, 1)])
def test_partitions_cost_what_an_independent_accountant_says_of_so_many_gaussians(noise, epochs):
    ours = gaussian_epsilon(noise, epochs)
    theirs = accountant("pld").epsilon((SampledGaussian(1.0, noise, epochs),), 1e-5)
    assert ours == pytest.approx(theirs, rel=2e-3)
