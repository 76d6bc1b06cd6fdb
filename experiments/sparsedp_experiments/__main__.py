"""`python -m sparsedp_experiments`."""

from sparsedp_experiments.runs.cli import main

if __name__ == "__main__":
    main()
