"""The paper's table on IMDB: a pretrained encoder, fine-tuned privately on 25,000 film reviews.

The paper trains BERT-base. Here it is the encoder in the folder that CORRNOISE_ENCODER names (a
model of the transformers library), and the table says which; its embeddings are frozen. Sequence
length and epochs are what the hardware allows, and the table says those too. The reviews come from
CORRNOISE_DATA/imdb (train.parquet and test.parquet), or through the library datasets.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise.noise.filters import Filter

from . import markdown, noise_table, style
from .cifar10 import NAMES, device_name
from .jobs import Job, cached_plan, cuda, data_path, run_all
from .markdown import Claim
from .progress import Progress
from .record import SEED
from .settings import METHODS, Row, select

TITLE = "Accuracy on IMDB"
CLIP_NORM, NUM_SEEDS, LENGTH, MOST = 10.0, 3, 128, 256
FULL = {"num_examples": 25_000, "batch_size": 512, "epochs": 5}
REDUCED = {"num_examples": 200, "batch_size": 20, "epochs": 1}
SMOKE = {"num_examples": 24, "batch_size": 4, "epochs": 1}
# The paper's learning rates belong to m ← βm + (1-β)x̂; those of its Algorithm 1 are a twentieth.
RATES = {"dp_sgd": 0.02, "bsr": 0.02, "bisr": 0.15, "band_mf": 0.02, "band_inv_mf": 0.1}
# As printed, after ten epochs, in the order of ``noise_table.COMPARED``.
PRINTED = {
    "balls-in-bins": (87.43, 88.11, 89.58, 88.31, 89.53),
    "fixed": (85.71, 87.18, 89.42, 87.08, 89.23),
}


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


def plan_of(
    method: str, sampling: Any, *, num_examples: int, batch_size: int, epochs: int
) -> cn.Plan:
    """(9, 1e-5)-DP for IMDB's own workload."""

    def make() -> cn.Plan:
        own = noise_table.DATASETS["IMDB"]
        b = -(-num_examples // batch_size)
        part = cn.Participation(epochs * b, b, epochs)
        workload = cn.workloads.sgd(part.num_steps, momentum=own["momentum"], decay=own["decay"])
        made = noise_table.mechanism(method, workload, part)
        found = cn.calibrate(
            Filter.of(made).realized,
            part,
            epsilon=noise_table.EPSILON,
            delta=noise_table.DELTA,
            sampling=sampling,
            seed=SEED,
        )
        return cn.Plan(num_examples=num_examples, batch_size=batch_size, calibration=found)

    return cached_plan(f"imdb {method} {sampling} {num_examples} {batch_size} {epochs}", make)


def run(*, smoke: bool, progress: Progress | None) -> dict[str, Any]:
    """Fine-tune with every method and three seeds; without a GPU, a small part of it."""
    encoder_path()
    gpu = cuda() and not smoke
    size = FULL if gpu else SMOKE if smoke else REDUCED
    seeds = range(NUM_SEEDS) if gpu else range(1)
    methods = noise_table.COMPARED if gpu else ("dp_sgd", "bisr")
    samplings = noise_table.SAMPLINGS if gpu else ("fixed",)
    plans = {(m, s): plan_of(m, s, **size) for s in samplings for m in methods}
    jobs = [
        Job(
            name=f"{method}/{sampling}",
            plan=plan.to_json(),
            seed=seed,
            rate=RATES[method] * (1 - 0.95),
            clip_norm=CLIP_NORM,
            options=(("grad_sample_mode", "ghost"), ("max_physical_batch_size", MOST)),
            size=None if gpu else size["num_examples"],
            task="imdb",
        )
        for (method, sampling), plan in plans.items()
        for seed in seeds
    ]
    found: dict[str, dict[int, Any]] = {job.name: {} for job in jobs}
    for done, (job, result) in enumerate(run_all(jobs, device="cuda" if gpu else "cpu"), 1):
        found[job.name][job.seed] = result
        if progress is not None:
            progress(done, len(jobs))
    rows: list[Row] = []
    for (method, sampling), plan in plans.items():
        runs = [found[f"{method}/{sampling}"][seed] for seed in seeds]
        last = [100 * one["accuracy"][-1] for one in runs]
        rows.append(
            {
                "method": method,
                "sampling": sampling,
                "noise_multiplier": plan.noise_multiplier,
                "rate": RATES[method] * (1 - 0.95),
                "mean": statistics.mean(last),
                "standard_error": (
                    statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None
                ),
                "accuracy": [one["accuracy"] for one in runs],
                "printed": PRINTED[sampling][noise_table.COMPARED.index(method)],
                "seconds": [one["seconds"] for one in runs],
            }
        )
    return {
        "reduced": not gpu,
        **size,
        "length": LENGTH,
        "encoder": encoder_path().name,
        "device": device_name(),
        "rows": rows,
    }


def draw(result: dict[str, Any], folder: Path) -> None:
    """Accuracy after each epoch, mean of the seeds."""
    rows = result["data"]["rows"]
    samplings = list(dict.fromkeys(row["sampling"] for row in rows))
    with style.sheet(result, folder, 1, len(samplings), (4.5 * len(samplings), 3.6)) as (
        figure,
        axes,
    ):
        for panel, sampling in zip(axes[0], samplings, strict=True):
            for row in select(rows, sampling=sampling):
                each = list(zip(*row["accuracy"], strict=True))
                panel.plot(
                    range(1, len(each) + 1),
                    [100 * statistics.mean(values) for values in each],
                    color=style.COLOURS[row["method"]],
                    marker="o",
                    markersize=3,
                    label=METHODS[row["method"]],
                )
            panel.set(title=NAMES[sampling], xlabel="epoch")
        axes[0][0].set_ylabel("test accuracy, %")
        style.legend(figure, axes[0])


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
    lines = [
        [
            f"{METHODS[row['method']]}, {NAMES[row['sampling']]}",
            f"{row['noise_multiplier']:.3f}",
            f"{row['rate']:.2g}",
            f"{row['mean']:.1f}"
            + (f" ± {row['standard_error']:.1f}" if row["standard_error"] is not None else ""),
            f"{row['printed']:.1f}",
        ]
        for row in data["rows"]
    ]
    header = ["", "noise", "learning rate", "accuracy, %", "printed (BERT-base), %"]
    parts = [head, markdown.table(header, lines, numbers=True)]
    if not data["reduced"]:
        parts.append(markdown.claims([_claim(data["rows"], sampling) for sampling in NAMES]))
    return "\n\n".join(parts)


def _claim(rows: list[Row], sampling: str) -> Claim:
    mine = {row["method"]: row["mean"] for row in select(rows, sampling=sampling)}
    inverse = min(mine["bisr"], mine["band_inv_mf"])
    return Claim(
        f"{NAMES[sampling]}: the inverse methods are above DP-SGD",
        markdown.verdict(inverse > mine["dp_sgd"]),
        f"inverse at least {inverse:.1f}, DP-SGD {mine['dp_sgd']:.1f}",
    )
