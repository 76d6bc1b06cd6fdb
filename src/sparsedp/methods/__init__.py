"""The methods table: rankings, schedules, refresh rules and geometries, and the scheduler that runs a row of it."""

from sparsedp.methods.catalog import get_method as get_method
from sparsedp.methods.catalog import list_methods as list_methods
from sparsedp.methods.catalog import register_method as register_method
from sparsedp.methods.method import HEAD as HEAD
from sparsedp.methods.method import MAIN as MAIN
from sparsedp.methods.method import SELECT as SELECT
from sparsedp.methods.method import WARM_UP as WARM_UP
from sparsedp.methods.method import GeometryRule as GeometryRule
from sparsedp.methods.method import Method as Method
from sparsedp.methods.method import OffSupport as OffSupport
from sparsedp.methods.plan_config import PlanConfig as PlanConfig
from sparsedp.methods.plan_config import build_plan as build_plan
from sparsedp.methods.public_scores import Knowledge as Knowledge
from sparsedp.methods.public_scores import PublicScores as PublicScores
from sparsedp.methods.ranking import Granularity as Granularity
from sparsedp.methods.schedules import EverySteps as EverySteps
from sparsedp.methods.schedules import Refresh as Refresh
from sparsedp.methods.scores import Given as Given
from sparsedp.methods.scores import Ranking as Ranking
from sparsedp.methods.scores import register_ranking as register_ranking
from sparsedp.methods.support_scheduler import SchedulerState as SchedulerState
from sparsedp.methods.support_scheduler import StepSetting as StepSetting
from sparsedp.methods.support_scheduler import SupportChange as SupportChange
from sparsedp.methods.support_scheduler import SupportScheduler as SupportScheduler
