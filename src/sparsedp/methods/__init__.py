"""The methods table: rankings, schedules, refresh rules and geometries, and the controller that runs a row of it."""

from sparsedp.methods.clock import EverySteps, PerEpoch, Refresh
from sparsedp.methods.controller import Controller
from sparsedp.methods.granularity import Granularity
from sparsedp.methods.method import AUTO, GeometryRule, Method, OffSupport, Protection
from sparsedp.methods.options import MethodOptions, configure
from sparsedp.methods.planning import build_plan
from sparsedp.methods.registry import all_methods, get_method, register
from sparsedp.methods.schedules import Constant, Cooling, Listed, Release
from sparsedp.methods.scores import (
    BlockCoherent,
    Coherent,
    Energy,
    Magnitude,
    RandomOrder,
    Ranked,
    Score,
    register_ranking,
)
from sparsedp.methods.setting import ControllerState, StepSetting, SupportChange

__all__ = [
    "AUTO",
    "BlockCoherent",
    "Coherent",
    "Constant",
    "Controller",
    "ControllerState",
    "Cooling",
    "Energy",
    "EverySteps",
    "GeometryRule",
    "Granularity",
    "Listed",
    "Magnitude",
    "Method",
    "MethodOptions",
    "OffSupport",
    "PerEpoch",
    "Protection",
    "RandomOrder",
    "Ranked",
    "Refresh",
    "Release",
    "Score",
    "StepSetting",
    "SupportChange",
    "all_methods",
    "build_plan",
    "configure",
    "get_method",
    "register",
    "register_ranking",
]
