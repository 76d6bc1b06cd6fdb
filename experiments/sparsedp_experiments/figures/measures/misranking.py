"""How loose the misranking bounds are (TP-TopK, Prop. 5.3 and Remark B.1): exact values, bounds and a simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsedp_experiments.figures.config import Point, Study
from sparsedp_experiments.figures.cost import Costs
from sparsedp_experiments.theory.misranking import (
    Pair,
    misranking_bernstein,
    misranking_chebyshev,
    misranking_chernoff,
    misranking_coherent,
    misranking_energy,
)


def measure(study: Study, point: Point) -> dict[str, Any]:
    """One number of steps; a coordinate with a gradient against one without, over the gradient's strength."""
    options, costs = study.measure, Costs()
    steps, rows = int(point["steps"]), []
    generator = np.random.Generator(np.random.PCG64(options["seed"]))
    for strength in options["strengths"]:
        pair = Pair(math.sqrt(strength), 0.0, 1.0, steps)
        with costs.of("exact misranking probability, one pair"):
            energy = misranking_energy(pair)
        with costs.of(f"Monte Carlo, {options['draws']} pairs"):
            swapped = _simulate(pair, options["draws"], generator)
        rows.append(
            {
                "strength": strength,
                "energy": energy,
                "coherent": misranking_coherent(pair),
                "chebyshev": misranking_chebyshev(pair),
                "bernstein": misranking_bernstein(pair),
                "chernoff": misranking_chernoff(pair),
                "swapped": swapped,
                "draws": options["draws"],
            }
        )
    return {"steps": steps, "pairs": rows, "costs": costs.to_json()}


def _simulate(pair: Pair, draws: int, generator: np.random.Generator) -> int:
    """How often the energy score of simulated releases puts the coordinate without a gradient first."""

    def energy(gradient: float) -> npt.NDArray[np.float32]:
        noise = generator.standard_normal((draws, pair.steps), dtype=np.float32)
        found: npt.NDArray[np.float32] = np.square(gradient + pair.noise_std * noise).mean(axis=1)
        return found

    return int((energy(pair.smaller) > energy(pair.larger)).sum())
