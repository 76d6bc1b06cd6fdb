"""Differentially private training for PyTorch, dense or on a support of few coordinates.

`fit` trains a model in one call, `make_private` makes a loop of your own private, `plan` says what a run would
cost, `Trainer` is the loop's inside, `list_methods()` lists the choices, `audit` attacks what `fit` would run,
`write_report` makes a page of a run, `sparsedp.sklearn.SparseDPClassifier` is for tables.
Names are loaded when they are first used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsedp.auditing import AuditResult as AuditResult
    from sparsedp.auditing.audit import audit as audit
    from sparsedp.batch import PerExampleLoss as PerExampleLoss
    from sparsedp.batch_norm import freeze_batch_norm as freeze_batch_norm
    from sparsedp.errors import DataError as DataError
    from sparsedp.errors import ModelError as ModelError
    from sparsedp.errors import PrivacyError as PrivacyError
    from sparsedp.errors import PrivacyWarning as PrivacyWarning
    from sparsedp.errors import SparseDPError as SparseDPError
    from sparsedp.evaluation import held_out as held_out
    from sparsedp.loading import DataConfig as DataConfig
    from sparsedp.methods import get_method as get_method
    from sparsedp.methods import list_methods as list_methods
    from sparsedp.methods import register_method as register_method
    from sparsedp.methods.method import Method as Method
    from sparsedp.methods.plan_config import plan as plan
    from sparsedp.parameters import Support as Support
    from sparsedp.privacy.normalization import PrivateNormalisation as PrivateNormalisation
    from sparsedp.private_training import make_private as make_private
    from sparsedp.report import write_report as write_report
    from sparsedp.results import Callback as Callback
    from sparsedp.results import Result as Result
    from sparsedp.results import StepReport as StepReport
    from sparsedp.runs.record import EpochMetrics as EpochMetrics
    from sparsedp.runs.record import RunMetadata as RunMetadata
    from sparsedp.runs.run import load_weights as load_weights
    from sparsedp.runs.verify import verify as verify
    from sparsedp.training.data import extract_features as extract_features
    from sparsedp.training.fit import fit as fit
    from sparsedp.training.normalization import Normalised as Normalised
    from sparsedp.training.planning import RunConfig as RunConfig
    from sparsedp.training.trainer import Trainer as Trainer

__version__ = "0.2.0"

_HOMES = {
    name: module
    for module, names in {
        "sparsedp.auditing": "AuditResult",
        "sparsedp.auditing.audit": "audit",
        "sparsedp.batch": "PerExampleLoss",
        "sparsedp.batch_norm": "freeze_batch_norm",
        "sparsedp.errors": "DataError ModelError PrivacyError PrivacyWarning SparseDPError",
        "sparsedp.evaluation": "held_out",
        "sparsedp.loading": "DataConfig",
        "sparsedp.methods": "get_method list_methods register_method",
        "sparsedp.methods.method": "Method",
        "sparsedp.methods.plan_config": "plan",
        "sparsedp.parameters": "Support",
        "sparsedp.privacy.normalization": "PrivateNormalisation",
        "sparsedp.private_training": "make_private",
        "sparsedp.report": "write_report",
        "sparsedp.results": "Callback Result StepReport",
        "sparsedp.runs.record": "EpochMetrics RunMetadata",
        "sparsedp.runs.run": "load_weights",
        "sparsedp.runs.verify": "verify",
        "sparsedp.training.data": "extract_features",
        "sparsedp.training.fit": "fit",
        "sparsedp.training.normalization": "Normalised",
        "sparsedp.training.planning": "RunConfig",
        "sparsedp.training.trainer": "Trainer",
    }.items()
    for name in names.split()
}

_PACKAGES = ("sklearn",)

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"sparsedp.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'sparsedp' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
