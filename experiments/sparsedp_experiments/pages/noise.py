"""AdaDPIGU's Table 3, the noise for its epsilons, with sound accounting. Needs no training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparsedp._serialization import canonical, sha256
from sparsedp.methods import get_method
from sparsedp.methods.plan_config import build_plan
from sparsedp_experiments.pages import words
from sparsedp_experiments.pages.paper import read_paper
from sparsedp_experiments.runs.results import append_row, read_rows

FILE, EXPERIMENT = Path("experiments") / "results" / "adadpigu.jsonl", "adadpigu-table3"
ACCOUNTANTS = MappingProxyType(
    {"rdp-classic": "RDP, classic conversion", "rdp": "RDP, tight conversion", "pld": "PLD"}
)
DELTA = 1e-5


@dataclass(frozen=True, slots=True)
class Training:
    """Numbers the paper does not state, found by inverting its table with the classic RDP accountant."""

    units: int
    batch_size: int
    epochs: int


TRAINING: Mapping[str, Training] = MappingProxyType(
    {"mnist": Training(60_000, 1000, 200), "cifar10": Training(50_000, 500, 200)}
)


def noise_multiplier(training: Training, epsilon: float, accountant: str) -> float:
    """The least noise that keeps DP-SGD with these numbers within epsilon."""
    plan = build_plan(
        get_method("dp-sgd"),
        units=training.units,
        batch_size=training.batch_size,
        epochs=training.epochs,
        epsilon=epsilon,
        delta=DELTA,
        max_grad_norm=1.0,
        accountant=accountant,
    )
    return plan.phases[0].noise_multiplier


def noise_table(root: Path) -> list[str]:
    """The table, from its records; what has none is computed and appended."""
    file = root / FILE
    found = {row["config_hash"]: row["noise"] for row in read_rows(file) if row["experiment"] == EXPERIMENT}
    for question in _questions():
        if (name := sha256(canonical(question))) not in found:
            found[name] = _answer(question)
            append_row(
                file,
                {"experiment": EXPERIMENT, "config_hash": name, "question": question, "noise": found[name]},
            )
    rows = []
    for (dataset, epsilon), number in read_paper("adadpigu").table("table3").rows.items():
        ours = [found[sha256(canonical(_question(dataset, float(epsilon), name)))] for name in ACCOUNTANTS]
        training = TRAINING[dataset]
        steps = f"batch {words.count_text(training.batch_size)}, {training.epochs} epochs"
        rows.append([dataset, steps, epsilon, f"{number.value:.2f}", *(f"{noise:.2f}" for noise in ours)])
    headings = ["data set", "steps", "epsilon", "paper", *ACCOUNTANTS.values()]
    return words.markdown_table(headings, rows)


def _questions() -> list[dict[str, Any]]:
    rows = read_paper("adadpigu").table("table3").rows
    return [_question(dataset, float(epsilon), name) for dataset, epsilon in rows for name in ACCOUNTANTS]


def _question(dataset: str, epsilon: float, accountant: str) -> dict[str, Any]:
    training = TRAINING[dataset]
    return {
        "units": training.units,
        "batch_size": training.batch_size,
        "epochs": training.epochs,
        "epsilon": epsilon,
        "delta": DELTA,
        "accountant": accountant,
    }


def _answer(question: Mapping[str, Any]) -> float:
    training = Training(question["units"], question["batch_size"], question["epochs"])
    return round(noise_multiplier(training, question["epsilon"], question["accountant"]), 6)
