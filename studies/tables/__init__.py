"""From records to docs/results.md: tables, figures, verdicts. `python -m studies.tables` makes all of it anew."""
