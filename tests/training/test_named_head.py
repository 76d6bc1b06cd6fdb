"""What "head" means is registered last; where something else makes the output, training says so before it begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp.core.errors import ModelError
from sparsedp.methods import MethodOptions

pytestmark = pytest.mark.usefixtures("checked_once")

WIDTH, TOKENS = 4, 7


class Module(nn.Module):
    """Layers by name, in this order, and a function of them and the inputs."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def linear(inputs=WIDTH, outputs=WIDTH, **settings):
    return nn.Linear(inputs, outputs, **settings)


def head_declared_first():
    return Module(lambda m, x: m.head(torch.tanh(m.body(x))), head=linear(outputs=2), body=linear())


def an_unused_layer_last():
    return Module(
        lambda m, x: m.head(torch.tanh(m.body(x))),
        body=linear(), head=linear(outputs=2), aux=linear(outputs=3),
    )  # fmt: skip


def a_layer_called_last_in_vain():
    def forward(m, x):
        out = m.head(torch.tanh(m.body(x)))
        m.aux(out)
        return out

    return Module(forward, body=linear(), head=linear(outputs=2), aux=linear(2, 2))


def a_parametrized_head_first():
    head = parametrizations.weight_norm(linear(outputs=2))
    return Module(lambda m, x: m.head(torch.tanh(m.body(x))), head=head, body=linear())


def words_to(forward, **parts):
    """A language model that is asked for the first token."""
    return Module(forward, words=nn.Embedding(TOKENS, WIDTH), norm=nn.LayerNorm(WIDTH), **parts)


def tied_head(*, bias=False):
    model = words_to(lambda m, t: m.out(m.norm(m.words(t)))[:, -1], out=linear(outputs=TOKENS, bias=bias))
    model.out.weight = model.words.weight
    return model


def tied_product():
    return words_to(lambda m, t: (m.norm(m.words(t)) @ m.words.weight.T)[:, -1])


def a_matrix_by_itself():
    matrix = nn.Parameter(torch.randn(WIDTH, TOKENS))
    return words_to(lambda m, t: (m.norm(m.words(t)) @ m.matrix)[:, -1], matrix=matrix)


def run(model, loss=None, **settings):
    generator = torch.Generator().manual_seed(0)
    if hasattr(model, "words"):
        x = torch.randint(0, TOKENS, (60, 3), generator=generator)
        y = x[:, 0]
    else:
        x = torch.randn(60, WIDTH, generator=generator)
        y = (x[:, 0] > 0).long()
    settings = {"method": "head", "epsilon": 8.0, "epochs": 1, "batch_size": 20, "seed": 0} | settings
    usual = {"delta": 1e-3, "accountant": "rdp", "progress": False}
    loss = loss or nn.CrossEntropyLoss(reduction="none")
    return sparsedp.fit(model, TensorDataset(x, y), loss, **usual, **settings)


WRONG = {
    "head declared first": (head_declared_first, "body", ["head.weight", "head.bias"]),
    "an unused layer last": (an_unused_layer_last, "aux", ["head.weight", "head.bias"]),
    "a layer called last in vain": (a_layer_called_last_in_vain, "aux", ["head.weight", "head.bias"]),
    "a parametrized head first": (a_parametrized_head_first, "body", ["head.bias", "head.parametrizations"]),
    "tied head": (tied_head, "norm", ["words.weight", "module 'out'"]),
    "tied head with a bias": (lambda: tied_head(bias=True), "out.bias", ["words.weight"]),
    "tied product": (tied_product, "norm", ["words.weight"]),
    "a matrix by itself": (a_matrix_by_itself, "norm", ["matrix"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_head_that_does_not_make_the_output_is_refused_and_the_one_that_does_is_named(case):
    make, registered, used = WRONG[case]
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=f'"head" means what is registered last.*{registered}') as told:
        run(model)
    assert all(name in str(told.value) for name in [*used, "MethodOptions(scope="])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "bias"},
        {"method": "head-first"},
        {"method": "dp-sgd", "options": MethodOptions(scope=("last=1",))},
        {"method": "tp-topk", "options": MethodOptions(always=("head",))},
        {"method": "dp-sgd", "lr_factors": {"head": 2}},
        {"method": "given", "public_scores": {"head": 1.0}, "active_ratio": 0.5},
    ],
    ids=lambda settings: "-".join(settings.values() if len(settings) == 1 else settings),
)
def test_every_way_to_say_it_is_checked(settings):
    with pytest.raises(ModelError, match="registered last"):
        run(head_declared_first(), **settings)


def test_the_remedy_trains_the_head():
    model = head_declared_first()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(model, method="dp-sgd", options=MethodOptions(scope=("head.*",)))
    assert not torch.equal(model.head.weight, before["head.weight"])
    assert torch.equal(model.body.weight, before["body.weight"])


def attention_pools():
    def forward(m, t):
        words = m.words(t)
        return m.attention(words, words, words, need_weights=False)[0].mean(1)

    attention = nn.MultiheadAttention(2 * WIDTH, 2, batch_first=True)
    return Module(forward, words=nn.Embedding(TOKENS, 2 * WIDTH), attention=attention)


def a_recurrent_body():
    return Module(
        lambda m, t: m.out(m.lstm(m.words(t))[0][:, -1]),
        words=nn.Embedding(TOKENS, WIDTH), lstm=nn.LSTM(WIDTH, 5, batch_first=True), out=linear(5, TOKENS),
    )  # fmt: skip


def a_temperature_and_a_token():
    def forward(m, x):
        return m.scale * m.head(torch.tanh(m.body(x + m.token[0])))

    parts = {"scale": nn.Parameter(torch.ones(())), "token": nn.Parameter(torch.zeros(1, WIDTH))}
    return Module(forward, **parts, body=linear(), head=linear(outputs=2))


def changed_in_place():
    return nn.Sequential(linear(), nn.ReLU(inplace=True), linear(outputs=2), nn.ReLU(inplace=True))


def a_parametrized_head():
    return nn.Sequential(linear(), nn.Tanh(), parametrizations.weight_norm(linear(outputs=2)))


def additions_to_a_frozen_body():
    """The last trained layer's output goes through frozen ones, and past earlier ones."""

    def forward(m, x):
        for frozen, addition in ((m.one, m.first), (m.two, m.second)):
            x = x + torch.tanh(frozen(x) + addition(x))
        return m.out(x)

    frozen = {name: linear().requires_grad_(False) for name in ("one", "two", "out")}
    return Module(forward, **frozen, first=linear(), second=linear())


USUAL = [
    attention_pools, a_recurrent_body, a_temperature_and_a_token, changed_in_place, a_parametrized_head,
    additions_to_a_frozen_body,
]  # fmt: skip


@pytest.mark.parametrize("make", USUAL, ids=lambda make: make.__name__)
def test_a_head_that_makes_the_output_is_trained_and_the_log_says_which_it_is(make, caplog):
    caplog.set_level("INFO", "sparsedp")
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(model)
    *_, last = (name for name, p in model.named_parameters() if p.requires_grad)
    assert '"head" means [' in caplog.text
    assert last in caplog.text
    assert not torch.equal(model.state_dict()[last], before[last])
    assert not any(hook for module in model.modules() for hook in module._forward_hooks)


def test_several_last_layers_are_told(caplog):
    parts = {"body": linear(), "mean": linear(outputs=2), "spread": linear(outputs=2)}
    run(Module(lambda m, x: m.mean(m.body(x)) * m.spread(m.body(x)), **parts))
    assert (
        "means ['spread.weight', 'spread.bias'] alone, and ['mean.weight', 'mean.bias'] also" in caplog.text
    )


def test_a_loss_that_calls_the_layers_itself_is_followed():
    criterion = nn.CrossEntropyLoss(reduction="none")
    by_parts = sparsedp.PerExampleLoss(
        lambda m, rows: criterion(m.head(torch.tanh(m.body(rows[0]))), rows[1])
    )
    with pytest.raises(ModelError, match=r"made by \['head.weight', 'head.bias'\]"):
        run(head_declared_first(), by_parts)
