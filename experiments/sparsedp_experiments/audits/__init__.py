"""What attacks show of honest code beside the claim: records in `results/audit`, a table in `docs/audit.md`."""
