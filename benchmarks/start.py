"""How long a user waits before the first step, by `make_private` and by Opacus: imports, plan and checks.

Run: python -m benchmarks.start [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

_BEFORE = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(2000, 20)
data = TensorDataset(x, (x[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=64)
start = time.perf_counter()
"""
CODE = {
    "sparsedp": """
import sparsedp
sparsedp.make_private(
    model, optimizer, loader, nn.CrossEntropyLoss(), epsilon=3, delta=1e-5, epochs=2, method="dp-sgd"
)
""",
    "Opacus": """
import warnings
warnings.simplefilter("ignore")
from opacus import PrivacyEngine
PrivacyEngine().make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, target_epsilon=3, target_delta=1e-5, epochs=2,
    max_grad_norm=1.0,
)
""",
}


def seconds(code: str) -> float:
    """From the user's model and loader to a loop that can take its first step."""
    whole = f"{_BEFORE}{code}\nprint(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    found = {name: [] for name in CODE}
    for _ in range(repeats):
        for name, code in CODE.items():
            found[name].append(seconds(code))
    for name, values in found.items():
        print(f"{name:9} median {statistics.median(values):.2f} s  least {min(values):.2f} s")


if __name__ == "__main__":
    main()
