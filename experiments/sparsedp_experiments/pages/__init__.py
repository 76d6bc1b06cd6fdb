"""From records to pages: tables and verdicts. `python -m sparsedp_experiments.pages` makes them anew."""
