"""The commands that train, sweep and compare: `python -m sparsedp_experiments ...`."""
