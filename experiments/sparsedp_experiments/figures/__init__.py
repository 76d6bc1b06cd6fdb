"""The papers' figures, measured on real data: `python -m sparsedp_experiments figures DIR`, or `make figures`."""
