"""The paper's table on IMDB: a pretrained encoder, fine-tuned privately on 25,000 film reviews.

The paper trains BERT-base. Here it is the encoder in the folder that CORRNOISE_ENCODER names (a
model of the transformers library), and the table says which; its embeddings are frozen. Sequence
length and epochs are what the hardware allows, and the table says those too. The reviews come from
CORRNOISE_DATA/imdb (train.parquet and test.parquet), or through the library datasets.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import accuracy, markdown
from .accuracy import NAMES, Task
from .jobs import cuda, data_path
from .markdown import Claim
from .progress import Progress
from .record import SEED
from .settings import Row

TITLE = "Accuracy on IMDB"
LENGTH, MOST = 128, 256
FULL = {"num_examples": 25_000, "batch_size": 512, "epochs": 5}
REDUCED = {"num_examples": 200, "batch_size": 20, "epochs": 1}
SMOKE = {"num_examples": 24, "batch_size": 4, "epochs": 1}
_RATES = {"dp_sgd": 0.02, "bsr": 0.02, "bisr": 0.15, "band_mf": 0.02, "band_inv_mf": 0.1}
TASK = Task(
    name="imdb",
    dataset="IMDB",
    rates={"balls-in-bins": _RATES, "fixed": _RATES},
    printed={
        "balls-in-bins": (87.43, 88.11, 89.58, 88.31, 89.53),
        "fixed": (85.71, 87.18, 89.42, 87.08, 89.23),
    },
    options={"grad_sample_mode": "ghost", "max_physical_batch_size": MOST},
)

draw = accuracy.draw


def encoder_path() -> Path:
    """The folder of the pretrained encoder."""
    place = os.environ.get("CORRNOISE_ENCODER")
    if place is None:
        raise ValueError(
            "table-imdb needs a pretrained encoder: set CORRNOISE_ENCODER to a folder with a "
            "model of the transformers library (config.json, tokenizer.json, model.safetensors)"
        )
    return Path(place)


def network(seed: int) -> Any:
    """The encoder with frozen embeddings, the mean over the words, and a new linear layer."""
    import torch
    from torch import nn
    from transformers import AutoModel

    encoder: Any = AutoModel.from_pretrained(
        encoder_path(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    encoder.embeddings.requires_grad_(False)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    torch.manual_seed(seed)

    class Reviewer(nn.Module):
        """From tokens to two logits."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder
            self.head = nn.Linear(encoder.config.hidden_size, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            mask = (ids != encoder.config.pad_token_id).long()
            words = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            total = (words * mask[..., None]).sum(dim=1)
            return self.head(total / mask.sum(dim=1, keepdim=True).clamp(min=1))

    return Reviewer().train()


def tokens(size: int | None) -> Any:
    """The reviews, cut to ``LENGTH`` tokens; ``size`` takes so many, as many of both labels."""
    import numpy as np
    import torch
    from transformers import AutoTokenizer

    from corrnoise.torch import datasets

    tokenizer: Any = AutoTokenizer.from_pretrained(encoder_path())
    parts: list[Any] = []
    for part in ("train", "test"):
        text, labels = _reviews(part)
        # The files are sorted by label.
        order = np.random.default_rng(SEED).permutation(len(text))[: size or len(text)]
        found = tokenizer(
            [text[k] for k in order],
            truncation=True,
            max_length=LENGTH,
            padding="max_length",
            return_tensors="pt",
        )
        answers = torch.tensor([labels[k] for k in order])
        parts.append(datasets.Tensors(found["input_ids"].to(torch.int64), answers))
    return datasets.Data("imdb", parts[0], parts[1], 2)


def _reviews(part: str) -> tuple[Any, Any]:
    from corrnoise.torch import datasets

    place = data_path()
    if place is not None:
        return datasets.reviews(place / "imdb", part)
    from datasets import load_dataset

    found: Any = load_dataset("imdb")
    return found[part]["text"], found[part]["label"]


def run(*, smoke: bool, progress: Progress | None) -> dict[str, Any]:
    """Fine-tune with every method and three seeds; without a GPU, a small part of it."""
    encoder = encoder_path().name
    gpu = cuda() and not smoke
    size = FULL if gpu else SMOKE if smoke else REDUCED
    rows = TASK.run(size, gpu=gpu, progress=progress)
    return {
        "reduced": not gpu,
        **size,
        "length": LENGTH,
        "encoder": encoder,
        "device": accuracy.device_name(),
        "rows": rows,
    }


def report(result: dict[str, Any]) -> str:
    """The table beside the printed one, and in which way it is another experiment."""
    data = result["data"]
    head = (
        f"**Not the paper's model**: {data['encoder']}, embeddings frozen, {data['length']} "
        f"tokens, {data['epochs']} epochs, {data['num_examples']:,} reviews, ghost clipping, on "
        f"{data['device']}; the paper has BERT-base and 10 epochs."
    )
    if data["reduced"]:
        head += " **Reduced**: no GPU was there; it shows that everything runs, and nothing else."
    parts = [head, accuracy.table(data["rows"], "printed (BERT-base), %")]
    if not data["reduced"]:
        parts.append(markdown.claims([_claim(data["rows"], sampling) for sampling in NAMES]))
    return "\n\n".join(parts)


def _claim(rows: list[Row], sampling: str) -> Claim:
    mine = accuracy.means(rows, sampling)
    inverse = min(mine["bisr"], mine["band_inv_mf"])
    return Claim(
        f"{NAMES[sampling]}: the inverse methods are above DP-SGD",
        markdown.verdict(inverse > mine["dp_sgd"]),
        f"inverse at least {inverse:.1f}, DP-SGD {mine['dp_sgd']:.1f}",
    )
