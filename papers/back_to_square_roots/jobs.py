"""Training runs side by side: one process each, several on one GPU, results as they come.

With a folder in CORRNOISE_CACHE, plans, tokens and finished runs are kept there: an interrupted
experiment continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from corrnoise import Plan, _files

# A small network leaves most of a large GPU idle, so this many runs share it.
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
        validation: this many of the training examples, the last ones, are held out for evaluation.
        options: more for ``corrnoise.apps.training.train``.
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
    """The folder with the data (cifar10.npz, imdb/), if CORRNOISE_DATA names one."""
    place = os.environ.get("CORRNOISE_DATA")
    return None if place is None else Path(place)


def cached_plan(key: str, make: Callable[[], Plan]) -> Plan:
    """A plan, made once: certificates take seconds."""
    return Plan.from_json(kept(key + ".json", lambda: make().to_json().encode()).decode())


def kept(name: str, make: Callable[[], bytes]) -> bytes:
    """What ``make`` gives, once for each name if there is a folder to keep it in."""
    folder = os.environ.get("CORRNOISE_CACHE")
    if folder is None:
        return make()
    path = Path(folder) / re.sub(r"[^a-z0-9.]+", "-", name.lower())
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _files.write(path, make())
    return path.read_bytes()


def run_all(jobs: Sequence[Job], *, device: str) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Every job with its result, in the order in which they finish."""
    if device == "cpu":
        for job in jobs:
            yield job, train(job, device)
        return
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(train, job, device): job for job in jobs}
        for done in as_completed(running):
            yield running[done], done.result()


_DATA: dict[tuple[str, int | None], Any] = {}


def train(job: Job, device: str) -> dict[str, Any]:
    """One run; plain values."""
    digest = hashlib.sha256(repr((job, device)).encode()).hexdigest()[:16]
    return json.loads(kept(f"run {digest}.json", lambda: json.dumps(_train(job, device)).encode()))


def _train(job: Job, device: str) -> dict[str, Any]:
    import torch

    from corrnoise.apps import training

    if device == "cuda":
        torch.set_num_threads(2)  # several runs share the processors too
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    data, model = _data(job), "convnet"
    if job.task == "imdb":
        from . import imdb

        model = imdb.network(job.seed)
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


def _data(job: Job) -> Any:
    """The examples of a job: all, or the first ones, with the last ones of them held out."""
    from corrnoise.apps import datasets

    key = job.task, job.size
    if key not in _DATA:
        if job.task == "imdb":
            from . import imdb

            _DATA[key] = imdb.tokens(job.size)
        else:
            _DATA[key] = datasets.load(job.task, path=data_path())
    data = _DATA[key]
    train, test = data.train, data.test
    if job.size is not None:
        train = datasets.Tensors(train.inputs[: job.size], train.labels[: job.size])
        test = datasets.Tensors(test.inputs[:1000], test.labels[:1000])
    if job.validation:
        inside = len(train) - job.validation
        test = datasets.Tensors(train.inputs[inside:], train.labels[inside:])
        train = datasets.Tensors(train.inputs[:inside], train.labels[:inside])
    return datasets.Data(data.name, train, test, data.num_classes)
