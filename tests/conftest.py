"""For all tests: the repository on the path (for `benchmarks`), one thread each, hypothesis without deadlines."""

import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)
settings.register_profile(
    "sparsedp", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sparsedp")
