"""Held-out numbers do not depend on how rows come, and evaluation leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from sparsedp.batch import from_criterion
from sparsedp.errors import DataError
from sparsedp.evaluation import evaluation_mode, held_out, threshold_of
from sparsedp.optimizers.ema import WeightAverage
from sparsedp.parameters import ParameterLayout, Support

per_row = nn.CrossEntropyLoss(reduction="none")


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set with nothing but items."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


@pytest.mark.parametrize("kind", [TensorDataset, Rows])
def test_the_mean_loss_and_accuracy_do_not_depend_on_how_rows_are_batched(kind: type) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(37, 5), torch.randint(0, 3, (37,))
    model = nn.Linear(5, 3)
    found = held_out(kind(inputs, targets), from_criterion(per_row), batch_size=8)(model)
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(per_row(model(inputs), targets).double().mean()))
    assert found["accuracy"] == float((model(inputs).argmax(1) == targets).sum()) / 37


def test_an_empty_evaluation_set_is_refused() -> None:
    with pytest.raises(DataError, match="eval_dataset is empty"):
        held_out(TensorDataset(torch.empty(0, 2)), from_criterion(per_row))


class Warm(nn.Module):
    """A classifier with a temperature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 3.0
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def warm_loss(model: Warm, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    assert isinstance(model, Warm)
    return per_row(model(rows[0]) / model.temperature, rows[1])


def test_the_loss_sees_the_model_itself_and_nothing_stays_behind() -> None:
    torch.manual_seed(0)
    data, model = TensorDataset(torch.randn(37, 5), torch.randint(0, 3, (37,))), Warm()
    found = held_out(data, warm_loss, batch_size=8)(model)
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(warm_loss(model, data.tensors).double().mean()))
        assert found["accuracy"] == float((model(data.tensors[0]).argmax(1) == data.tensors[1]).sum()) / 37
    assert not model._forward_hooks


def test_a_loss_that_calls_only_parts_of_the_model_is_all_that_is_told() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(37, 5), torch.randint(0, 3, (37,)))
    found = held_out(data, lambda model, rows: per_row(model.head(model.body(rows[0])), rows[1]))(Warm())
    assert set(found) == {"loss"}


@pytest.mark.parametrize(
    ("last", "criterion"),
    [
        (nn.Sigmoid(), nn.BCELoss(reduction="none")),
        (nn.Identity(), nn.BCEWithLogitsLoss(reduction="none")),
        (nn.Identity(), nn.MSELoss(reduction="none")),
    ],
)
def test_one_output_is_read_as_the_loss_reads_it(last: nn.Module, criterion: nn.Module) -> None:
    """All decide alike: outputs are logits, their probabilities, or targets to be met."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 5), torch.randint(0, 2, (40, 1)).float()
    model = nn.Sequential(nn.Linear(5, 1), last)
    with torch.no_grad():
        raw = model[0](inputs)
    cut = 0.5 if isinstance(criterion, nn.MSELoss) else 0.0
    found = held_out(
        TensorDataset(inputs, targets), from_criterion(criterion), threshold=threshold_of(criterion)
    )(model)
    assert found["accuracy"] == float(((raw > cut) == (targets == 1)).double().mean())


def test_evaluation_switches_dropout_off_and_puts_every_mode_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    model[2].eval()
    before = [module.training for module in model.modules()]
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(1, 3)).requires_grad
    assert [module.training for module in model.modules()] == before


def test_the_average_follows_its_recursion_and_the_model_gets_its_own_weights_back() -> None:
    model = nn.Linear(2, 1, bias=False)
    average = WeightAverage(model, ParameterLayout.of(model), decay=0.5)
    average.follow(Support.full(2))
    expected = model.weight.detach().clone()
    for update in range(12):
        with torch.no_grad():
            model.weight.fill_(float(update))
        average.update()
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * update
    raw = model.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, raw)
    average.install()
    torch.testing.assert_close(model.weight.detach(), expected)


def test_an_average_on_growing_supports_equals_the_dense_one_to_the_bit() -> None:
    torch.manual_seed(0)
    model, twin = nn.Embedding(6, 2), nn.Embedding(6, 2)
    twin.load_state_dict(model.state_dict())
    sparse, dense = (WeightAverage(m, ParameterLayout.of(m), decay=0.9) for m in (model, twin))
    dense.follow(Support.full(12))
    for support in (Support([2, 3], 12), Support([2, 3], 12), Support([3, 4, 5, 10], 12), Support([0], 12)):
        sparse.follow(support)
        with torch.no_grad():
            for m in (model, twin):
                m.weight.view(-1)[support.indices] += 0.3
        sparse.update()
        dense.update()
    assert sum(t.numel() for t in sparse._weights.values()) == 6
    resumed = WeightAverage(model, ParameterLayout.of(model), decay=0.9)
    resumed.restore(sparse.state())
    for average, m in ((sparse, model), (resumed, model), (dense, twin)):
        with average.in_place():
            assert m.weight.shape == (6, 2)
            found = m.weight.detach().clone()
        assert torch.equal(found, dense.state().weights["weight"])
