"""The loops of Opacus's examples (mnist, char-lstm, imdb, cifar10), by Opacus and by sparsedp, on small data.

Run: python examples/opacus_ports.py [--epochs 3] [--examples 2000] [port ...]

Models and data have the shape of those examples. The data is small and comes with scikit-learn or is made up, so the
accuracies say only that both train alike. The noise multiplier is given, so epsilon is what comes out. Both are
seeded to be compared; leave `seed` out to train a model that may be published.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import sparsedp

NOISE, DELTA = 1.0, 1e-5


class Letters(nn.Module):
    """Which language a name is from, as in char-lstm: characters, an LSTM, its last output."""

    def __init__(self, lstm: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.rnn = lstm(16, 32, batch_first=True)
        self.out = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the languages."""
        return self.out(self.rnn(self.embedding(x))[0][:, -1])


class Words(nn.Module):
    """Whether a review is good, as in imdb: the mean of its words' vectors, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(500, 16)
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of bad and good."""
        return self.fc2(F.relu(self.fc1(self.emb(x).mean(1))))


def small_net() -> nn.Module:
    """The convolutions of mnist, for pictures of 28 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def grouped_net() -> nn.Module:
    """A small network of cifar10's kind, GroupNorm in the place of BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def pictures(count: int, channels: int, size: int) -> TensorDataset:
    """The digits of scikit-learn, blown up."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images[:count], dtype=torch.float32).div_(8).sub_(1).unsqueeze(1)
    images = F.interpolate(images, size=size, mode="bilinear").expand(-1, channels, -1, -1).contiguous()
    return TensorDataset(images, torch.tensor(found.target[:count]))


def sequences(count: int, tokens: int, length: int, classes: int) -> TensorDataset:
    """Made-up texts: each class has tokens that it prefers."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, classes, (count,), generator=generator)
    favoured = targets.unsqueeze(1) * (tokens // classes) + torch.randint(
        0, tokens // classes, (count, length), generator=generator
    )
    anything = torch.randint(0, tokens, (count, length), generator=generator)
    chosen = torch.rand(count, length, generator=generator) < 0.6
    return TensorDataset(torch.where(chosen, favoured, anything), targets)


@dataclass(frozen=True)
class Port:
    """One example: its data, its model (Opacus needs LSTMs of its own), its optimizer."""

    data: Callable[[int], TensorDataset]
    model: Callable[[bool], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int
    max_grad_norm: float


def _lstm(for_opacus: bool) -> type[nn.Module]:
    if for_opacus:
        from opacus.layers import DPLSTM

        return DPLSTM  # type: ignore[no-any-return]
    return nn.LSTM


PORTS = {
    "mnist": Port(
        lambda n: pictures(n, 1, 28),
        lambda _: small_net(),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
        64,
        1.0,
    ),
    "char-lstm": Port(
        lambda n: sequences(n, 30, 12, 3),
        lambda opacus: Letters(_lstm(opacus)),
        lambda m: torch.optim.SGD(m.parameters(), lr=2.0),
        100,
        1.5,
    ),
    "imdb": Port(
        lambda n: sequences(n, 500, 64, 2),
        lambda _: Words(),
        lambda m: torch.optim.Adam(m.parameters(), lr=0.02),
        64,
        1.0,
    ),
    "cifar10": Port(
        lambda n: pictures(n, 3, 32),
        lambda _: grouped_net(),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=0.002),
        64,
        1.2,
    ),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, criterion: Any, epochs: int
) -> None:
    """The loop of the examples, the same for both: what Opacus's log of it is gone."""
    for _ in range(epochs):
        for data, target in loader:
            optimizer.zero_grad()
            output = model(data)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """As the examples test."""
    model.eval()
    with torch.no_grad():
        x, y = test[:]
        return float((model(x).argmax(1) == y).float().mean())


def by_opacus(
    port: Port, train_set: Dataset[Any], test_set: TensorDataset, epochs: int, seed: int
) -> tuple[float, float]:
    from opacus import PrivacyEngine

    model = port.model(True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=port.optimizer(model),
        data_loader=DataLoader(train_set, batch_size=port.batch_size),
        noise_multiplier=NOISE,
        max_grad_norm=port.max_grad_norm,
    )
    train(model, optimizer, loader, nn.CrossEntropyLoss(), epochs)
    return accuracy(model, test_set), engine.get_epsilon(DELTA)


def by_sparsedp(
    port: Port, train_set: Dataset[Any], test_set: TensorDataset, epochs: int, seed: int
) -> tuple[float, float]:
    model = port.model(False)
    private = sparsedp.make_private(
        model,
        port.optimizer(model),
        DataLoader(train_set, batch_size=port.batch_size),
        nn.CrossEntropyLoss(),
        method="dp-sgd",
        noise_multiplier=NOISE,
        delta=DELTA,
        epochs=epochs,
        max_grad_norm=port.max_grad_norm,
        seed=seed,
    )
    train(*private, epochs)
    return accuracy(private.model, test_set), private.epsilon()


DOORS = {"Opacus": by_opacus, "sparsedp": by_sparsedp}


def run(name: str, door: str, epochs: int, examples: int, seed: int = 0) -> tuple[float, float, float]:
    """Accuracy, epsilon and seconds."""
    port = PORTS[name]
    torch.manual_seed(seed)
    data = port.data(examples)
    held_out = len(data) // 5
    train_set, test_set = random_split(data, [len(data) - held_out, held_out])
    start = time.perf_counter()
    found, epsilon = DOORS[door](port, train_set, TensorDataset(*test_set[:]), epochs, seed)
    return found, epsilon, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", nargs="*", default=list(PORTS))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--examples", type=int, default=2000)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus's
    for name in asked.ports:
        for door in DOORS:
            found, epsilon, seconds = run(name, door, asked.epochs, asked.examples)
            print(f"{name:10} {door:9} accuracy {found:.3f}  epsilon {epsilon:.3f}  {seconds:.1f} s")


if __name__ == "__main__":
    main()
