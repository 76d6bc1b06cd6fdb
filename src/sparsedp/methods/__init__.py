"""The methods table: rankings, schedules, refresh rules and geometries, and the controller that runs a row of it."""

from sparsedp.methods.adafest import Contributions
from sparsedp.methods.clock import EverySteps, PerEpoch, Refresh
from sparsedp.methods.controller import Controller
from sparsedp.methods.given import Given
from sparsedp.methods.granularity import Granularity
from sparsedp.methods.knowledge import Knowledge, PublicScores
from sparsedp.methods.method import Method
from sparsedp.methods.options import MethodOptions, configure
from sparsedp.methods.rankings import ByScore, Frequency, RandomOrder, Ranking, register_ranking
from sparsedp.methods.rules import GeometryRule, OffSupport, Protection
from sparsedp.methods.schedules import Constant, Cooling, Listed, Release, register_schedule
from sparsedp.methods.scores import Coherent, Energy, Magnitude, Ranked
from sparsedp.methods.setting import ControllerState, StepSetting, SupportChange
from sparsedp.methods.spec import PlanSpec, build_plan
from sparsedp.methods.stages import HEAD, MAIN, SELECT, WARM_UP, Moves, Stage
from sparsedp.methods.table import all_methods, get_method, register

__all__ = [
    "HEAD",
    "MAIN",
    "SELECT",
    "WARM_UP",
    "ByScore",
    "Coherent",
    "Constant",
    "Contributions",
    "Controller",
    "ControllerState",
    "Cooling",
    "Energy",
    "EverySteps",
    "Frequency",
    "GeometryRule",
    "Given",
    "Granularity",
    "Knowledge",
    "Listed",
    "Magnitude",
    "Method",
    "MethodOptions",
    "Moves",
    "OffSupport",
    "PerEpoch",
    "PlanSpec",
    "Protection",
    "PublicScores",
    "RandomOrder",
    "Ranked",
    "Ranking",
    "Refresh",
    "Release",
    "Stage",
    "StepSetting",
    "SupportChange",
    "all_methods",
    "build_plan",
    "configure",
    "get_method",
    "register",
    "register_ranking",
    "register_schedule",
]
