"""How to run it again: a command line and Python, written from the plan and the record."""

from __future__ import annotations

import inspect
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, final

import torch

from sparsedp.methods.describe import describe
from sparsedp.methods.options import MethodOptions, configure
from sparsedp.methods.registry import all_methods
from sparsedp.methods.timeline import WARM_UP
from sparsedp.privacy.accountants import accountant_for
from sparsedp.privacy.events import Spend, event_of
from sparsedp.privacy.plan import Plan
from sparsedp.report.run import Run

DEFAULT_WARM_UP = Fraction(3, 10)
_FLAGS = frozenset(
    {"dataset", "model", "method", "epsilon", "delta", "epochs", "batch_size", "lr", "clip_norm"}
    | {"active_ratio", "seed", "classes"}
)
"""Settings with a flag of their own; the others go through `--set`."""


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """A run to be typed again.

    Attributes:
        command: for `sparsedp train`; None for a run that was not started by settings alone.
        python: the call of `fit`.
        notes: what it cannot say.
    """

    command: str | None
    python: str
    notes: tuple[str, ...]


def recipe(run: Run) -> Recipe | None:
    """How to run it again; None for a run without a folder, or with a plan or method only its author can make."""
    settings = run.record["settings"]
    if settings is None or run.plan.continuation is not None:
        return None
    changed = changed_options(settings["method"])
    if changed is None:
        return None
    arguments = {**_privacy(run.plan), **_method(changed), **_training(run)}
    config = run.record.get("config")
    command = None if config is None else _command(config)
    return Recipe(command, _python(run, arguments), _notes(run))


def changed_options(described: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options that turn a method's row into the described one, as JSON; None if it is no row of this library."""
    row = next((method for method in all_methods() if method.name == described["name"]), None)
    if row is None:
        return None
    plain = describe(row)
    differing = {name: described[name] for name in plain if described.get(name) != plain[name]}
    options: dict[str, Any] = {}
    for name, value in differing.items():
        options.update(_OPTIONS.get(name, lambda v, name=name: {name: v})(value))
    if not set(options) <= set(MethodOptions.__slots__):
        return None
    rebuilt = describe(configure(row, MethodOptions.from_json(options)))
    return options if rebuilt == dict(described) else None


def _ranking(value: Mapping[str, Any]) -> dict[str, Any]:
    block = {"block_size": value["block"]} if "block" in value else {}
    return {"ranking": value["name"], **block}


def _clock(value: Mapping[str, Any]) -> dict[str, Any]:
    return {"clock": {"per_epoch": value["times"]} if "times" in value else {"every_steps": value["steps"]}}


def _decays(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "centre_decay": value["centre"],
        "variance_decay": value["variance"],
        "stabilizer": value["stabilizer"],
    }


_OPTIONS = {"ranking": _ranking, "clock": _clock, "decays": _decays}


def _privacy(plan: Plan) -> dict[str, str]:
    main = plan.phases[-1]
    clips = [phase.clip_norm for phase in plan.training]
    arguments = {
        "method": repr(plan.method),
        "epsilon": repr(plan.target_epsilon),
        "delta": repr(plan.delta),
        "epochs": repr(len(plan.epoch_ends())),
        "batch_size": repr(round(plan.expected_batch_size(main))),
        "clip_norm": repr(clips[0] if len(set(clips)) == 1 else tuple(clips)),
    }
    if main.noise_std is not None:
        arguments["noise_std"] = repr(main.noise_std)
    if plan.accountant not in (None, "pld"):
        arguments["accountant"] = repr(plan.accountant)
    if plan.training[0].name == WARM_UP and len(plan.training) == 2:
        arguments.update(_two_phases(plan))
    if not plan.phases[0].trains:
        first = plan.phases[0]
        arguments["normalise"] = f"PrivateNormalisation({first.noise_multiplier!r}, {first.clip_norm!r})"
    if plan.unit != "row":
        arguments.update(units="units", unit=repr(plan.unit))
    return {name: value for name, value in arguments.items() if value != "None"}


def _two_phases(plan: Plan) -> dict[str, str]:
    first, second = plan.training
    arguments = {}
    if math.floor(DEFAULT_WARM_UP * plan.training_steps + Fraction(1, 2)) != first.steps:
        arguments["warmup_fraction"] = repr(first.steps / plan.training_steps)
    if first.noise_multiplier != second.noise_multiplier and plan.delta and plan.target_epsilon:
        warm_up = event_of([Spend(first.sampling_rate, first.noise_multiplier, first.steps)])
        alone = accountant_for(plan).epsilon(warm_up, plan.delta)
        arguments["split"] = f"NominalSplit({round(alone / plan.target_epsilon, 2)})"
    return arguments


def _method(changed: Mapping[str, Any]) -> dict[str, str]:
    if set(changed) <= {"active_ratio"}:
        return {name: repr(value) for name, value in changed.items()}
    return {"options": f"sparsedp.MethodOptions.from_json({dict(changed)!r})"}


def _training(run: Run) -> dict[str, str]:
    settings = run.record["settings"]
    arguments = {"optimizer": f"lambda parameters: {_optimizer(settings['optimizer'])}"}
    if settings["rows_per_unit"] != 1:
        arguments["rows_per_unit"] = repr(settings["rows_per_unit"])
    if settings["ema_decay"] is not None:
        arguments["ema_decay"] = repr(settings["ema_decay"])
    if settings["engine"] != "bookkeeping":
        arguments["engine"] = repr(settings["engine"])
    if run.record["seed"] is not None:
        arguments["seed"] = repr(run.record["seed"])
    return arguments


def _optimizer(saved: Mapping[str, Any]) -> str:
    kind, group = saved["class"], saved["groups"][0]
    known = getattr(torch.optim, kind, None)
    defaults = {} if known is None else inspect.signature(known).parameters
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in group.items()
        if name in defaults and (name == "lr" or _differs(defaults[name].default, value))
    }
    inside = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"torch.optim.{kind}(parameters, {inside})"


def _differs(default: Any, value: Any) -> bool:
    return bool(default != (tuple(value) if isinstance(value, list) else value))


def _python(run: Run, arguments: Mapping[str, str]) -> str:
    needed = {"normalise": "PrivateNormalisation", "split": "NominalSplit"}
    imports = [
        "import torch",
        *(
            f"from sparsedp.privacy import {name}"
            for argument, name in needed.items()
            if argument in arguments
        ),
    ]
    lines = [f"    {name}={value}," for name, value in arguments.items()]
    model = run.record["model"]
    data = run.record["dataset"] or "your data"
    return "\n".join(
        [
            *imports,
            "",
            "import sparsedp",
            "",
            "result = sparsedp.fit(",
            f"    model,  # {model}, d = {run.layout.dimension:,}".replace("\n", " "),
            f"    train_dataset,  # {data}, N = {run.plan.units:,}".replace("\n", " "),
            "    loss_fn,",
            *lines,
            ")",
        ]
    )


def _command(config: Mapping[str, Any]) -> str:
    """The command line of settings that were given on one, or in a config."""
    words = ["sparsedp train"]
    for name, value in config.items():
        if name in _FLAGS:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"--{name.replace('_', '-')} {shlex.quote(text)}")
        else:
            words.append(f"--set {shlex.quote(f'{name}={_toml(value)}')}")
    return " \\\n  ".join([*words, "--out RUN"])


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _notes(run: Run) -> tuple[str, ...]:
    settings = run.record["settings"]
    notes = ["Build model, data and loss as the run did; initial weights come from your own code."]
    if run.record["seed"] is None:
        notes.append("The run had no seed: another one gives other weights, at the same guarantee.")
    if settings["scheduler"] is not None:
        notes.append(f"It had a learning-rate schedule, {settings['scheduler']}: pass it as scheduler=.")
    if len(settings["optimizer"]["groups"]) > 1:
        notes.append("Its optimizer had several parameter groups; the settings below list them all.")
    return tuple(notes)
