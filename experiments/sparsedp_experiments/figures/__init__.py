"""The papers' figures, measured on real data: `python -m sparsedp_experiments.figures.run`, or `make figures`."""
