"""Held-out numbers: right however rows come, without a trace, and never of the training rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from runs import loss_fn, network, rows
from sparsedp import fit
from sparsedp.batch import from_criterion
from sparsedp.errors import PrivacyError
from sparsedp.evaluation import classification_metrics, held_out, threshold_of

pytestmark = pytest.mark.usefixtures("checked_once")


class Items(Dataset[tuple[Tensor, Tensor]]):
    """A data set with nothing but items."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Warm(nn.Module):
    """A classifier with a temperature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 3.0
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def warm_loss(model: Warm, batch: tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(model, Warm)
    return loss_fn(model(batch[0]) / model.temperature, batch[1])


@pytest.mark.parametrize("kind", [TensorDataset, Items])
@pytest.mark.parametrize("loss", [from_criterion(loss_fn), warm_loss])
def test_held_out_numbers_do_not_depend_on_how_rows_are_batched_and_leave_nothing_behind(
    kind: type, loss: Any
) -> None:
    torch.manual_seed(0)
    inputs, targets, model = torch.randn(37, 5), torch.randint(0, 3, (37,)), Warm()
    found = held_out(kind(inputs, targets), loss, batch_size=8)(model)
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(loss(model, (inputs, targets)).double().mean()))
        assert found["accuracy"] == float((model(inputs).argmax(1) == targets).sum()) / 37
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("last", "criterion"),
    [
        (nn.Sigmoid(), nn.BCELoss(reduction="none")),
        (nn.Identity(), nn.BCEWithLogitsLoss(reduction="none")),
        (nn.Identity(), nn.MSELoss(reduction="none")),
    ],
)
def test_held_out_reads_one_output_as_the_loss_reads_it(last: nn.Module, criterion: nn.Module) -> None:
    """All decide alike: outputs are logits, their probabilities, or targets to be met."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 5), torch.randint(0, 2, (40, 1)).float()
    model = nn.Sequential(nn.Linear(5, 1), last)
    with torch.no_grad():
        raw = model[0](inputs)
    cut = 0.5 if isinstance(criterion, nn.MSELoss) else 0.0
    data = TensorDataset(inputs, targets)
    found = held_out(data, from_criterion(criterion), threshold=threshold_of(criterion))(model)
    assert found["accuracy"] == float(((raw > cut) == (targets == 1)).double().mean())


@pytest.mark.parametrize("levels", [100_000, 7])
@pytest.mark.parametrize("form", ["two logits", "one logit", "one column"])
def test_classification_metrics_count_right_ties_included(form: str, levels: int) -> None:
    """To 1e-12 of counting by hand; with few levels many scores are tied."""
    generator = torch.Generator().manual_seed(levels)
    targets = (torch.rand(300, generator=generator) < 0.3).long()
    raw = torch.rand(300, generator=generator, dtype=torch.float64) - 0.6 + 0.3 * targets
    scores = torch.floor(levels * raw) / levels
    outputs = {
        "two logits": torch.stack([-scores / 2, scores / 2], dim=1),
        "one logit": scores,
        "one column": scores.unsqueeze(1),
    }[form]
    found = classification_metrics(outputs, targets if form == "two logits" else targets.double())
    hits = [(int(scores[i] > 0), int(targets[i])) for i in range(len(targets))]
    sensitivity = hits.count((1, 1)) / int(targets.sum())
    specificity = hits.count((0, 0)) / int((1 - targets).sum())
    apart = scores[targets == 1][:, None] - scores[targets == 0][None, :]
    wanted = {
        "accuracy": (hits.count((1, 1)) + hits.count((0, 0))) / len(hits),
        "auc": float((apart > 0).sum() + (apart == 0).sum() / 2) / apart.numel(),
        "balanced_accuracy": (sensitivity + specificity) / 2,
        "sensitivity": sensitivity,
        "specificity": specificity,
    }
    assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("target", [0, 1])
def test_classification_metrics_of_one_class_alone_are_the_accuracy(target: int) -> None:
    found = classification_metrics(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([target, target]))
    assert found == {"accuracy": 0.5}


INPUTS, TARGETS = rows(1, 40).tensors
DATA = TensorDataset(INPUTS, TARGETS)


def part(span: slice) -> TensorDataset:
    return TensorDataset(INPUTS[span], TARGETS[span])


DOUBLE = INPUTS.double()
WIDE, NARROW = INPUTS.double().numpy(), TARGETS.numpy().astype(np.int32)
FRAME, SERIES = pd.DataFrame(WIDE), pd.Series(NARROW)
COLUMNS = np.asfortranarray(WIDE)


def over(X: Any) -> tuple[Any, Any]:
    """Some rows with targets of their own."""
    return X, np.zeros(len(X), dtype=np.int64)


OVERLAPPING: dict[str, tuple[Any, Any]] = {
    "a data set": (DATA, DATA),
    "the same tensors": (DATA, TensorDataset(INPUTS, TARGETS)),
    "copied targets": (DATA, TensorDataset(INPUTS, TARGETS.clone())),
    "one row": (part(slice(21)), part(slice(20, None))),
    "a part of a data set": (DATA, Subset(DATA, range(3))),
    "parts that share a row": (Subset(DATA, range(21)), Subset(DATA, range(20, 40))),
    "a part of a part": (Subset(DATA, range(10, 20)), Subset(Subset(DATA, range(15, 40)), [4])),
    "a part of the same tensors": (Subset(DATA, range(10)), part(slice(9, 12))),
    "the same arrays": ((WIDE, NARROW), (WIDE, NARROW)),
    "the same inputs": (over(WIDE), over(WIDE)),
    "the same targets": ((WIDE, NARROW), (WIDE.copy(), NARROW)),
    "a view": (over(WIDE), over(WIDE[3:5])),
    "some columns, by number": (over(COLUMNS), over(COLUMNS[9:12])),
    "a frame": (over(FRAME), over(FRAME)),
    "a part of a frame": (over(FRAME), over(FRAME[3:5])),
    "the array below a frame": (over(FRAME), over(FRAME.to_numpy()[:4])),
    "a series": ((WIDE, SERIES), (WIDE[7:].copy(), SERIES[7:])),
    "double tensors": (over(DOUBLE), over(DOUBLE)),
    "a tensor over an array": (over(WIDE), over(torch.from_numpy(WIDE)[30:])),
    "a data set over an array": (over(WIDE), TensorDataset(torch.from_numpy(WIDE)[1:2])),
    "loaders": (DataLoader(over(WIDE), 4), DataLoader(over(WIDE), 4)),  # type: ignore[arg-type]
}
APART: dict[str, tuple[Any, Any]] = {
    "other tensors": (DATA, rows(7, 30)),
    "the two ends of tensors": (part(slice(20)), part(slice(20, None))),
    "every other row of tensors": (part(slice(0, None, 2)), part(slice(1, None, 2))),
    "parts": (Subset(DATA, range(20)), Subset(DATA, range(20, 40))),
    "the two ends": (over(WIDE[:20]), over(WIDE[20:])),
    "every other row": (over(WIDE[::2]), over(WIDE[1::2])),
    "every other row, stored by column": (over(COLUMNS[::2]), over(COLUMNS[1::2])),
    "the two ends of a frame": (over(FRAME[:20]), over(FRAME[20:])),
    "the two ends, backwards": (over(WIDE[19::-1]), over(WIDE[:19:-1])),
    "a constant target": (
        (WIDE[:20], np.broadcast_to(NARROW[:1], 20)),
        (WIDE[20:], np.broadcast_to(NARROW[:1], 20)),
    ),
}


def trained(train: Any, held_out: Any, **more: object) -> Any:
    return fit(
        network(), train, loss_fn, method="dp-sgd", epsilon=8, delta=1e-3, epochs=1, accountant="rdp",
        batch_size=8, progress=False, eval_dataset=held_out, **more,
    )  # fmt: skip


@pytest.mark.parametrize("case", OVERLAPPING)
def test_fit_refuses_training_rows_for_evaluation_as_they_were_given_and_writes_nothing(
    case: str, tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match="eval_dataset holds rows of train_dataset"):
        trained(*OVERLAPPING[case], run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", APART)
def test_fit_takes_rows_that_are_apart_for_evaluation(case: str) -> None:
    assert trained(*APART[case]).metrics["loss"] > 0
