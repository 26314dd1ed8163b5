"""The paper's table on IMDB: a pretrained encoder, fine-tuned privately on 25,000 film reviews.

The paper trains BERT-base. Here it is the encoder in the folder that CORRNOISE_ENCODER names (a
model of the transformers library), and the table says which; its embeddings are frozen. Sequence
length, epochs and seeds are what 20 minutes of one H200 allow, and the table says those too. For
this other model, learning rate and clip norm are chosen anew: for each method on reviews that are
held out of the training set, with amplification; without amplification, and with Poisson batches,
the method keeps them, relative to its noise. The reviews come from CORRNOISE_DATA/imdb
(train.parquet and test.parquet), or through the library datasets.
"""

from __future__ import annotations

import io
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise import _tables
from corrnoise._progress import Progress

from . import accuracy, noise_table, record
from .accuracy import NAMES, Setting, Task
from .jobs import Job, cuda, data_path, kept, run_all
from .record import SEED
from .settings import METHODS, Row, select

TITLE = "Accuracy on IMDB"
LENGTH = 128
FULL = {"num_examples": 25_000, "batch_size": 512, "epochs": 4}
REDUCED = {"num_examples": 200, "batch_size": 20, "epochs": 1}
SMOKE = {"num_examples": 24, "batch_size": 4, "epochs": 1}
HELD_OUT, SEARCH_SEED = 2_500, 100
RESUMES = True
# Clip norms, and learning rates as multiples of ``corrnoise.apps.training.default_rate``, for
# which the noise moves the weights equally far with every method.
CHOICES = ((10.0, 1.0), (10.0, 2.0), (10.0, 4.0), (3.0, 2.0))
TASK = Task(
    name="imdb",
    dataset="IMDB",
    printed={
        "balls-in-bins": (87.43, 88.11, 89.58, 88.31, 89.53),
        "fixed": (85.71, 87.18, 89.42, 87.08, 89.23),
    },
    # A batch, twice as large at most, goes through the model at once.
    options={"max_physical_batch_size": 1024},
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


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ModuleNotFoundError:
        raise ValueError(
            "table-imdb needs the package transformers, which is not installed; install it"
        ) from None


def network(seed: int) -> Any:
    """The encoder with frozen embeddings, the mean over the words, and a new linear layer."""
    import torch
    from torch import nn

    library = _transformers()
    library.utils.logging.disable_progress_bar()  # one for each run would hide our own
    encoder: Any = library.AutoModel.from_pretrained(
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
    """The reviews, cut to ``LENGTH`` tokens: all of them, or ``size`` chosen at random."""
    import numpy as np
    import torch

    from corrnoise.apps import datasets

    name = f"imdb {encoder_path().name} {LENGTH} {size or 'all'} tokens.npz"
    with np.load(io.BytesIO(kept(name, lambda: _tokenized(size)))) as found:
        parts = [
            datasets.Tensors(
                torch.from_numpy(found[f"{part}_ids"].astype(np.int64)),
                torch.from_numpy(found[f"{part}_labels"].astype(np.int64)),
            )
            for part in ("train", "test")
        ]
    return datasets.Data("imdb", parts[0], parts[1], 2)


def _tokenized(size: int | None) -> bytes:
    """The arrays of ``tokens`` as an .npz."""
    import numpy as np

    tokenizer: Any = _transformers().AutoTokenizer.from_pretrained(encoder_path())
    arrays: dict[str, Any] = {}
    for part in ("train", "test"):
        text, labels = _reviews(part)
        # The files are sorted by label.
        order = np.random.default_rng(SEED).permutation(len(text))[: size or len(text)]
        found = tokenizer(
            [text[k] for k in order], truncation=True, max_length=LENGTH, padding="max_length"
        )
        arrays[f"{part}_ids"] = np.array(found["input_ids"], np.int32)
        arrays[f"{part}_labels"] = np.array([labels[k] for k in order], np.int32)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _reviews(part: str) -> tuple[Any, Any]:
    from corrnoise.apps import datasets

    place = data_path()
    return datasets.reviews(None if place is None else place / "imdb", part)


def run(
    *, smoke: bool, progress: Progress | None, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Choose rates, then fine-tune with every method and seed; reduced without a GPU."""
    gpu = cuda() and not smoke
    size = FULL if gpu else SMOKE if smoke else REDUCED
    num_parameters = sum(p.numel() for p in network(0).parameters() if p.requires_grad)
    same = {**size, "length": LENGTH, "encoder": encoder_path().name}
    before = record.resumed(earlier, same)
    tried = before.get("tried") or _search(size, num_parameters, gpu=gpu, progress=progress)
    best = _best(tried)

    def setting(method: str, _: str, plan: cn.Plan) -> Setting:
        return _setting(plan, best[method]["clip_norm"], best[method]["times"], num_parameters)

    rows = TASK.run(
        size, gpu=gpu, setting=setting, progress=progress, finished=before.get("rows", ())
    )
    return {
        "reduced": not gpu,
        **size,
        "length": LENGTH,
        "encoder": encoder_path().name,
        "num_parameters": num_parameters,
        "clipping": "clipping in one pass",
        "held_out": _held_out(size, gpu=gpu),
        "device": accuracy.device_name(),
        "kept_from": before.get("kept_from"),
        "tried": tried,
        "rows": rows,
    }


def _search(
    size: dict[str, int], num_parameters: int, *, gpu: bool, progress: Progress | None
) -> list[Row]:
    """Every method with every choice, one seed, evaluated on reviews that it was not trained on."""
    held = _held_out(size, gpu=gpu)
    inside = {**size, "num_examples": size["num_examples"] - held}
    sampling = "balls-in-bins" if gpu else "fixed"
    rows: list[Row] = []
    jobs: list[Job] = []
    for method in TASK.methods(gpu=gpu):
        plan = TASK.plan(method, sampling, inside)
        for clip_norm, times in CHOICES if gpu else CHOICES[:2]:
            setting = _setting(plan, clip_norm, times, num_parameters)
            rows.append({"method": method, "times": times, **setting._asdict()})
            part = None if gpu else size["num_examples"]
            name = f"{method} {clip_norm} {times}"
            jobs.append(TASK.job(name, plan, setting, SEARCH_SEED, validation=held, size=part))
    found: dict[str, float] = {}
    done = run_all(jobs, device="cuda" if gpu else "cpu")
    for count, (job, result) in enumerate(done, 1):
        found[job.name] = 100 * result["accuracy"][-1]
        if progress is not None:
            progress(count, len(jobs))
    return [{**row, "validation": found[job.name]} for row, job in zip(rows, jobs, strict=True)]


def _best(tried: list[Row]) -> dict[str, Row]:
    """The row of each method with the highest accuracy; the first of equal ones."""
    return {
        method: max(select(tried, method=method), key=lambda row: row["validation"])
        for method in dict.fromkeys(row["method"] for row in tried)
    }


def _held_out(size: dict[str, int], *, gpu: bool) -> int:
    return HELD_OUT if gpu else size["num_examples"] // 10


def _setting(plan: cn.Plan, clip_norm: float, times: float, num_parameters: int) -> Setting:
    from corrnoise.apps import training

    return Setting(times * training.default_rate(plan, clip_norm, num_parameters), clip_norm)


def report(result: dict[str, Any]) -> str:
    """The table beside the printed one, and in which way it is another experiment."""
    data = result["data"]
    rows = data["rows"]
    head = (
        f"**Not the paper's model**: {data['encoder']} with {data['num_parameters']:,} trained "
        f"parameters (embeddings frozen), {data['length']} tokens, {data['epochs']} epochs, "
        f"{data['num_examples']:,} reviews, {data.get('clipping', 'ghost clipping')}, on "
        f"{data['device']}; the paper has BERT-base and 10 epochs."
    )
    if data["reduced"]:
        head += " **Reduced**: no GPU was available; it only shows that everything runs."
        return "\n\n".join([head, accuracy.table(rows, "printed (BERT-base), %", digits=2)])
    counts = {row["sampling"]: len(row["accuracy"]) for row in rows}
    seeds = " and ".join(f"{count} {NAMES[sampling]}" for sampling, count in counts.items())
    return "\n\n".join(
        [
            f"{head} ({noise_table.EPSILON:g}, {noise_table.DELTA:g})-DP; the test set after the "
            f"last epoch; seeds: {seeds}.",
            accuracy.table(rows, "printed (BERT-base), %", digits=2),
            accuracy.claims(rows),
            f"Learning rate and clip norm of each method were chosen with one seed on "
            f"{data['held_out']:,} held-out reviews, amplified (accuracy there, %; rates as "
            "multiples of the one at which the noise moves the weights by 8):",
            _choices(data["tried"]),
            *accuracy.kept_note(data),
            f"{_edge(data['tried'])}The search over these settings is not part of ε.",
        ]
    )


def _choices(tried: list[Row]) -> str:
    cases = list(dict.fromkeys((row["clip_norm"], row["times"]) for row in tried))
    found = {
        (row["method"], row["clip_norm"], row["times"]): f"{row['validation']:.1f}" for row in tried
    }
    header = ["", *(f"C = {clip_norm:g}, {times:g}×" for clip_norm, times in cases)]
    methods = dict.fromkeys(row["method"] for row in tried)
    lines = [[METHODS[method], *(found[(method, *case)] for case in cases)] for method in methods]
    return _tables.markdown(header, lines, left=(0,))


def _edge(tried: list[Row]) -> str:
    """Which methods would perhaps have taken a larger rate still."""
    most = max(row["times"] for row in tried)
    names = [METHODS[m] for m, row in _best(tried).items() if row["times"] == most]
    return f"The largest rate that was tried won for: {', '.join(names)}. " if names else ""
