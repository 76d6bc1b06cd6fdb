"""The model check finds what per-sample clipping cannot protect, names it, and leaves everything as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsedp.batch import from_criterion
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.validation.model import validate_model

LOSS = from_criterion(nn.CrossEntropyLoss(reduction="none"))


class Written(nn.Module):
    """A module out of a function of itself and the input."""

    def __init__(self, forward):
        super().__init__()
        self.of_input = forward

    def forward(self, x):
        return self.of_input(self, x)


class SubtractBatchMean(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class MixesByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(48, 3)

    def forward(self, x):
        logits = self.linear(x.flatten(1))
        return logits + 0.1 * logits.roll(1, dims=0)


class RemembersData(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return x


class RemembersInAFrozenParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(3, 1, 1), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.centre.copy_(x.mean((0, 2, 3)).reshape(3, 1, 1))
        return x


def only_in_training(module, x):
    return F.dropout(x - x.mean(0, keepdim=True) if module.training else x, 0.1, module.training)


class MixesBehindAZeroBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(48, 48)
        self.head = nn.Linear(48, 3)
        nn.init.zeros_(self.branch.weight)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x + self.branch(x.mean(0).expand_as(x)))


class RenamedEmbedding(nn.Embedding):
    pass


def rows(count=6):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, 4, 4, generator=generator), torch.randint(
        0, 3, (count,), generator=generator
    )


def head(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 3))


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        (head(nn.BatchNorm2d(3)), "module '0' (BatchNorm2d)"),
        (head(nn.BatchNorm2d(3, track_running_stats=False).eval()), "module '0' (BatchNorm2d)"),
        (head(SubtractBatchMean()), "module '0' (SubtractBatchMean)"),
        (nn.Sequential(head(nn.Tanh()), SubtractBatchMean()), "module '1' (SubtractBatchMean)"),
        (MixesByHand(), "the model itself (MixesByHand)"),
        (head(Written(only_in_training)), "module '0' (Written)"),
        (MixesBehindAZeroBranch(), "module 'branch' (Linear) mixes examples, or is handed mixed ones"),
        (head(Written(lambda m, x: x / x.shape[0])), "module '0' (Written)"),
    ],
    ids=[
        "batch norm",
        "batch norm without memory",
        "batch mean",
        "batch mean last",
        "by hand",
        "only in training, behind dropout",
        "behind a branch that starts at zero",
        "by the number of rows",
    ],
)
def test_a_model_that_mixes_examples_is_refused_by_name_and_with_a_remedy(model, culprit):
    with pytest.raises(ModelError) as refused:
        validate_model(model, LOSS, rows())
    assert culprit in str(refused.value)
    assert "GroupNorm" in str(refused.value)


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        (head(nn.InstanceNorm2d(3, track_running_stats=True)), "'0.running_mean'"),
        (head(RemembersData()), "'0.largest'"),
        (head(RemembersInAFrozenParameter()), "'0.centre'"),
    ],
    ids=["running statistics", "hand-written", "frozen parameter"],
)
def test_a_module_that_writes_to_its_state_is_refused_and_the_state_put_back(model, culprit):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=culprit):
        validate_model(model, LOSS, rows())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, RenamedEmbedding])
def test_an_embedding_that_rewrites_its_rows_is_refused_whatever_its_class(kind, frozen):
    embedding = kind(10, 4, max_norm=1.0)
    embedding.weight.requires_grad_(not frozen)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(12, 3))
    before = embedding.weight.detach().clone()
    with pytest.raises(ModelError, match="max_norm"):
        validate_model(model, LOSS, (torch.randint(0, 10, (6, 3)), torch.randint(0, 3, (6,))))
    assert torch.equal(embedding.weight, before)


@pytest.mark.parametrize(
    "model",
    [
        head(nn.GroupNorm(3, 3)),
        head(nn.InstanceNorm2d(3, affine=True)),
        head(nn.Dropout(0.5)),
        head(Written(lambda m, x: F.dropout(x, 0.5, m.training))),
        head(nn.BatchNorm2d(3).eval()),
    ],
    ids=["group norm", "instance norm", "dropout", "functional dropout", "frozen batch norm"],
)
def test_a_sound_model_passes_and_is_left_as_it_was(model):
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    validate_model(model, LOSS, rows())
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(not module._forward_hooks for module in model.modules())


def test_a_loss_that_mixes_examples_is_refused():
    def centred(logits, targets):
        losses = F.cross_entropy(logits, targets, reduction="none")
        return losses - losses.mean()

    with pytest.raises(ModelError, match="the loss mixes examples"):
        validate_model(head(), from_criterion(centred), rows())


def test_a_scalar_loss_is_refused_with_the_fix():
    with pytest.raises(SparseDPError, match='reduction="none"'):
        validate_model(head(), from_criterion(nn.CrossEntropyLoss()), rows())


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ModelError, match="no trainable parameters"):
        validate_model(head().requires_grad_(False), LOSS, rows())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_refused(value):
    model = head()
    with torch.no_grad():
        model[1].weight[0, 0] = value
    with pytest.raises(ModelError, match=r"'1\.weight' holds NaN or infinite"):
        validate_model(model, LOSS, rows())


def test_a_sample_whose_output_is_not_finite_is_no_reason_to_refuse():
    inputs, targets = rows()
    inputs[2] = float("nan")
    validate_model(head(nn.Tanh()), LOSS, (inputs, targets))
