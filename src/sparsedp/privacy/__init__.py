"""The privacy boundary: the mechanism and what it releases, the plan, the ledger, the accountants.

Nothing here imports PyTorch or `dp_accounting`: the mechanism (`sparsedp.privacy.mechanism`) needs the first, and the
accountants load the second when they are asked something.
"""

from sparsedp.privacy.accounting import (
    ACCOUNTANTS,
    Accountant,
    accountant,
    epsilon_by_epoch,
    plan_accountant,
    plan_epsilon,
)
from sparsedp.privacy.calibration import BudgetSplit, EqualNoise, NominalSplit, RdpFilter, calibrate
from sparsedp.privacy.charge import Charge, ChargeLog
from sparsedp.privacy.ledger import Ledger
from sparsedp.privacy.normalization import PrivateNormalisation
from sparsedp.privacy.plan import Phase, Plan, PriorSpending

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "BudgetSplit",
    "Charge",
    "ChargeLog",
    "EqualNoise",
    "Ledger",
    "NominalSplit",
    "Phase",
    "Plan",
    "PriorSpending",
    "PrivateNormalisation",
    "RdpFilter",
    "accountant",
    "calibrate",
    "epsilon_by_epoch",
    "plan_accountant",
    "plan_epsilon",
]
