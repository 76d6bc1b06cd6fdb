"""The privacy boundary: the mechanism and what it releases, the plan, the ledger, the accountants."""
