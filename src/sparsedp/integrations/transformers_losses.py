"""One loss per row of a Hugging Face model: the one its own head would average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.batch import PerSampleLoss, Rows
from sparsedp.errors import DataError, ModelError

IGNORED = -100
"""The label of a token that does not count."""
REGRESSION, ONE_LABEL, MANY_LABELS = (
    "regression",
    "single_label_classification",
    "multi_label_classification",
)
"""What a config may call the problem of a model that gives one row of logits for each row."""
WRAPPERS = ("module", "_orig_mod")
"""Where data parallelism and `torch.compile` keep the model."""


def loss_for(model: nn.Module) -> PerSampleLoss:
    """The per-sample loss of a model that gives logits, decided once, from its class and its config.

    - One row of logits for each row: what `config.problem_type` says; where that is not set, squared error if there
      is one logit, cross-entropy of whole numbers, binary cross-entropy of floats. The mean over a row's labels.
    - One for each token: the mean cross-entropy over the labels that are not -100. Causal language models are asked
      for the next token: labels are shifted by one.

    Raises:
        ModelError: its config names a problem that is not known here.
    """
    inner = _unwrapped(model)
    config = getattr(inner, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem not in (None, REGRESSION, ONE_LABEL, MANY_LABELS):
        raise ModelError(
            f"config.problem_type: got {problem!r}, expected {REGRESSION!r}, {ONE_LABEL!r} or {MANY_LABELS!r}; for "
            "another loss call sparsedp.fit with PerExampleLoss(lambda model, rows: ...)"
        )
    name, decodes = type(inner).__name__, bool(getattr(config, "is_encoder_decoder", False))
    generates = "ForConditionalGeneration" in name
    shifted = _is_causal(name) or (generates and not decodes)

    def loss(called: Callable[..., Any], rows: Rows) -> Tensor:
        labels = _labels(rows)
        if generates and decodes and "decoder_input_ids" not in rows:
            raise DataError(
                f"{name} makes what its decoder reads from the labels, which are kept from it here; let the collator "
                "give decoder_input_ids: DataCollatorForSeq2Seq(tokenizer, model=model, ...)"
            )
        logits = _logits(called(**{key: value for key, value in rows.items() if key != "labels"}))
        if logits.dim() == 2:
            return _of_rows(logits, labels, problem)
        return _of_tokens(logits, labels, shifted)

    return loss


def _unwrapped(model: nn.Module) -> nn.Module:
    for wrapper in WRAPPERS:
        if isinstance(inside := getattr(model, wrapper, None), nn.Module):
            return _unwrapped(inside)
    base: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)  # of peft
    return model if base is None else base()


def _is_causal(name: str) -> bool:
    return "CausalLM" in name or ("LMHead" in name and "WithLMHead" not in name)


def _labels(rows: Rows) -> Tensor:
    if "labels" not in rows:
        raise DataError(
            f"a batch holds {sorted(rows)}, expected 'labels' among them: the data set or the collator gives them "
            "(as 'label' or 'labels'). For other targets call sparsedp.fit with PerExampleLoss(...)"
        )
    labels: Tensor = rows["labels"]
    return labels


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        got = type(output).__name__ if logits is None else f"logits of shape (rows, {_sizes(logits)})"
        raise ModelError(
            f"the model gave {got}, expected .logits for each row or for each token of it; for another output call "
            "sparsedp.fit with PerExampleLoss(lambda model, rows: ...)"
        )
    return logits


def _of_rows(logits: Tensor, labels: Tensor, problem: str | None) -> Tensor:
    if problem is None and logits.shape[1] == 1:
        problem = REGRESSION
    elif problem is None:
        problem = MANY_LABELS if labels.is_floating_point() else ONE_LABEL
    count = logits.shape[1]
    if problem == ONE_LABEL:
        if labels.is_floating_point() or labels[:1].numel() > 1 or count < 2:
            raise _mismatch(
                problem, labels, f"one whole number for each row, and two logits or more, not {count}"
            )
        return F.cross_entropy(logits, labels.reshape(-1).long(), reduction="none")
    if labels.shape != logits.shape and not (count == 1 and labels.dim() == 1):
        raise _mismatch(problem, labels, f"{count} numbers for each row, one for each logit")
    wanted = labels.reshape(logits.shape).to(logits.dtype)
    compare = F.mse_loss if problem == REGRESSION else F.binary_cross_entropy_with_logits
    return compare(logits, wanted, reduction="none").mean(dim=1)


def _of_tokens(logits: Tensor, labels: Tensor, shifted: bool) -> Tensor:
    if labels.is_floating_point() or labels.shape != logits.shape[:2]:
        raise _mismatch("logits for each token", labels, f"{logits.shape[1]} whole numbers for each row")
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    counted = labels != IGNORED
    losses = F.cross_entropy(logits.transpose(1, 2), labels.long(), reduction="none", ignore_index=IGNORED)
    return (losses * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)


def _mismatch(problem: str, labels: Tensor, expected: str) -> DataError:
    return DataError(
        f"labels: got {labels.dtype} of shape (rows, {_sizes(labels)}) for {problem}, expected {expected}. Look at "
        "num_labels and problem_type in the model's config, and at what the collator makes of the labels"
    )


def _sizes(values: Tensor) -> str:
    return ", ".join(map(str, values.shape[1:]))
