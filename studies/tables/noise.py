"""AdaDPIGU's Table 3, the noise for its epsilons, with sound accounting. Needs no training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparsedp.core.files import read_json, write_json
from sparsedp.methods import get_method
from sparsedp.methods.spec import build_plan
from studies.tables import words
from studies.tables.paper import read_paper

FILE = Path("results") / "adadpigu-table3" / "noise.json"
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
        clip_norm=1.0,
        accountant=accountant,
    )
    return plan.phases[0].noise_multiplier


def noise_table(root: Path) -> list[str]:
    """The table, from its file; a file that is missing or of other questions is made anew."""
    file = root / FILE
    known = read_json(file) if file.exists() else None
    questions = _questions()
    if not isinstance(known, dict) or [one["question"] for one in known["answers"]] != questions:
        known = {"answers": [{"question": one, "noise": _answer(one)} for one in questions]}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, known)
    found = {json.dumps(one["question"]): one["noise"] for one in known["answers"]}
    rows = []
    for (dataset, epsilon), number in read_paper("adadpigu").table("table3").rows.items():
        ours = [found[json.dumps(_question(dataset, float(epsilon), name))] for name in ACCOUNTANTS]
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
