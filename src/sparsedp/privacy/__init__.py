"""The privacy boundary: the mechanism and what it releases, the plan, the ledger, the accountants.

Nothing here imports PyTorch or `dp_accounting`: the mechanism (`sparsedp.privacy.mechanism`) needs the first, and the
accountants load the second when they are asked something.
"""

from sparsedp.privacy.accountants import (
    ACCOUNTANTS,
    Accountant,
    accountant,
    accountant_for,
    epsilon_by_epoch,
    plan_epsilon,
)
from sparsedp.privacy.calibrate import BudgetSplit, EqualNoise, NominalSplit, calibrate
from sparsedp.privacy.filters import RdpFilter
from sparsedp.privacy.ledger import Charge, Ledger, MemoryLedger, RunLedger
from sparsedp.privacy.normalisation import PrivateNormalisation
from sparsedp.privacy.plan import Continuation, Phase, Plan
from sparsedp.privacy.summary import PlanSummary, guarantee, summarize

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "BudgetSplit",
    "Charge",
    "Continuation",
    "EqualNoise",
    "Ledger",
    "MemoryLedger",
    "NominalSplit",
    "Phase",
    "Plan",
    "PlanSummary",
    "PrivateNormalisation",
    "RdpFilter",
    "RunLedger",
    "accountant",
    "accountant_for",
    "calibrate",
    "epsilon_by_epoch",
    "guarantee",
    "plan_epsilon",
    "summarize",
]
