"""The methods table: rankings, schedules, refresh rules and geometries, and the controller that runs a row of it."""

from sparsedp.methods.catalog import get_method, list_methods, register_method
from sparsedp.methods.method import (
    HEAD,
    MAIN,
    SELECT,
    WARM_UP,
    GeometryRule,
    Method,
    Moves,
    OffSupport,
    Stage,
)
from sparsedp.methods.plan_config import PlanConfig, build_plan
from sparsedp.methods.public_scores import Knowledge, PublicScores
from sparsedp.methods.ranking import Granularity
from sparsedp.methods.schedules import (
    Constant,
    EverySteps,
    GradualCooling,
    PerEpoch,
    PiecewiseConstant,
    ProgressiveUnfreezing,
    Refresh,
    register_schedule,
)
from sparsedp.methods.scores import (
    ByScore,
    Coherent,
    Contributions,
    Energy,
    Frequency,
    Given,
    Magnitude,
    RandomOrder,
    Ranked,
    Ranking,
    register_ranking,
)
from sparsedp.methods.support_scheduler import SchedulerState, StepSetting, SupportChange, SupportScheduler

__all__ = [
    "HEAD",
    "MAIN",
    "SELECT",
    "WARM_UP",
    "ByScore",
    "Coherent",
    "Constant",
    "Contributions",
    "Energy",
    "EverySteps",
    "Frequency",
    "GeometryRule",
    "Given",
    "GradualCooling",
    "Granularity",
    "Knowledge",
    "Magnitude",
    "Method",
    "Moves",
    "OffSupport",
    "PerEpoch",
    "PiecewiseConstant",
    "PlanConfig",
    "ProgressiveUnfreezing",
    "PublicScores",
    "RandomOrder",
    "Ranked",
    "Ranking",
    "Refresh",
    "SchedulerState",
    "Stage",
    "StepSetting",
    "SupportChange",
    "SupportScheduler",
    "build_plan",
    "get_method",
    "list_methods",
    "register_method",
    "register_ranking",
    "register_schedule",
]
