"""Features of a frozen body: what it gives row by row, and what is no function of a row is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import sparsedp
from sparsedp import extract_features
from sparsedp.errors import DataError, ModelError, PrivacyError

GENERATOR = torch.Generator().manual_seed(3)
PICTURES = TensorDataset(torch.randn(40, 3, 6, 6, generator=GENERATOR), torch.arange(40) % 2)


def body() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())


class Centred(nn.Module):
    def forward(self, x):
        return x.flatten(1) - x.flatten(1).mean(0)


class Draws(nn.Module):
    def forward(self, x):
        return x.flatten(1) * torch.rand(len(x), 1)


class Remembers(nn.Module):
    """In a plain attribute: what came before moves what comes next."""

    def __init__(self):
        super().__init__()
        self.seen = 0.0

    def forward(self, x):
        self.seen = self.seen + float(x.sum())
        return x.flatten(1) + self.seen


class Texts(Dataset):
    """Rows of whole numbers."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor([index, 6, 0]), torch.tensor(index)


def test_features_are_what_the_body_gives_in_evaluation_mode_in_the_order_of_the_rows():
    network = body()
    features, targets = extract_features(network, PICTURES, batch_size=7).tensors
    assert network.training
    with torch.no_grad():
        expected = torch.cat([network.eval()(x[None]) for x, _ in PICTURES])
    torch.testing.assert_close(features, expected)
    assert torch.equal(targets, PICTURES.tensors[1])
    assert not features.requires_grad


def test_a_head_on_features_is_that_on_pictures_to_rounding():
    def trained(model, rows):
        torch.manual_seed(0)
        head = nn.Linear(64, 2)
        whole = head if model is None else nn.Sequential(model.eval().requires_grad_(False), head)
        sparsedp.fit(
            whole, rows, nn.CrossEntropyLoss(reduction="none"), method="dp-sgd", epsilon=8.0, delta=1e-3,
            accountant="rdp", epochs=2, batch_size=16, lr=1.0, seed=0, progress=False,
        )  # fmt: skip
        return head.weight.detach()

    expected = trained(body(), PICTURES)
    found = trained(None, extract_features(body(), PICTURES))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_rows_of_whole_numbers_are_looked_up():
    table = nn.EmbeddingBag(7, 4, mode="sum")
    features, _ = extract_features(table, Texts()).tensors
    torch.testing.assert_close(features[2], table.weight[[2, 6, 0]].sum(0).detach())


@pytest.mark.parametrize(
    "part", [Centred(), Draws(), Remembers(), nn.BatchNorm2d(3, track_running_stats=False)]
)
def test_a_body_that_is_no_function_of_a_row_is_refused(part):
    with pytest.raises(ModelError, match="a fixed function of each row"):
        extract_features(part, PICTURES)


def test_a_collate_that_mixes_rows_is_refused():
    def mixed(items):
        inputs = torch.stack([x for x, _ in items])
        return inputs - inputs.mean(0), torch.stack([y for _, y in items])

    with pytest.raises(PrivacyError, match="other rows are in the batch"):
        extract_features(body(), PICTURES, collate_fn=mixed)


def test_what_is_no_pair_of_tensors_is_refused():
    with pytest.raises(DataError, match=r"expected \(input, target\)"):
        extract_features(body(), TensorDataset(PICTURES.tensors[0]))
    with pytest.raises(DataError, match="without rows"):
        extract_features(body(), TensorDataset(torch.zeros(0, 3, 6, 6), torch.zeros(0)))
    with pytest.raises(ModelError, match="one entry a row"):
        extract_features(nn.Flatten(0), PICTURES)
