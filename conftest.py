"""For all tests: the repository on the path (for `benchmarks`), one thread each, no deadlines, Ctrl-C heard.

Shells start background jobs with SIGINT ignored; the tests of interrupts need it.
"""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # before torch: AMX fails on some machines
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # of processes that tests start: there is one worker for each core

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "sparsedp", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sparsedp")


@pytest.fixture(scope="module")
def checked_once():
    """Checks each kind of model and loss once a module: three quarters of a tiny run, and the same every time."""
    from sparsedp.validation import model as validation

    honest, seen = validation.validate_model, {}

    def validate(model, loss, rows):
        modes = tuple(module.training for module in model.modules())
        held = tuple(repr(cell.cell_contents) for cell in getattr(loss, "__closure__", None) or ())
        key = (repr(model), repr(getattr(loss, "__qualname__", loss)), held, modes)
        if key not in seen:
            seen[key] = honest(model, loss, rows), loss  # kept, or another loss could take its address
        return seen[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "validate_model", validate)
        yield
