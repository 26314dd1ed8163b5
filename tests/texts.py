"""Small language models and texts for the tests of transformers, and a process that is killed."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

import corrnoise as cn
from corrnoise.records import keys
from corrnoise.transformers import Trainer

SIZE, BATCH, EPOCHS = 48, 12, 4
PLAN = cn.plan(
    num_examples=SIZE, batch_size=BATCH, epochs=EPOCHS, epsilon=8, delta=1e-3, momentum=0.9,
    sampling="fixed", mechanisms=["bisr"], num_bands=4,
)  # fmt: skip
logging.disable_progress_bar()


def tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({str(i): i for i in range(40)}, unk_token="1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", padding_side=side)


def texts(size: int = SIZE, *, labels: str = "class", seed: int = 3) -> Dataset:
    """Token ids of 4 to 11 words; labels are a class, or the tokens themselves."""
    dice = random.Random(seed)
    rows = []
    for _ in range(size):
        ids = [dice.randrange(5, 40) for _ in range(dice.randrange(4, 12))]
        label = int(ids[0] > 22) if labels == "class" else ids
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": label})
    return Dataset.from_list(rows)


def bert(**options: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    given = {
        "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 32, **options,
    }  # fmt: skip
    return BertForSequenceClassification(BertConfig(**given))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    )


def arguments(folder: Any, **options: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 5, "gradient_accumulation_steps": 1,
        "num_train_epochs": EPOCHS, "learning_rate": 1e-2, "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "logging_steps": 3, "save_steps": 5, "warmup_steps": 2, **options,
    }  # fmt: skip
    if "gradient_accumulation_steps" not in options:
        given.update(per_device_train_batch_size=4, gradient_accumulation_steps=3)
    return TrainingArguments(str(folder), **given)


def trainer(folder: Path, model: Any = None, kind: Any = Trainer, **options: Any) -> Any:
    keys._RELEASED.clear()
    given: dict[str, Any] = {
        "args": options.pop("args", None) or arguments(folder),
        "train_dataset": texts(),
        "data_collator": DataCollatorWithPadding(tokenizer()),
        **options,
    }
    if kind is Trainer and "target_epsilon" not in given:
        given.setdefault("plan", PLAN)
    return kind(model=bert() if model is None else model, **given)


class Stop(TrainerCallback):
    """Ctrl-C after the seventh step, once."""

    stopped = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 7 and not self.stopped:
            self.stopped = True
            raise KeyboardInterrupt


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


class Killed(TrainerCallback):
    """SIGKILL after a step, or in the middle of writing a checkpoint."""

    def __init__(self, step: int, *, saving: bool) -> None:
        self.step, self.saving = step, saving

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            if self.saving:
                Trainer._save_rng_state = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                control.should_save = True
            else:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train in forks that are killed, and once without; the weights must be the same."""
    folder = Path(sys.argv[1])
    key = cn.noise.Key.from_bytes(bytes(range(32)))
    kills = [Killed(3, saving=False), Killed(8, saving=False), Killed(10, saving=True), None]
    for number, kill in enumerate([*kills, "whole"]):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            place = folder / ("whole" if kill == "whole" else "killed")
            run = trainer(
                place, bert(hidden_dropout_prob=0.1), key=key,
                callbacks=[kill] if isinstance(kill, Killed) else None,
            )  # fmt: skip
            run.train(resume_from_checkpoint=number > 0 and kill != "whole")
            torch.save(weights(run.model), place / "weights.pt")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if died != isinstance(kill, Killed) or (not died and status):
            sys.exit(f"process {number} ended with {status}")


if __name__ == "__main__":
    main()
