"""Training runs side by side: one process each, several on one GPU, results as they come."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from corrnoise import Plan

# A small network leaves most of a large GPU idle; so many runs share it.
WORKERS = 6


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: what its row is called.
        plan: as JSON.
        seed: of the initial weights.
        rate: learning rate of m ← βm + x̂.
        clip_norm: C.
        validation: so many of the training images, the last ones, are held out and evaluated on.
        options: more for ``corrnoise.torch.training.train``.
        size: examples of the training set that are used; all by default.
        task: "cifar10" or "imdb".
    """

    name: str
    plan: str
    seed: int
    rate: float
    clip_norm: float
    validation: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    size: int | None = None
    task: str = "cifar10"


def cuda() -> bool:
    """Whether there is a GPU."""
    import torch

    return torch.cuda.is_available()


def data_path() -> Path | None:
    """Where CIFAR-10 lies as cifar10.npz, if CORRNOISE_DATA says so; else torchvision is asked."""
    place = os.environ.get("CORRNOISE_DATA")
    return None if place is None else Path(place)


def cached_plan(key: str, make: Callable[[], Plan]) -> Plan:
    """A plan, kept in the folder CORRNOISE_CACHE if there is one: certificates take seconds."""
    folder = os.environ.get("CORRNOISE_CACHE")
    if folder is None:
        return make()
    path = Path(folder) / (re.sub(r"[^a-z0-9]+", "-", key.lower()) + ".json")
    if not path.exists():
        path.write_text(make().to_json())
    return Plan.from_json(path.read_text())


def run_all(jobs: Sequence[Job], *, device: str) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Every job with what came of it, in the order in which they finish."""
    if device == "cpu":
        for job in jobs:
            yield job, train(job, device)
        return
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(train, job, device): job for job in jobs}
        for done in as_completed(running):
            yield running[done], done.result()


_DATA: dict[str, Any] = {}


def train(job: Job, device: str) -> dict[str, Any]:
    """One run; plain values."""
    import torch

    from corrnoise.torch import training

    if device == "cuda":
        torch.set_num_threads(2)  # several runs share the processors too
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    data, model = _imdb(job) if job.task == "imdb" else (_cifar10(job), "convnet")
    found = training.train(
        Plan.from_json(job.plan),
        data,
        model=model,
        learning_rate=job.rate,
        clip_norm=job.clip_norm,
        seed=job.seed,
        device=device,
        track_epsilon=False,
        **dict(job.options),
    )
    return {
        "accuracy": [record.test_accuracy for record in found.records],
        "seconds": round(found.seconds, 2),
    }


def _cifar10(job: Job) -> Any:
    from corrnoise.torch import datasets

    if "cifar10" not in _DATA:
        _DATA["cifar10"] = datasets.load("cifar10", path=data_path())
    data = _DATA["cifar10"]
    if job.size is None and not job.validation:
        return data
    train_part, test_part = data.train, data.test
    if job.validation:
        inside = len(train_part) - job.validation
        test_part = datasets.Tensors(train_part.inputs[inside:], train_part.labels[inside:])
        train_part = datasets.Tensors(train_part.inputs[:inside], train_part.labels[:inside])
    if job.size is not None:
        train_part = datasets.Tensors(train_part.inputs[: job.size], train_part.labels[: job.size])
        test_part = datasets.Tensors(test_part.inputs[:1000], test_part.labels[:1000])
    return datasets.Data("cifar10", train_part, test_part, data.num_classes)


def _imdb(job: Job) -> tuple[Any, Any]:
    from . import imdb

    if "imdb" not in _DATA:
        _DATA["imdb"] = imdb.tokens(job.size)
    return _DATA["imdb"], imdb.network(job.seed)
