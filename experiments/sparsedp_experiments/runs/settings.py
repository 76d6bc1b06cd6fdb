"""The settings of one run: what a config file, a grid cell and the command line all come down to."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sparsedp._serialization import FrozenMap, canonical, sha256
from sparsedp.errors import DataError, PrivacyError, SparseDPError
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
from sparsedp.runs.record import RunMetadata
from sparsedp.runs.run import Run
from sparsedp.training.planning import RunConfig, changed_method
from sparsedp_experiments.data import DATASETS
from sparsedp_experiments.data.spec import Value


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: how to say it, and how to read it (None for a value that is not of this kind)."""

    words: str
    read: Callable[[Any], Any]

    def check(self, name: str, value: Any) -> Any:
        """The value as the program wants it."""
        found = self.read(value)
        if found is None:
            raise SparseDPError(f"{name}: got {value!r}, expected {self.words}")
        return found


def _plain_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _number(holds: Callable[[float], bool] = lambda _: True) -> Callable[[Any], float | None]:
    return lambda value: (
        float(value) if _plain_number(value) and math.isfinite(value) and holds(value) else None
    )


def _whole(least: int) -> Callable[[Any], int | None]:
    return lambda value: value if type(value) is int and value >= least else None


def _budget(value: Any) -> float | None:
    found = math.inf if value == "inf" else value
    return float(found) if _plain_number(found) and found > 0 else None


def _bounds(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return NUMBER.read(value)
    both = tuple(NUMBER.read(part) for part in value)
    return both if len(both) == 2 and None not in both else None


def _read_table(value: Any) -> FrozenMap | None:
    fits = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return FrozenMap(value) if fits else None


TEXT = Kind("a name", lambda value: value if isinstance(value, str) and value else None)
NUMBER = Kind("a number", _number())
POSITIVE = Kind("a number > 0", _number(lambda value: value > 0))
NOT_NEGATIVE = Kind("a number >= 0", _number(lambda value: value >= 0))
DECAY = Kind("a number in [0, 1)", _number(lambda value: 0 <= value < 1))
CHANCE = Kind("a number between 0 and 1", _number(lambda value: 0 < value < 1))
WHOLE = Kind("a whole number >= 0", _whole(0))
COUNT = Kind("a whole number >= 1", _whole(1))
BUDGET = Kind("a finite number > 0, or inf for a method that is not private", _budget)
BOUNDS = Kind("a number, or two: for the warm-up and for the main phase", _bounds)
TABLE = Kind("a table of names and values", _read_table)
_NOTHING = FrozenMap({})

LEAST_SQUARES = "least-squares"
NOISY = "noisy-sgd"
ABLATIONS = (NOISY, "clipped-sgd")
"""Methods of RS that protect nobody: loops of `runs.ablations`, which a sweep runs."""

_ANY: Mapping[str, Value] = {"epochs": EPOCHS, "clip_norm": CLIP_NORM, "momentum": MOMENTUM}
_ADAPTIVE_RATE = 0.001
_ONE_RELEASE: Mapping[str, Value] = {"epochs": 1, "momentum": 0.0, "lr": 1.0}
"""Least squares is one step over all units, of length one; its clip norm follows from the classes (`execute`)."""


def _choice(*options: str) -> Kind:
    return Kind(f"one of {', '.join(options)}", lambda value: value if value in options else None)


def _of(kind: Kind, default: Any = None) -> Any:
    """A setting of a kind, None where nobody asks for anything else."""
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides what a run does. None leaves the choice to the data set's recipe, then to `fit`."""

    dataset: str = field(metadata={"kind": TEXT})  # a name that `data` lists
    data_options: FrozenMap = _of(TABLE, _NOTHING)  # arguments of the loader, such as `groups`
    validation: float | None = _of(NUMBER)  # share of the training units to evaluate on, not the test set
    subset: int | None = _of(COUNT)  # only so many units of each side, chosen by a public seed
    model: str | None = _of(TEXT)  # a name of `models.MODELS`
    model_options: FrozenMap = _of(TABLE, _NOTHING)  # arguments of the model, such as `hidden`
    method: str = _of(TEXT, METHOD)  # a name of `sparsedp methods`, or "auto"
    active_ratio: float | None = _of(NUMBER)  # share of the coordinates trained
    options: FrozenMap = _of(TABLE, _NOTHING)  # further changes to the method
    epsilon: float | None = _of(BUDGET)  # inf for an ablation
    delta: float | None = _of(CHANCE)
    accountant: str = _of(_choice("pld", "rdp", "rdp-classic"), ACCOUNTANT)
    unit: str | None = _of(_choice("row"))  # "row" protects rows of a data set that knows whose they are
    rows_per_unit: int = _of(COUNT, 1)  # rows drawn of a sampled unit
    epochs: int | None = _of(COUNT)
    batch_size: int | None = _of(COUNT)  # expected number of units
    clip_norm: float | tuple[float, float] | None = _of(BOUNDS)  # a pair is for warm-up and main phase
    noise_std: float | None = _of(NUMBER)  # on the sum of gradients, for `noisy-sgd` only
    normalise: FrozenMap = _of(TABLE, _NOTHING)  # `noise_multiplier` and `clip_norm` of that release
    warmup_fraction: float = _of(NUMBER, WARMUP_FRACTION)  # share of the steps of a warm-up
    selection_budget: float | None = _of(NUMBER)  # share of epsilon of a selection's own release
    phase1_budget: float | None = _of(NUMBER)  # share of epsilon of the warm-up alone; None: equal noise
    optimizer: str = _of(_choice("sgd", "adam", "adam-bc", "low-pass"), "sgd")
    lr: float | None = _of(POSITIVE)
    momentum: float | None = _of(DECAY)  # of SGD
    weight_decay: float = _of(NOT_NEGATIVE, 0.0)
    scheduler: str = _of(_choice("constant", "cosine", "linear"), "constant")  # over all steps
    ema_decay: float | None = _of(NUMBER)  # average the weights
    engine: str = _of(_choice("bookkeeping", "reference"), "bookkeeping")
    max_physical_batch: int | None = _of(COUNT)  # most rows loaded at once
    seed: int | None = _of(WHOLE)  # makes the run reproducible, and not for release

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from what a user wrote or `to_json` gave."""
        found = {name: checked(name, value) for name, value in values.items()}
        if "dataset" not in found:
            raise SparseDPError("dataset: not given; name one (`data` lists them)")
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
        """The method with all that belongs to it, as `fit` takes it."""
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

    def training(self, unit_name: str | None, metadata: RunMetadata) -> dict[str, Any]:
        """What they ask of the training loop, as `fit` takes it."""
        data = DataConfig(
            unit_name=unit_name, rows_per_unit=self.rows_per_unit, max_physical_batch=self.max_physical_batch
        )
        run = RunConfig(engine=self.engine, metadata=metadata)
        return {"ema_decay": self.ema_decay, "data": data, "run": run}

    @property
    def digest(self) -> str:
        """A hash of all settings, the seed included: names the run."""
        return sha256(canonical(self.to_json()))

    def resolved(self) -> Settings:
        """The same with the data set's recipe filled in, and every name checked."""
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
        raise DataError(
            f"no data set named {dataset!r}; there are {', '.join(DATASETS)}. Your own data: `sparsedp.fit`, or "
            "`sparsedp train` for tables"
        )
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


KINDS: Mapping[str, Kind] = {entry.name: entry.metadata["kind"] for entry in fields(Settings)}
"""Every setting and what it may be, in the order they are shown."""


def settings_of_run(run: Path) -> dict[str, Any]:
    """The settings a run was started with, from its record."""
    found = Run.open(run).record["config"]
    if not isinstance(found, dict):
        raise SparseDPError(
            f"{run}: its record holds no settings, so it was not started by `sparsedp train`; use it from Python"
        )
    return found
