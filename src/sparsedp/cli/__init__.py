"""The command line. `sparsedp --help` shows it; torch is loaded only by commands that need it."""

import sys

__all__ = ["main"]


def main() -> None:
    """The entry point: Ctrl-C before there is anything to stop ends it without a word."""
    try:
        from sparsedp.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
