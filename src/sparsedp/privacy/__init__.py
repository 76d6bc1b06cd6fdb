"""The privacy boundary: the mechanism and what it releases, the plan, the ledger, the accountants.

Nothing here imports PyTorch or `dp_accounting`: the mechanism (`sparsedp.privacy.mechanism`) needs the first, and the
accountants load the second when they are asked something.
"""

from sparsedp.privacy.accounting import ACCOUNTANTS as ACCOUNTANTS
from sparsedp.privacy.accounting import accountant as accountant
from sparsedp.privacy.accounting import epsilon_by_epoch as epsilon_by_epoch
from sparsedp.privacy.accounting import plan_epsilon as plan_epsilon
from sparsedp.privacy.calibration import EqualNoise as EqualNoise
from sparsedp.privacy.calibration import NominalSplit as NominalSplit
from sparsedp.privacy.calibration import RdpFilter as RdpFilter
from sparsedp.privacy.calibration import calibrate as calibrate
from sparsedp.privacy.charge import Charge as Charge
from sparsedp.privacy.charge import ChargeLog as ChargeLog
from sparsedp.privacy.ledger import Ledger as Ledger
from sparsedp.privacy.normalization import PrivateNormalisation as PrivateNormalisation
from sparsedp.privacy.plan import Phase as Phase
from sparsedp.privacy.plan import Plan as Plan
from sparsedp.privacy.plan import PriorSpending as PriorSpending
