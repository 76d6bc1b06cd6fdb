"""Audits: attacks on a plan, a model and a data set that give a lower bound on epsilon.

The package is not called `audit`, since that is the function users call: `sparsedp.audit(...)`.
"""

from __future__ import annotations

from sparsedp.auditing.audit import audit
from sparsedp.auditing.result import AuditResult

__all__ = ["AuditResult", "audit"]
