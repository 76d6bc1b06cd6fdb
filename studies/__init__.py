"""Studies: what the records of the experiments say. Not shipped with the library; see docs/results.md."""
