"""How to run it again: a command line and Python, written from the plan and the record."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from sparsedp.methods.method import Method
from sparsedp.methods.options import MethodOptions
from sparsedp.methods.spec import Asked, PlanSpec
from sparsedp.methods.table import all_methods
from sparsedp.report.run import ReportedRun
from sparsedp.training.fit import fit

_SAID_OTHERWISE = ("method", "optimizer", "scheduler")

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


def recipe(run: ReportedRun) -> Recipe | None:
    """How to run it again; None for a run without a folder, or with a plan or method only its author can make."""
    settings = run.record["settings"]
    if settings is None or run.plan.spec is None or run.plan.continuation is not None:
        return None
    spec = PlanSpec.of(run.plan)
    changed = changed_options(spec.method)
    if changed is None:
        return None
    arguments = {**_privacy(spec), **_method(changed), **_training(run)}
    config = run.record.get("config")
    command = None if config is None else _command(config)
    return Recipe(command, _python(run, arguments), _notes(run))


def changed_options(method: Method) -> dict[str, Any] | None:
    """The options that turn a row of this library into a method, as JSON; None if it is none of its rows."""
    row = next((known for known in all_methods() if known.name == method.name), None)
    if row is None:
        return None
    plain = row.to_json()
    differing = {name: value for name, value in method.to_json().items() if value != plain[name]}
    return differing if set(differing) <= set(MethodOptions.__slots__) else None


def _privacy(spec: PlanSpec) -> dict[str, str]:
    """The arguments that are not what `fit` takes anyway; the budget and the sizes always."""
    usual = PlanSpec.asked(spec.method, units=spec.units, delta=spec.delta)
    always = {"epsilon", "delta", "epochs", "batch_size", "clip_norm"}
    shown = (name for name in Asked.__annotations__ if name in always or _asks(spec, usual, name))
    arguments = {"method": repr(spec.method.name), **{name: repr(getattr(spec, name)) for name in shown}}
    if spec.unit != "row":
        arguments.update(units="units", unit=repr(spec.unit))
    return {name: value for name, value in arguments.items() if value != "None"}


def _asks(spec: PlanSpec, usual: PlanSpec, name: str) -> bool:
    return bool(getattr(spec, name) != getattr(usual, name))


def _method(changed: Mapping[str, Any]) -> dict[str, str]:
    if set(changed) <= {"active_ratio"}:
        return {name: repr(value) for name, value in changed.items()}
    return {"options": f"sparsedp.MethodOptions.from_json({dict(changed)!r})"}


def _training(run: ReportedRun) -> dict[str, str]:
    settings = run.record["settings"]
    arguments = {"optimizer": f"lambda parameters: {_optimizer(settings['optimizer'])}"}
    for name, parameter in inspect.signature(fit).parameters.items():
        if name in settings and name not in _SAID_OTHERWISE and settings[name] != parameter.default:
            arguments[name] = repr(settings[name])
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


def _python(run: ReportedRun, arguments: Mapping[str, str]) -> str:
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


def _notes(run: ReportedRun) -> tuple[str, ...]:
    settings = run.record["settings"]
    notes = ["Build model, data and loss as the run did; initial weights come from your own code."]
    if run.record["seed"] is None:
        notes.append("The run had no seed: another one gives other weights, at the same guarantee.")
    if settings["scheduler"] is not None:
        notes.append(f"It had a learning-rate schedule, {settings['scheduler']}: pass it as scheduler=.")
    if len(settings["optimizer"]["groups"]) > 1:
        notes.append("Its optimizer had several parameter groups; the settings below list them all.")
    return tuple(notes)
