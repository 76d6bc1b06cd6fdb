"""Record the goldens anew: `python -m tests.goldens.make_goldens` in the root. See `test_goldens.py`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from golden_runs import FILE, arithmetic, cases, digests


def main() -> None:
    """Train every method on every model and write what it gave."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            f"{method}, {model}": digests(method, model, Path(folder) / f"{method}-{model}")
            for method, model in cases()
        }
    before = json.loads(FILE.read_text())["runs"] if FILE.exists() else {}
    for name, found in runs.items():
        changed = [
            quantity for quantity, digest in found.items() if before.get(name, {}).get(quantity) != digest
        ]
        print(f"{name}: {', '.join(changed) or 'as before'}")  # noqa: T201
    FILE.write_text(json.dumps({"arithmetic": arithmetic(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
