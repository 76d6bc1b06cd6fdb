"""The audit of what settings, or the run they started, would train; and how often honest code shows what.

`sweep audit` repeats audits of the committed settings (configs/audit.toml) and prints a table of two numbers that
differ: **recomposed** measures single steps and composes them with an accountant, a computation from measured steps;
**whole plan** attacks all steps at once, so it is what an attack has shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparsedp.auditing import AuditResult
from sparsedp.auditing import audit as audit_plan
from sparsedp.auditing.canaries import AuditTarget
from sparsedp.batch import per_sample_loss
from sparsedp.loading import DataConfig
from sparsedp.methods.plan_config import PlanConfig
from sparsedp.runs.record import versions
from sparsedp.training.planning import spec_for
from sparsedp_experiments.attacks.membership import (
    MembershipAttackConfig,
    MembershipFinding,
    attack_membership,
)
from sparsedp_experiments.data.bundle import DataBundle
from sparsedp_experiments.runs.execute import (
    check,
    load_data,
    loss_of,
    model_of,
    optimizer_of,
    rate_of,
    suited_to,
)
from sparsedp_experiments.runs.grid import CONFIGS, RESULTS, read_toml
from sparsedp_experiments.runs.results import Record, append_row, read_rows
from sparsedp_experiments.runs.settings import Settings
from sparsedp_experiments.runs.text import markdown_table

CONFIG, RECORDS = CONFIGS / "audit.toml", RESULTS / "audit.jsonl"


def audit_settings(settings: Settings, *, confidence: float = 0.95, steps: int = 200) -> AuditResult:
    """Attack what `execute` would run with these settings."""
    subject, found, bundle = _subject(settings)
    return audit_plan(
        subject.model,
        bundle.train,
        loss_of(subject.model),
        plan=subject.plan,
        data=subject.loading,
        engine=found.engine,
        confidence=confidence,
        steps=steps,
        progress=False,
    )


def attack_settings(
    settings: Settings, *, records: int, trainings: int = 1, confidence: float = 0.95
) -> MembershipFinding:
    """Train what `execute` would with planted records, and tell those by the losses of the models alone: minutes."""
    subject, found, bundle = _subject(settings)
    how = MembershipAttackConfig(
        records=records,
        trainings=trainings,
        optimizer=optimizer_of(found),
        lr=rate_of(found, bundle, subject.model),
    )
    return attack_membership(subject, subject.model, how, 1 - confidence)


def _subject(settings: Settings) -> tuple[AuditTarget, Settings, DataBundle]:
    """Model, data, loss and plan of what `execute` would run."""
    found = check(settings)
    bundle = load_data(found)
    model = model_of(found, bundle).train()
    found = suited_to(model, found, bundle)
    subject = AuditTarget(
        model=model,
        dataset=bundle.train,
        loss=per_sample_loss(loss_of(model)),
        plan=_spec(model, found, bundle).plan(),
        loading=DataConfig(
            unit_ids=None if found.unit == "row" else bundle.train.units,
            rows_per_unit=found.rows_per_unit,
            max_physical_batch=found.max_physical_batch,
        ),
        engine=found.engine,
    )
    return subject, found, bundle


def _spec(model: Any, found: Settings, bundle: DataBundle) -> PlanConfig:
    """What `execute` asks of `fit`, its privacy half."""
    train = bundle.train
    by_row = found.unit == "row" or train.units is None
    units = len(train) if by_row else train.unit_count
    unit = "row" if by_row else bundle.unit
    return spec_for(model, found.configured_method(), units=units, unit_name=unit, **found.asked())


def audit_missing() -> None:
    """Audit until every study has as many records as the config wants, then print the table."""
    config = read_toml(CONFIG)
    for name, wanted, how in _studies(config):
        done = sum(row["experiment"] == f"audit-{name}" for row in read_rows(RECORDS))
        for number in range(done, wanted):
            found = audit_settings(Settings.from_json(how["settings"]), confidence=how["confidence"])
            kept = {key: value for key, value in found.to_json().items() if key not in ("summary", "run")}
            append_row(RECORDS, {"experiment": f"audit-{name}", **how, **kept, "versions": dict(versions())})
            print(f"{name} {number + 1}/{wanted}: {found.lower_bound:.3f} of {found.claimed_epsilon:.3f}")
    print("\n".join(audit_table(config)))


def _studies(config: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, number of audits, and how each is made."""
    for method in config["methods"]:
        settings = {**config["base"], "method": method}
        yield method, config["repeats"], {"settings": settings, "confidence": config["confidence"]}
    alarms = config["alarms"]
    settings = {**config["base"], "method": alarms["method"]}
    yield "alarms", alarms["audits"], {"settings": settings, "confidence": alarms["confidence"]}


def audit_table(config: Mapping[str, Any]) -> list[str]:
    """Claim and bounds by method, and how often honest code raised an alarm."""
    found: dict[str, list[Record]] = {}
    for row in read_rows(RECORDS):
        found.setdefault(row["experiment"].removeprefix("audit-"), []).append(row)
    rows = []
    for method in config["methods"]:
        records = found[method]
        one, whole = records[0]["one_step"]["claimed_epsilon"], records[0]["claimed_epsilon"]
        steps = _spread([record["one_step"]["lower_bound"] for record in records])
        rows.append([f"`{method}`", f"{one:.3f}", steps, f"{whole:.3f}", *map(_spread, _both(records))])
    alarms, confidence = found["alarms"], config["alarms"]["confidence"]
    raised = sum(not record["passed"] for record in alarms)
    headings = [
        "method", "one step: claimed", "shown", f"{config['steps']} steps: claimed",
        "recomposed from measured steps", "attack on the whole plan",
    ]  # fmt: skip
    said = (
        f"Of {len(alarms)} audits of honest code at a confidence of {confidence:g}, {raised} raised an alarm; at "
        f"most {(1 - confidence) * len(alarms):.0f} are to be expected."
    )
    return [*markdown_table(headings, rows), "", said]


def _both(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    return [float(one["recomposed"]) for one in records], [float(one["lower_bound"]) for one in records]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
