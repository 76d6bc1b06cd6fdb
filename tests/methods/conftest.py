"""Puts tests/oracles on the path: the independent NumPy implementations are no part of the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
