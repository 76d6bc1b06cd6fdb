"""Audits: attacks on a plan, a model and a data set that give a lower bound on epsilon.

The package is not called `audit`, since that is the function users call: `sparsedp.audit(...)`.
"""

from __future__ import annotations

from sparsedp.auditing.model import Training
from sparsedp.auditing.result import AuditResult
from sparsedp.auditing.run import audit

__all__ = ["AuditResult", "Training", "audit"]
