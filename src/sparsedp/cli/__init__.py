"""The command line. `sparsedp --help` shows it; torch is loaded only by commands that need it."""

from sparsedp.cli.app import main

__all__ = ["main"]
