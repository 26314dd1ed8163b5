"""Hugging Face's Trainer: a small BERT that reads reviews made of a few words."""

import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from corrnoise.transformers import Trainer

GOOD, BAD = ["fine", "moving", "clever", "warm"], ["dull", "noisy", "empty", "cold"]
OTHER = ["the", "film", "was", "a", "plot", "and", "its", "music", "scene", "actor"]


def reviews(count: int, seed: int) -> Dataset:
    """Sentences of 6 to 14 words, with two that tell what the writer thinks."""
    dice = random.Random(seed)
    rows = []
    for _ in range(count):
        label = dice.randrange(2)
        words = dice.choices(OTHER, k=dice.randrange(4, 13)) + dice.choices((BAD, GOOD)[label], k=2)
        dice.shuffle(words)
        rows.append({"text": " ".join(words), "labels": label})
    return Dataset.from_list(rows)


def main(epochs: int = 10, folder: str | None = None) -> float:
    """Train, and return the accuracy on reviews that were held out."""
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")
    train, test = (
        reviews(size, seed).map(lambda row: tokenizer(row["text"]), remove_columns="text")
        for size, seed in ((3000, 1), (500, 2))
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir=folder or f"{tempfile.mkdtemp()}/reviews",
            learning_rate=1e-2,
            num_train_epochs=epochs,
            per_device_train_batch_size=50,
            gradient_accumulation_steps=6,
            max_grad_norm=1.0,
            lr_scheduler_type="linear",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        target_epsilon=8.0,
        target_delta=1e-5,
        train_dataset=train,
        eval_dataset=test,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {
            "accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())
        },
    )
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


if __name__ == "__main__":
    print(f"accuracy {main():.3f}")
