"""A Hugging Face model with LoRA adapters, trained privately by its own Trainer. Random weights, no downloads.

Run: pip install 'sparsedp[transformers]'; python examples/hugging_face.py
"""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, default_data_collator

from sparsedp.integrations.huggingface import PrivacyArguments, SparseDPTrainer

WORDS, LENGTH = 100, 12


class Sentences(Dataset):
    """Made-up sentences: class 1 holds more of the later words."""

    def __init__(self, rows: int, seed: int) -> None:
        drawn = np.random.default_rng(seed)
        self.labels = drawn.integers(0, 2, rows)
        self.words = drawn.integers(2, WORDS // 2, (rows, LENGTH)) + self.labels[:, None] * drawn.integers(
            0, WORDS // 2, (rows, LENGTH)
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, object]:
        return {
            "input_ids": torch.from_numpy(self.words[i]),
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": int(self.labels[i]),
        }


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        num_labels=2,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    adapters = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    trainer = SparseDPTrainer(
        model=get_peft_model(BertForSequenceClassification(config), adapters),
        args=TrainingArguments(
            output_dir="runs/hugging-face", num_train_epochs=3, per_device_train_batch_size=64, learning_rate=1e-2,
            report_to=[], disable_tqdm=True, use_cpu=True,
        ),
        train_dataset=Sentences(600, seed=0),
        eval_dataset=Sentences(200, seed=1),
        data_collator=default_data_collator,
        privacy=PrivacyArguments(epsilon=8, delta=1e-4),
    )  # fmt: skip
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    print(
        f"held-out loss {loss:.3f} at epsilon {trainer.result.epsilon:.2f}, {trainer.result.d} parameters trained"
    )


if __name__ == "__main__":
    main()
