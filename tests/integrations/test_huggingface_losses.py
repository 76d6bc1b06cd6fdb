"""The loss of a row is the one that the model's own head gives for it alone; what has none is refused in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from sparsedp import PerExampleLoss, fit
from sparsedp.errors import DataError, ModelError

pytest.importorskip("transformers")

from sparsedp.integrations.huggingface import loss_for

pytestmark = pytest.mark.filterwarnings("default")

ROWS, LENGTH, WORDS = 4, 6, 20


class Head(nn.Module):
    """Some logits for each row."""

    def __init__(self, logits: int, problem: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, logits)
        self.config = SimpleNamespace(problem_type=problem, num_labels=logits)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.layer(x))


class TinyForCausalLM(nn.Module):
    """Logits for each token, of nothing but that token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.out(self.words(input_ids).tanh()))


class TinyTagger(TinyForCausalLM):
    """The same, and no language model by its name."""


X = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0))
WHOLE = torch.tensor([0, 2, 1, 1])
MANY = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
NUMBERS = torch.tensor([0.3, -2.0, 0.0, 5.0])


def losses(model: nn.Module, labels: Tensor) -> Tensor:
    return loss_for(model)(model, {"x": X, "labels": labels})


def test_whole_numbers_are_classes():
    model = Head(3)
    assert torch.equal(losses(model, WHOLE), F.cross_entropy(model(X).logits, WHOLE, reduction="none"))
    assert torch.equal(losses(model, WHOLE), losses(Head(3, "single_label_classification"), WHOLE[:, None]))


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_a_row_of_floats_is_many_labels(problem):
    model = Head(3, problem)
    expected = F.binary_cross_entropy_with_logits(model(X).logits, MANY, reduction="none").mean(1)
    assert torch.equal(losses(model, MANY), expected)


@pytest.mark.parametrize("labels", [NUMBERS, NUMBERS[:, None]], ids=["flat", "column"])
@pytest.mark.parametrize("problem", [None, "regression"])
def test_one_logit_is_a_regression(problem, labels):
    model = Head(1, problem)
    assert torch.equal(losses(model, labels), (model(X).logits[:, 0] - NUMBERS).square())


def test_the_config_has_the_last_word():
    model = Head(3, "regression")
    assert torch.allclose(losses(model, MANY), (model(X).logits - MANY).square().mean(1))


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        (Head(3), NUMBERS),
        (Head(3), MANY[:, :2]),
        (Head(3), WHOLE[:, None].repeat(1, 3)),
        (Head(3, "single_label_classification"), MANY),
        (Head(1, "single_label_classification"), WHOLE),
        (Head(3, "multi_label_classification"), NUMBERS),
    ],
    ids=str,
)
def test_labels_that_do_not_fit_are_refused(model, labels):
    with pytest.raises(DataError, match=r"labels: got .*expected .*num_labels and problem_type"):
        losses(model, labels)


def test_labels_of_tokens_are_as_many_as_the_tokens():
    model = TinyTagger()
    with pytest.raises(DataError, match="6 whole numbers for each row"):
        loss_for(model)(model, {"input_ids": torch.zeros(ROWS, LENGTH).long(), "labels": WHOLE})


def test_what_is_missing_is_named():
    with pytest.raises(DataError, match=r"\['x'\], expected 'labels'"):
        loss_for(Head(3))(Head(3), {"x": X})
    with pytest.raises(ModelError, match="problem_type: got 'ranking'"):
        loss_for(Head(3, "ranking"))
    with pytest.raises(ModelError, match=r"gave Tensor, expected \.logits"):
        loss_for(Head(3))(lambda x: x, {"x": X, "labels": WHOLE})


class Sentences(Dataset):
    """Every word is followed by the one after it in the list of words."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        words = (i + torch.arange(LENGTH)) % WORDS
        return {"input_ids": words, "labels": words}


@pytest.mark.parametrize("engine", ["bookkeeping", "reference"])
def test_every_engine_teaches_the_next_token(engine):
    model = TinyForCausalLM()
    asked = {"epsilon": 1000.0, "delta": 1e-3, "accountant": "rdp", "method": "dp-sgd", "seed": 0}
    fit(model, Sentences(), PerExampleLoss(loss_for(model)), epochs=15, batch_size=32, lr=2.0, progress=False,
        engine=engine, **asked)  # fmt: skip
    words = torch.arange(WORDS)
    with torch.no_grad():
        guesses = model(words[:, None]).logits[:, 0].argmax(1)
    assert (guesses == (words + 1) % WORDS).float().mean() > 0.8


def test_a_wrapped_model_is_asked_for_the_next_token_too():
    model = TinyForCausalLM()
    rows = {key: value[None] for key, value in Sentences()[3].items()}
    expected = F.cross_entropy(model(rows["input_ids"]).logits[0, :-1], rows["labels"][0, 1:])
    for wrapped in (model, nn.DataParallel(model, device_ids=[])):
        assert torch.allclose(loss_for(wrapped)(model, rows), expected)
    assert not torch.allclose(loss_for(TinyTagger())(model, rows), expected)


SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def hub_model(name: str) -> nn.Module:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if "GPT2" in name:
        return getattr(hf, name)(hf.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2)).eval()
    if "Llama" in name:
        return getattr(hf, name)(hf.LlamaConfig(**SIZES)).eval()
    if "T5" in name:
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=WORDS,
                d_model=16,
                d_kv=8,
                d_ff=16,
                num_layers=1,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ).eval()
    return getattr(hf, name)(hf.BertConfig(**SIZES, **QUIET, is_decoder="LMHead" in name)).eval()


LANGUAGE = [
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertLMHeadModel",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
]


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_row_of_tokens_has_the_loss_that_the_head_gives_for_it_alone(name):
    model = hub_model(name)
    words = torch.randint(2, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = {"input_ids": words, "labels": words.clone()}
    rows["labels"][:, 1] = -100
    if "T5" in name:
        with pytest.raises(DataError, match="DataCollatorForSeq2Seq"):
            loss_for(model)(model, rows)
        rows["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(rows["labels"])
    with torch.no_grad():
        found = loss_for(model)(model, rows)
        for i in range(ROWS):
            assert torch.allclose(
                found[i], model(**{key: v[i : i + 1] for key, v in rows.items()}).loss, atol=1e-6
            )


def test_adapters_without_a_task_do_not_hide_the_model():
    peft = pytest.importorskip("peft")
    model = hub_model("GPT2LMHeadModel")
    words = torch.arange(2, 2 + LENGTH)[None]
    rows = {"input_ids": words, "labels": words}
    expected = model(**rows).loss
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    assert torch.allclose(loss_for(adapted)(adapted, rows), expected, atol=1e-6)
