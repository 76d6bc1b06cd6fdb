"""The methods of the library, one row each."""

from __future__ import annotations

from typing import Any

from sparsedp.methods.empirical_bayes import EmpiricalBayes
from sparsedp.methods.method import HEAD, MAIN, SELECT, WARM_UP, GeometryRule, Method, OffSupport
from sparsedp.methods.ranking import Granularity
from sparsedp.methods.registry import add_named, find_named
from sparsedp.methods.schedules import EqualParts, EverySteps, GradualCooling, ProgressiveUnfreezing, Refresh
from sparsedp.methods.scores import (
    Coherent,
    Contributions,
    Energy,
    Frequency,
    Given,
    Magnitude,
    RandomOrder,
    Ranked,
)

_TP = "Zhang and Xie 2026, arXiv 2606.04375"
_OURS = "ours, after Zhang and Xie 2026, Sec. 5"
_RS = "Zhu and Blaschko 2023"
_TWO_PHASES: dict[str, Any] = {"stages": (WARM_UP, MAIN), "active_ratio": 0.2}
_EVERY_EPOCH: dict[str, Any] = {
    "refresh": Refresh.EVERY_PERIOD,
    "schedule": GradualCooling(),
    "off_support": OffSupport.COASTS,
}

# fmt: off
_ROWS = (
    Method(name="dp-sgd", paper="Abadi et al. 2016",
           summary="Every coordinate, all the time: the dense baseline."),
    Method(name="tp-adaptive", paper=f"{_OURS}, and Stephens 2017", stages=(WARM_UP, MAIN), ranking=EmpiricalBayes(),
           refresh=Refresh.EVERY_PERIOD, clock=EqualParts(4), geometry=GeometryRule.SCALED, denoise=True,
           summary="Warm-up, then four rounds: coordinates worth their noise; all where signal is spread."),
    Method(name="tp-topk", paper=f"{_TP}, Alg. 1", ranking=Energy(), **_TWO_PHASES,
           summary="Warm-up, then the coordinates with the most denoised squared gradient."),
    Method(name="tp-coherent", paper=_OURS, ranking=Coherent(), **_TWO_PHASES,
           summary="Warm-up, then the coordinates with the largest squared mean gradient."),
    Method(name="tp-rand", paper=f"{_TP}, Sec. 7.1", ranking=RandomOrder(), **_TWO_PHASES,
           summary="Warm-up, then random coordinates: the control for tp-topk."),
    Method(name="on-rand", paper=f"{_RS}, Alg. 1", ranking=RandomOrder(), active_ratio=0.2, **_EVERY_EPOCH,
           summary="A fresh random support every epoch, gradually smaller: random sparsification."),
    Method(name="on-topk", paper=f"{_TP}, Sec. 7.1", ranking=Energy(), active_ratio=0.2, **_EVERY_EPOCH,
           summary="Every epoch the coordinates with the most denoised squared gradient in the last one."),
    Method(name="ranked", paper=f"{_RS}, Alg. 4", ranking=Ranked(), active_ratio=0.2, **_EVERY_EPOCH,
           summary="Every epoch the coordinates with the largest summed gradient in the last one."),
    Method(name="adadpigu", paper="Zhang and Xie 2025, Alg. 1 and 2", stages=(WARM_UP, MAIN), ranking=Magnitude(),
           schedule=ProgressiveUnfreezing(), active_ratio=0.6, geometry=GeometryRule.STANDARDIZED,
           summary="Warm-up, then the coordinates of largest mean magnitude, clipped in standardized space."),
    Method(name="head", paper="linear probing", scope=("head",),
           summary="The last module alone: for pretrained networks."),
    Method(name="bias", paper="Ben Zaken et al. 2022; Bu et al. 2022, arXiv 2210.00036", scope=("bias", "head"),
           summary="Biases and the head (BiTFiT): for pretrained networks."),
    Method(name="norms", paper="ours", scope=("norms", "head"),
           summary="Normalisation layers and the head: for pretrained networks."),
    Method(name="head-first", paper="Kumar et al. 2022, arXiv 2202.10054 (LP-FT)", stages=(HEAD, MAIN),
           summary="The head alone for a while, then every coordinate: for pretrained networks."),
    Method(name="fest", paper="Ghazi et al. 2023, arXiv 2311.08357", stages=(SELECT, MAIN), ranking=Frequency(),
           granularity=Granularity.ROWS, always=("dense",), active_ratio=0.1,
           summary="The rows of embedding tables that most units touch, by one noisy count, and all but the tables."),
    Method(name="adafest", paper="Ghazi et al. 2023, arXiv 2311.08357", ranking=Contributions(),
           refresh=Refresh.EVERY_PERIOD, clock=EverySteps(1), granularity=Granularity.ROWS, always=("dense",),
           summary="In every step the rows of embedding tables that enough of its units touch, by a noisy count."),
    Method(name="given", paper="ours", ranking=Given(),
           summary="Public scores or a mask of yours; without, the largest initial weights. Give an active ratio."),
)
# fmt: on

_METHODS = {row.name: row for row in _ROWS}


def register_method(method: Method) -> Method:
    """Add a row to the table; a name that another method has is refused."""
    return add_named(_METHODS, method.name, method, "method")


def get_method(name: str, **changes: Any) -> Method:
    """The method of that name, with changes to its fields (`Method.changed`).

    >>> get_method("tp-topk", active_ratio=0.4).active_ratio
    0.4

    Raises:
        SparseDPError: there is none, or a field is unknown or gets a value that it does not take.
    """
    return find_named(_METHODS, name, "method").changed(**changes)


def list_methods() -> tuple[Method, ...]:
    """Every registered method, by name."""
    return tuple(_METHODS[name] for name in sorted(_METHODS))
