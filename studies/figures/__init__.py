"""The papers' figures, measured on real data: `python -m studies.figures.run`, or `make figures`."""
