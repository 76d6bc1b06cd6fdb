"""The settings of one run: what a config file, a grid cell and the command line all come down to."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sparsedp._serialization import FrozenMap, canonical, sha256
from sparsedp.errors import PrivacyError, SparseDPError
from sparsedp.loading import DataConfig
from sparsedp.methods import get_method
from sparsedp.methods.auto import AUTO_METHOD
from sparsedp.methods.method import OF_THE_PLAN, Method
from sparsedp.methods.plan_config import (
    ACCOUNTANT,
    CLIP_NORM,
    EPOCHS,
    EPSILON,
    METHOD,
    WARMUP_FRACTION,
    PlanArgs,
)
from sparsedp.optimizers.factory import MOMENTUM
from sparsedp.privacy.calibration import EqualNoise, NominalSplit
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.runs.run import Run
from sparsedp.training.planning import changed_method
from sparsedp_experiments.data import DATASETS
from sparsedp_experiments.data.spec import Value


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: how to say it, and how to read it (None for a value that is not of this kind)."""

    words: str
    read: Callable[[Any], Any]

    def check(self, name: str, value: Any) -> Any:
        """The value as the program wants it.

        Raises:
            SparseDPError: it is something else.
        """
        found = self.read(value)
        if found is None:
            raise SparseDPError(f"{name}: got {value!r}, expected {self.words}")
        return found


def _number(value: Any) -> float | None:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and not math.isnan(value) else None


def _finite(value: Any) -> float | None:
    found = _number(value)
    return found if found is not None and math.isfinite(found) else None


def _finite_where(holds: Callable[[float], bool]) -> Callable[[Any], float | None]:
    def read(value: Any) -> float | None:
        found = _finite(value)
        return found if found is not None and holds(found) else None

    return read


def _budget(value: Any) -> float | None:
    found = math.inf if value == "inf" else _number(value)
    return found if found is not None and found > 0 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _count(value: Any) -> int | None:
    return _whole(value) or None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _ratio(value: Any) -> float | str | None:
    return value if value == "auto" else _finite(value)


def _bounds(value: Any) -> float | tuple[float, ...] | None:
    if not isinstance(value, (list, tuple)):
        return _finite(value)
    both = [_finite(part) for part in value]
    return tuple(part for part in both if part is not None) if len(both) == 2 and None not in both else None


def _read_table(value: Any) -> FrozenMap | None:
    fits = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return FrozenMap(value) if fits else None


TEXT = Kind("a name", _text)
FLAG = Kind("true or false", _flag)
NUMBER = Kind("a number", _finite)
POSITIVE = Kind("a number > 0", _finite_where(lambda value: value > 0))
NOT_NEGATIVE = Kind("a number >= 0", _finite_where(lambda value: value >= 0))
DECAY = Kind("a number in [0, 1)", _finite_where(lambda value: 0 <= value < 1))
WHOLE = Kind("a whole number >= 0", _whole)
COUNT = Kind("a whole number >= 1", _count)
CHANCE = Kind("a number between 0 and 1", _finite_where(lambda value: 0 < value < 1))
BUDGET = Kind("a finite number > 0, or inf for a method that is not private", _budget)
RATIO = Kind('a share in (0, 1], or "auto"', _ratio)
BOUNDS = Kind("a number, or two: for the warm-up and for the main phase", _bounds)
TABLE = Kind("a table of names and values", _read_table)


def choice(*options: str) -> Kind:
    """One of a few words."""
    return Kind(f"one of {', '.join(options)}", lambda value: value if value in options else None)


_NOTHING = FrozenMap({})

LEAST_SQUARES = "least-squares"
NOISY = "noisy-sgd"
ABLATIONS = (NOISY, "clipped-sgd")
"""Methods of RS that protect nobody: loops of `runs.ablations`, which a sweep runs."""

_ANY: Mapping[str, Value] = {"epochs": EPOCHS, "clip_norm": CLIP_NORM, "momentum": MOMENTUM}
_ADAPTIVE_RATE = 0.001
_ONE_RELEASE: Mapping[str, Value] = {"epochs": 1, "momentum": 0.0, "lr": 1.0}
"""Least squares is one step over all units, of length one; its clip norm follows from the classes (`execute`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides what a run does. None leaves the choice to the data set's recipe, then to `fit`.

    Attributes:
        dataset: a name (`python -m sparsedp_experiments data` lists them).
        data_options: arguments of the loader, such as `prevalence` or `groups`.
        validation: share of the training units to evaluate on instead of the test set.
        subset: use only so many units of each side, chosen by a public seed.
        model: a name from the models table.
        model_options: arguments of the model, such as `hidden` or `activation`.
        method: a name from `sparsedp methods`, or "auto": dense or sparse, by public numbers.
        active_ratio: share of the coordinates trained, or "auto".
        options: further changes to the method.
        epsilon: the budget; inf for an ablation.
        delta: of the guarantee.
        accountant: "pld", "rdp" or "rdp-classic".
        unit: "row" to protect rows of a data set that knows whose they are.
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

    def method_changes(self) -> dict[str, Any]:
        """The changes to the method, its ratio among them."""
        ratio = {} if self.active_ratio is None else {"active_ratio": self.active_ratio}
        return {**self.options.plain(), **ratio}

    def asked(self) -> PlanArgs:
        """What they ask of a plan, but for units and method."""
        return PlanArgs(
            epsilon=self.epsilon,
            delta=self.delta,
            epochs=self.epochs,
            batch_size=self.batch_size,
            max_grad_norm=self.clip_norm,
            warmup_fraction=self.warmup_fraction,
            selection_budget=self.selection_budget,
            split=EqualNoise() if self.phase1_budget is None else NominalSplit(self.phase1_budget),
            accountant=self.accountant,
            normalise=PrivateNormalisation.from_json(self.normalise) if self.normalise else None,
        )

    def configured_method(self) -> str | Method:
        """The method with all that belongs to it, as `fit` takes it.

        Raises:
            PrivacyError: it is an ablation.
        """
        if self.method in ABLATIONS:
            raise PrivacyError(
                f"{self.method} protects nobody, so it is no private run; `sweep` an experiment with it"
            )
        own = {name: value for name, value in self.asked().items() if name in OF_THE_PLAN}
        if own.get("split") == EqualNoise():
            del own["split"]
        if self.method == AUTO_METHOD and self.warmup_fraction == WARMUP_FRACTION:
            del own["warmup_fraction"]  # whoever says nothing of a support asks for none
        return changed_method(self.method, **self.method_changes(), **own)

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
        ablation = self.method in ABLATIONS
        method = get_method({AUTO_METHOD: METHOD}.get(self.method, "on-rand" if ablation else self.method))
        method = method.changed(**self.method_changes())
        PrivateNormalisation.from_json(self.normalise)
        recipe = recipe_for(self.dataset, self.model, self.optimizer)
        filled: dict[str, Any] = {name: v for name, v in recipe.items() if getattr(self, name) is None}
        if ablation:
            filled["epsilon"] = math.inf
            if self.method == NOISY:
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
    if row is None:
        raise SparseDPError(f"dataset: got {dataset!r}, expected one of {', '.join(DATASETS)}")
    chosen = model or row.model
    recipe = row.recipes.get(chosen, {})
    known = {**(_ONE_RELEASE if chosen == LEAST_SQUARES else _ANY), **recipe, "model": chosen}
    return known if optimizer == "sgd" else {**known, "lr": _ADAPTIVE_RATE}


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


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "dataset": TEXT,
        "data_options": TABLE,
        "validation": NUMBER,
        "subset": COUNT,
        "model": TEXT,
        "model_options": TABLE,
        "method": TEXT,
        "active_ratio": RATIO,
        "options": TABLE,
        "epsilon": BUDGET,
        "delta": CHANCE,
        "accountant": choice("pld", "rdp", "rdp-classic"),
        "unit": choice("row"),
        "rows_per_unit": COUNT,
        "epochs": COUNT,
        "batch_size": COUNT,
        "clip_norm": BOUNDS,
        "noise_std": NUMBER,
        "normalise": TABLE,
        "warmup_fraction": NUMBER,
        "selection_budget": NUMBER,
        "phase1_budget": NUMBER,
        "public_scores": TEXT,
        "optimizer": choice("sgd", "adam", "adamw", "adam-bc", "low-pass"),
        "lr": POSITIVE,
        "momentum": DECAY,
        "weight_decay": NOT_NEGATIVE,
        "scheduler": choice("constant", "cosine", "linear"),
        "ema_decay": NUMBER,
        "engine": choice("bookkeeping", "reference"),
        "max_physical_batch": COUNT,
        "cache_features": FLAG,
        "seed": WHOLE,
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
