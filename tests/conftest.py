"""For all tests: the repository on the path (for `benchmarks`), one thread each, no deadlines, Ctrl-C heard.

Shells start background jobs with SIGINT ignored; the tests of interrupts need it.
"""

import signal
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "sparsedp", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sparsedp")
