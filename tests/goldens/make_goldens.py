"""Record the goldens anew: `python -m tests.goldens.make_goldens` in the root. See `test_goldens.py`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))

from golden_doors import ESTIMATOR, FEDERATED, estimator, federated, plans, two_ranks
from golden_runs import arithmetic, cases, run, sketches_agree

FILE = Path(__file__).with_name("goldens.json")


def main() -> None:
    """Do every run and write what it gave; other machines' digests stay if only rounding changed."""
    torch.set_num_threads(1)
    known = json.loads(FILE.read_text()) if FILE.exists() else {"sketches": {}, "digests": {}, "plans": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, dict[str, Any]] = {}
        for number, (case, asked) in enumerate(cases().items()):
            found[case] = run(folder / str(number), asked)
        for number, case in enumerate(FEDERATED):
            found[case] = federated(case, folder / f"clients-{number}")
        for number, case in enumerate(ESTIMATOR):
            found[case] = estimator(case, folder / f"estimator-{number}")
        found |= two_ranks(folder)
    sketches = {case: quantities.pop("sketch") for case, quantities in found.items()}
    before = known["digests"].get(arithmetic(), {})
    for case, quantities in found.items():
        changed = [name for name, digest in quantities.items() if before.get(case, {}).get(name) != digest]
        print(f"{case}: {', '.join(changed) or 'as before'}")  # noqa: T201
    same = all(
        sketches_agree(now, sketches[case]) for case, now in known["sketches"].items() if case in sketches
    )
    digests = {**(known["digests"] if same else {}), arithmetic(): found}
    FILE.write_text(json.dumps({"plans": plans(), "sketches": sketches, "digests": digests}, indent=1) + "\n")


if __name__ == "__main__":
    main()
