"""`python -m sparsedp_experiments`."""

from sparsedp_experiments.cli.app import main

if __name__ == "__main__":
    main()
