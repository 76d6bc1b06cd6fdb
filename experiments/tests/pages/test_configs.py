"""Every experiment file parses, names what the claims ask of it, and runs an epoch on a few records."""

import math

import pytest
import small_data

from sparsedp_experiments.runs.claims import read_claims
from sparsedp_experiments.runs.execute import _load, execute
from sparsedp_experiments.runs.grid import committed_families, read_experiment, records_of
from sparsedp_experiments.runs.tables import read_study

NAMES = sorted(committed_families())
SMOKE = {"subset": 64, "batch_size": 16}
"""As `sparsedp sweep --smoke`, on fewer records."""
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
        settings = run.smoke(**{**SMOKE, **SLOW.get(run.settings.dataset, {})}).settings
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
