"""The model check finds what per-sample clipping cannot protect, names it, and leaves everything as it was."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import FlatClip
from sparsedp.errors import ModelError, SparseDPError
from sparsedp.grad_sample import ENGINES, ClippedSumQuery, make_engine
from sparsedp.parameters import Support
from sparsedp.validation.model import validate_model

LOSS = from_criterion(nn.CrossEntropyLoss(reduction="none"))


class Written(nn.Module):
    """A module out of a function of itself and the input; `kept` is state of its own."""

    def __init__(self, forward):
        super().__init__()
        self.of_input, self.branch = forward, nn.Linear(4, 4)
        self.kept = nn.Parameter(torch.zeros(3, 4, 4), requires_grad=False)
        self.register_buffer("largest", torch.zeros(()))
        nn.init.zeros_(self.branch.weight)

    def forward(self, x):
        return self.of_input(self, x)


class RenamedEmbedding(nn.Embedding):
    pass


def remembering(module, x):
    module.largest.copy_(torch.maximum(module.largest, x.detach().max()))
    return x


def in_a_frozen_parameter(module, x):
    with torch.no_grad():
        module.kept.copy_(x.mean(0))
    return x


def only_in_training(module, x):
    return F.dropout(x - x.mean(0, keepdim=True) if module.training else x, 0.1, module.training)


def rows(count=6):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, 4, 4, generator=generator), torch.arange(count) % 3


def head(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 3))


MIXING = {
    "batch norm": (head(nn.BatchNorm2d(3)), "'0' (BatchNorm2d)"),
    "batch norm without memory": (
        head(nn.BatchNorm2d(3, track_running_stats=False).eval()),
        "'0' (BatchNorm2d)",
    ),
    "batch mean": (head(Written(lambda m, x: x - x.mean(0))), "'0' (Written)"),
    "batch mean last": (nn.Sequential(head(nn.Tanh()), Written(lambda m, x: x - x.mean(0))), "'1' (Written)"),
    "by hand": (head(Written(lambda m, x: x + 0.1 * x.roll(1, dims=0))), "'0' (Written)"),
    "only in training, behind dropout": (head(Written(only_in_training)), "'0' (Written)"),
    "behind a branch that starts at zero": (
        head(Written(lambda m, x: x + m.branch(x.mean(0).expand_as(x)))),
        "'0.branch' (Linear) mixes examples, or is handed mixed ones",
    ),
    "by the number of rows": (head(Written(lambda m, x: x / x.shape[0])), "'0' (Written)"),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_examples_is_refused_by_name_and_with_a_remedy(name):
    model, culprit = MIXING[name]
    with pytest.raises(ModelError) as refused:
        validate_model(model, LOSS, rows())
    assert f"module {culprit}" in str(refused.value)
    assert "GroupNorm" in str(refused.value)


def words(kind, trained):
    embedding = kind(10, 4, max_norm=1.0).requires_grad_(trained)
    return nn.Sequential(embedding, nn.Flatten(), nn.Linear(12, 3))


WORDS = torch.randint(0, 10, (6, 3)), torch.randint(0, 3, (6,))
WRITING = [
    (head(nn.InstanceNorm2d(3, track_running_stats=True)), rows(), "'0.running_mean'"),
    (head(Written(remembering)), rows(), "'0.largest'"),
    (head(Written(in_a_frozen_parameter)), rows(), "'0.kept'"),
    *(
        (words(kind, how), WORDS, "max_norm")
        for kind in (nn.Embedding, RenamedEmbedding)
        for how in (True, False)
    ),
]


@pytest.mark.parametrize(("model", "inputs", "culprit"), WRITING)
def test_a_module_that_writes_to_its_state_is_refused_and_the_state_put_back(model, inputs, culprit):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=culprit):
        validate_model(model, LOSS, inputs)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


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


def centred(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses - losses.mean()


def spoilt(value):
    model = head()
    with torch.no_grad():
        model[1].weight[0, 0] = value
    return model


@pytest.mark.parametrize(
    ("model", "criterion", "complaint"),
    [
        (head(), centred, "the loss mixes examples"),
        (head(), nn.CrossEntropyLoss(), 'reduction="none"'),
        (spoilt(float("nan")), F.cross_entropy, r"'1\.weight' holds NaN or infinite"),
        (spoilt(float("inf")), F.cross_entropy, r"'1\.weight' holds NaN or infinite"),
    ],
)
def test_a_mixing_or_reduced_loss_and_spoilt_weights_are_refused(model, criterion, complaint):
    with pytest.raises(SparseDPError, match=complaint):
        validate_model(model, from_criterion(criterion), rows())


@pytest.mark.parametrize("kind", ENGINES)
def test_what_a_model_does_in_one_mode_is_not_taken_for_what_it_does_in_another(kind):
    alone: list[bool] = []

    def watched(model, rows):
        alone.append(not is_functorch_wrapped_tensor(rows[0]))
        return LOSS(model, rows)

    model = head(Written(lambda m, x: x * random.random() if m.training else x)).eval()
    engine = make_engine(model, watched, kind)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(1.0))
    engine.clipped_sum([MicroBatch(rows(96))], query)
    assert sum(alone) < 10
    model.train()
    engine.clipped_sum([MicroBatch(rows(96))], query)
    assert sum(alone) > 96
