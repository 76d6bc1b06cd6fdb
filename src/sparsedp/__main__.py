"""The entry point: `sparsedp`, `python -m sparsedp`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C before there is anything to stop ends it without a word."""
    try:
        from sparsedp import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
