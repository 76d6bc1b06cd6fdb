"""The default rate of linear and additive classifiers against the best of fourteen, simulated on public tables.

    SPARSEDP_DATA=... python -m sparsedp_experiments.tabular_rates [TABLE ...]

Written apart from the library but for the plan's noise, in NumPy, for all rates at once: the same sampling of units,
clip, noise, momentum and average. Lines of `results/tabular-rates.jsonl`: mean AUC at each multiple of `table_rate`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tomllib
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.metrics import roc_auc_score

from sparsedp.methods import build_plan, get_method
from sparsedp.optimizers.factory import table_rate
from sparsedp.privacy.plan import Plan
from sparsedp.sklearn import PublicEncoder
from sparsedp_experiments.tabular import ROOT, Table, load

FACTORS = [2.0 ** (power / 2) for power in range(-6, 8)]
SEEDS = 12
MOMENTUM = np.float32(0.9)
Array = npt.NDArray[Any]


def weights(inputs: Any, y: Array, owner: Array, plan: Plan, rates: Array, seed: int) -> tuple[Array, Array]:
    """The last weights at every rate, and their average, step t counting t times."""
    (phase,), rng = plan.phases, np.random.default_rng(seed)
    order, counts = np.argsort(owner, kind="stable"), np.bincount(owner)
    first, units = np.cumsum(counts) - counts, len(counts)
    now = np.zeros((inputs.shape[1], len(rates)), np.float32)
    speed, average = np.zeros_like(now), np.zeros_like(now)
    lengths = np.sqrt(np.asarray(inputs.multiply(inputs).sum(axis=1)))
    for step in range(phase.steps):
        drawn = np.flatnonzero(rng.random(units) < phase.sampling_rate)
        chosen = order[first[drawn] + (rng.random(len(drawn)) * counts[drawn]).astype(int)]
        residual = 1 / (1 + np.exp(-np.clip(inputs[chosen] @ now, -30, 30))) - y[chosen, None]
        residual *= np.minimum(1, 1 / (np.abs(residual) * lengths[chosen] + 1e-12))
        noise = rng.standard_normal((len(now), 1)) * phase.noise_multiplier
        speed = MOMENTUM * speed + (inputs[chosen].T @ residual + noise) / (phase.sampling_rate * units)
        now = (now - rates * speed).astype(np.float32)
        average += (now - average) * np.float32(2 / (step + 2))
    return now, average


def simulate(table: Table, epsilon: float, knots: tuple[int, int]) -> dict[str, Any]:
    """The AUC of the last and of the averaged weights at every rate."""
    (frame, y, groups), (new, y_test, _) = table.part(False), table.part(True)
    owner = np.arange(len(y)) if groups is None else np.unique(groups, return_inverse=True)[1]
    units = int(owner.max()) + 1
    encoder = PublicEncoder(table.columns, knots=knots[units >= 10_000]).fit(frame)
    sides = [np.hstack([encoder.transform(one), np.ones((len(one), 1))]) for one in (frame, new)]
    plan = build_plan(
        get_method("dp-sgd"), units=units, batch_size=2 ** round(math.log2(4 * math.sqrt(units))), epochs=20,
        epsilon=epsilon, delta=min(1e-5, 10.0 ** -math.ceil(math.log10(10 * units))), max_grad_norm=1.0,
        accountant="rdp",
    )  # fmt: skip
    rates = np.array(
        [table_rate(plan, encoder.feature_count() + 1, encoder.typical_length(), one) for one in FACTORS]
    )
    train, found = sparse.csr_matrix(sides[0].astype(np.float32)), []
    for seed in range(SEEDS):
        pair = weights(train, y.astype(np.float32), owner, plan, rates.astype(np.float32), seed)
        found.append([[roc_auc_score(y_test, one) for one in (sides[1] @ side).T] for side in pair])
    last, average = np.mean(found, axis=0).round(5).tolist()
    return {"factors": FACTORS, "seeds": SEEDS, "last": last, "average": average}


def main() -> None:
    """Simulate what is asked for, and add its lines."""
    config = tomllib.loads((ROOT / "configs" / "tabular.toml").read_text())
    for name, kind, epsilon in itertools.product(sys.argv[1:], ("linear", "additive"), config["epsilons"]):
        row = simulate(load(name, config["tables"][name]), epsilon, (5, 9) if kind == "additive" else (0, 0))
        with (ROOT / "results" / "tabular-rates.jsonl").open("a") as file:
            file.write(json.dumps({"table": name, "model": kind, "epsilon": epsilon, **row}) + "\n")


if __name__ == "__main__":
    main()
