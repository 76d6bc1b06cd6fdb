"""The settings of one run: what a config file, a grid cell and the command line all come down to."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sparsedp._serialization import FrozenMap, canonical, sha256
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import MethodOptions, Protection, configure, get_method
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.methods.method import OF_THE_PLAN, Method
from sparsedp.methods.plan_config import (
    ACCOUNTANT,
    CLIP_NORM,
    EPOCHS,
    EPSILON,
    METHOD,
    WARMUP_FRACTION,
    Asked,
)
from sparsedp.optimizers.factory import MOMENTUM
from sparsedp.optimizers.noise_aware import OWN_OPTIMIZERS
from sparsedp.privacy.calibration import EqualNoise, NominalSplit
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.runs.run import Run
from sparsedp.training.planning import changed_method
from sparsedp_experiments.data import DATASETS
from sparsedp_experiments.data.arrays import is_table
from sparsedp_experiments.data.row import Value
from sparsedp_experiments.runs import value_kinds as kinds

_NOTHING = FrozenMap({})

OWN_TABLES_MODEL, OWN_FILES_MODEL, LEAST_SQUARES = "logistic", "mlp", "least-squares"

_ANY: Mapping[str, Value] = {"epochs": EPOCHS, "clip_norm": CLIP_NORM, "momentum": MOMENTUM}
_ADAPTIVE_RATE = 0.001
_ONE_RELEASE: Mapping[str, Value] = {"epochs": 1, "momentum": 0.0, "lr": 1.0}
"""Least squares is one step over all units, of length one; its clip norm follows from the classes (`execute`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides what a run does. None leaves the choice to the data set's recipe, then to `fit`.

    Attributes:
        dataset: a name from `sparsedp data`, or a path: an `.npz` file, or a folder or zip of pictures.
        data_options: arguments of the loader, such as `prevalence` or `groups`.
        classes: names of the classes, for an `.npz` file.
        validation: share of the training units to evaluate on instead of the test set.
        subset: use only so many units of each side, chosen by a public seed.
        model: a name from the models table.
        model_options: arguments of the model, such as `hidden` or `activation`.
        method: a name from `sparsedp methods`, or "auto": dense or sparse, by public numbers.
        active_ratio: share of the coordinates trained, or "auto".
        options: further changes to the method.
        epsilon: the budget; inf for a method that is not private.
        delta: of the guarantee.
        accountant: "pld", "rdp" or "rdp-classic".
        unit: "row" to protect rows of a data set that knows whose they are; what the units of an `.npz` file are
            called is an option of its loader, `data_options={"unit": "patient"}`.
        rows_per_unit: rows drawn of a sampled unit.
        epochs: passes over the data.
        batch_size: expected number of units in a batch.
        clip_norm: bound on a unit's gradient; a pair is for warm-up and main phase.
        noise_std: noise on the sum of gradients, for `noisy-sgd` only.
        normalise: normalise the inputs privately: `noise_multiplier` and `clip_norm` of that release.
        warmup_fraction: share of the steps of a two-phase method's warm-up.
        selection_budget: share of epsilon that a selection with a release of its own may cost alone.
        phase1_budget: share of epsilon the warm-up alone may cost; None for equal noise.
        public_scores: an .npz or .safetensors file of public scores by parameter name, for the ranking `given`.
        optimizer: "sgd", "adam", "adamw", "adam-bc" or "low-pass".
        lr: learning rate.
        momentum: of SGD.
        weight_decay: of the optimizer.
        scheduler: "constant", "cosine" or "linear", over all steps.
        ema_decay: average the weights.
        engine: "bookkeeping" or "reference".
        max_physical_batch: most rows loaded at once.
        cache_features: run the model's frozen first parts once, and keep what they give in the user's cache.
        seed: makes the run reproducible, and not for release.
    """

    dataset: str
    data_options: FrozenMap = _NOTHING
    classes: tuple[str, ...] | None = None
    validation: float | None = None
    subset: int | None = None
    model: str | None = None
    model_options: FrozenMap = _NOTHING
    method: str = METHOD
    active_ratio: float | Literal["auto"] | None = None
    options: FrozenMap = _NOTHING
    epsilon: float | None = None
    delta: float | None = None
    accountant: str = ACCOUNTANT
    unit: str | None = None
    rows_per_unit: int = 1
    epochs: int | None = None
    batch_size: int | None = None
    clip_norm: float | tuple[float, float] | None = None
    noise_std: float | None = None
    normalise: FrozenMap = _NOTHING
    warmup_fraction: float = WARMUP_FRACTION
    selection_budget: float | None = None
    phase1_budget: float | None = None
    public_scores: str | None = None
    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float = 0.0
    scheduler: str = "constant"
    ema_decay: float | None = None
    engine: str = "bookkeeping"
    max_physical_batch: int | None = None
    cache_features: bool | None = None
    seed: int | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from what a user wrote or `to_json` gave.

        Raises:
            SparseDPError: an unknown name, or a value of the wrong kind.
        """
        found = {name: checked(name, value) for name, value in values.items()}
        if "dataset" not in found:
            raise SparseDPError("dataset: not given; name one (`sparsedp data` lists them)")
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        """JSON values of every setting that has one."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {
            name: _plain(value) for name, value in found.items() if value is not None and value != _NOTHING
        }

    def method_options(self) -> MethodOptions | None:
        """The changes to the method, its ratio among them; None if there are none."""
        ratio = {} if self.active_ratio is None else {"active_ratio": self.active_ratio}
        changes = {**self.options.plain(), **ratio}
        return MethodOptions.from_json(changes) if changes else None

    def asked(self) -> Asked:
        """What they ask of a plan, but for units and method; a budget of inf is none."""
        return Asked(
            epsilon=None if self.epsilon == math.inf else self.epsilon,
            delta=self.delta,
            epochs=self.epochs,
            batch_size=self.batch_size,
            max_grad_norm=self.clip_norm,
            warmup_fraction=self.warmup_fraction,
            selection_budget=self.selection_budget,
            split=EqualNoise() if self.phase1_budget is None else NominalSplit(self.phase1_budget),
            accountant=self.accountant,
            normalise=PrivateNormalisation.from_json(self.normalise) if self.normalise else None,
            noise_std=self.noise_std,
        )

    def configured_method(self) -> str | Method:
        """The method with all that belongs to it, as `fit` takes it."""
        own = {name: value for name, value in self.asked().items() if name in OF_THE_PLAN}
        if own.get("split") == EqualNoise():
            del own["split"]
        return changed_method(self.method, self.method_options(), **own)

    def of_the_plan(self) -> dict[str, Any]:
        """What they ask of a plan besides the method, as `fit` takes it."""
        return {name: value for name, value in self.asked().items() if name not in OF_THE_PLAN}

    def training(self) -> dict[str, Any]:
        """What they ask of the training loop, as `fit` takes it."""
        data = DataConfig(rows_per_unit=self.rows_per_unit, max_physical_batch=self.max_physical_batch)
        return {"engine": self.engine, "ema_decay": self.ema_decay, "data": data}

    @property
    def digest(self) -> str:
        """A hash of all settings, the seed included: names the run."""
        return sha256(canonical(self.to_json()))

    def resolved(self) -> Settings:
        """The same with the data set's recipe filled in, and every name checked.

        Raises:
            SparseDPError: an unknown method, model, data set or option, or a private method without a budget.
        """
        method = get_method(METHOD if self.method == AUTO_METHOD else self.method)
        configure(method, self.method_options())
        PrivateNormalisation.from_json(self.normalise)
        recipe = recipe_for(self.dataset, self.model, self.optimizer)
        filled: dict[str, Any] = {name: v for name, v in recipe.items() if getattr(self, name) is None}
        if not method.private:
            filled |= {"epsilon": math.inf} if self.epsilon is None else {}
            if method.protection is Protection.NO_CLIP:
                filled.pop("clip_norm", None)
        elif self.epsilon is None:
            filled["epsilon"] = EPSILON
        elif self.epsilon == math.inf:
            raise PrivacyError(
                f"epsilon: got inf, but {method.name} is private; give a number, or a method that is not private, "
                "such as clipped-sgd"
            )
        return replace(self, **filled)


def recipe_for(dataset: str, model: str | None, optimizer: str = "sgd") -> dict[str, Value]:
    """Settings for a data set and a model; the data set's own model if none is named.

    What its row does not know is left to `fit`, which takes values that follow from public numbers.
    """
    row = DATASETS.get(dataset)
    chosen = model or (_own_model(dataset) if row is None else row.model)
    recipe = {} if row is None else row.recipes.get(chosen, {})
    known = {**(_ONE_RELEASE if chosen == LEAST_SQUARES else _ANY), **recipe, "model": chosen}
    return known if optimizer == "sgd" else {**known, "lr": _ADAPTIVE_RATE}


def _own_model(file: str) -> str:
    return OWN_TABLES_MODEL if is_table(Path(file)) else OWN_FILES_MODEL


def checked(name: str, value: Any) -> Any:
    """A setting's value, if there is such a setting and the value is of its kind."""
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(KINDS)}"
        raise SparseDPError(f"there is no setting {name!r}; {hint}")
    return KINDS[name].check(name, value)


def _plain(value: Any) -> Any:
    if isinstance(value, FrozenMap):
        return value.plain()
    if isinstance(value, tuple):
        return list(value)
    return "inf" if value == math.inf else value


KINDS: Mapping[str, kinds.Kind] = MappingProxyType(
    {
        "dataset": kinds.TEXT,
        "data_options": kinds.TABLE,
        "classes": kinds.NAMES,
        "validation": kinds.NUMBER,
        "subset": kinds.COUNT,
        "model": kinds.TEXT,
        "model_options": kinds.TABLE,
        "method": kinds.TEXT,
        "active_ratio": kinds.RATIO,
        "options": kinds.TABLE,
        "epsilon": kinds.BUDGET,
        "delta": kinds.CHANCE,
        "accountant": kinds.choice("pld", "rdp", "rdp-classic"),
        "unit": kinds.choice("row"),
        "rows_per_unit": kinds.COUNT,
        "epochs": kinds.COUNT,
        "batch_size": kinds.COUNT,
        "clip_norm": kinds.BOUNDS,
        "noise_std": kinds.NUMBER,
        "normalise": kinds.TABLE,
        "warmup_fraction": kinds.NUMBER,
        "selection_budget": kinds.NUMBER,
        "phase1_budget": kinds.NUMBER,
        "public_scores": kinds.TEXT,
        "optimizer": kinds.choice("sgd", "adam", "adamw", *OWN_OPTIMIZERS),
        "lr": kinds.POSITIVE,
        "momentum": kinds.DECAY,
        "weight_decay": kinds.NOT_NEGATIVE,
        "scheduler": kinds.choice("constant", "cosine", "linear"),
        "ema_decay": kinds.NUMBER,
        "engine": kinds.choice("bookkeeping", "reference"),
        "max_physical_batch": kinds.COUNT,
        "cache_features": kinds.FLAG,
        "seed": kinds.WHOLE,
    }
)
"""Every setting and what it may be, in the order they are shown."""


def settings_of_run(run: Path) -> dict[str, Any]:
    """The settings a run was started with, from its record."""
    found = Run.open(run).record["config"]
    if not isinstance(found, dict):
        raise SparseDPError(
            f"{run}: its record holds no settings, so it was not started by `sparsedp train`; use it from Python"
        )
    return found
