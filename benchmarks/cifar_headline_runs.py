"""One run of cifar_headline.py: its plan, its data and its captured steps."""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
from corrnoise.papers.back_to_square_roots import jobs
from scipy.stats import binom
from torch import nn
from torch.utils.data import DataLoader

import corrnoise as cn
from cifar_headline_table import BASE, CHOICE, best_batch
from corrnoise.apps import datasets, models, training
from corrnoise.apps.averaging import Average
from corrnoise.apps.datasets import Tensors, whole_batch
from corrnoise.planning.verification import trust
from corrnoise.torch import PrivacyEngine

DELTA, MOMENTUM, DECAY, CLIP_NORM = 1e-5, 0.9, 0.9999, 10.0
EPSILONS = (2.0, 4.0, 9.0, 1.0, 0.5)  # in this order
# What ``cn.plan`` is asked for.
METHODS: dict[str, dict[str, Any]] = {
    BASE: {"mechanisms": ["dp_sgd"], "sampling": "poisson"},
    "Band-MF, cyclic Poisson": {
        "mechanisms": ["band_mf"],
        "sampling": "cyclic-poisson",
        "memory": None,
    },
    "BISR p = 4, balls-in-bins": {
        "mechanisms": ["bisr"],
        "num_bands": 4,
        "sampling": "balls-in-bins",
    },
    CHOICE: {},
}
FIRST, FACTOR, TRIED, MORE = 1.5, 2.0, 3, 2  # the ladder of multiples of ``default_rate``
AVERAGED = 0.1
TUNING_SEEDS = (100, 101)
CLOSE = 1.5  # points; what is so close to the best is tried with the second seed as well
TIMED = 100  # steps
# How the run ends when a rate is too large.
DIVERGED = "gradients must be finite"


@dataclass(frozen=True)
class Size:
    """How much is trained; ``larger`` batches are tried where the best is looked for."""

    num_examples: int
    batch_size: int
    epochs: int
    held_out: int
    seeds: int
    larger: tuple[int, ...]
    model: str = "convnet"


FULL = Size(50_000, 512, 10, 5_000, 5, (1024, 2048, 4096, 8192))
SMOKE = Size(120, 12, 2, 20, 2, (24,), "linear")
_PLANS: dict[str, cn.Plan] = {}
_DATA: dict[tuple[bool, str], tuple[Tensors, Tensors]] = {}


@dataclass(frozen=True)
class Case:
    """A point of the figure.

    Attributes:
        epsilon: ε.
        method: of ``METHODS``.
        best_batch: whether its batch size is tuned as well.
        precision: of the model.
        smoke: on tiny data.
    """

    epsilon: float
    method: str
    best_batch: bool = False
    precision: str = "tf32"
    smoke: bool = False

    @property
    def label(self) -> str:
        return best_batch(self.method) if self.best_batch else self.method

    @property
    def size(self) -> Size:
        return SMOKE if self.smoke else FULL

    @property
    def batches(self) -> tuple[int, ...]:
        """The sizes that are tried."""
        return (self.size.batch_size, *(self.size.larger if self.best_batch else ()))


@dataclass(frozen=True)
class Training:
    """A run: ``rung`` is the number of a rate of the ladder, and seeds -1 and -2 tune."""

    case: Case
    batch: int
    rung: int
    seed: int

    @property
    def _kind(self) -> str:
        return f"{self.case.epsilon:g} {self.case.method} {self.case.precision} batch {self.batch}"

    @property
    def name(self) -> str:
        """Of what is kept: cases that differ in the sizes they try share runs."""
        seed = {-1: "tuning", -2: "tuning again"}.get(self.seed, str(self.seed))
        return f"headline run {self._kind} rung {self.rung + 10} seed {seed}.json"

    @property
    def time_name(self) -> str:
        """Of what is kept of a measurement."""
        return f"headline time {self._kind}.json"

    @property
    def multiple(self) -> float:
        return FIRST * FACTOR**self.rung


def plan_of(case: Case, batch: int, *, tuning: bool) -> cn.Plan:
    """The plan of a case. What is kept was priced when it was made, and is not priced again."""
    size = case.size
    count = size.num_examples - (size.held_out if tuning else 0)
    asked = METHODS[case.method]
    if case.smoke:  # takes a second
        asked = {"mechanisms": ["bisr"], "sampling": "fixed", "num_bands": 2, **asked}
        asked["samples"] = 1_000

    def make() -> cn.Plan:
        return cn.plan(
            num_examples=count,
            batch_size=batch,
            epochs=size.epochs,
            epsilon=case.epsilon,
            delta=DELTA,
            momentum=MOMENTUM,
            decay=DECAY,
            **asked,
        )

    key = f"headline plan {case.epsilon:g} {case.method} {count} {batch} {size.epochs}"
    if key not in _PLANS:
        _PLANS[key] = jobs.cached_plan(key, make)
        trust(_PLANS[key])
    return _PLANS[key]


def graph_size(plan: cn.Plan) -> int:
    """The rows of a captured step that make the expected work of a random batch least.

    A batch with more rows comes in two pieces.
    """
    share = plan.expected_batch / plan.num_examples
    rows = range(int(plan.expected_batch), int(1.5 * plan.expected_batch) + 2)
    return min(rows, key=lambda m: m * (1.0 + binom.sf(m, plan.num_examples, share)))


def data_of(run: Training, device: str) -> tuple[Tensors, Tensors]:
    """What a run is trained and evaluated on, on the device."""
    smoke, held = run.case.smoke, run.case.size.held_out
    if (smoke, device) not in _DATA:
        found = _synthetic() if smoke else datasets.load("cifar10", path=jobs.data_path())
        _DATA[smoke, device] = found.train.to(device), found.test.to(device)
    train, test = _DATA[smoke, device]
    if run.seed >= 0:
        return train, test
    inside = Tensors(train.inputs[:-held], train.labels[:-held])
    return inside, Tensors(train.inputs[-held:], train.labels[-held:])


def _synthetic() -> datasets.Data:
    """Small pictures whose classes differ in brightness."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(SMOKE.num_examples + 30) % 10
    pictures = torch.randn(len(labels), 3, 8, 8, generator=draw) / 2 + labels[:, None, None, None]
    parts = (slice(0, SMOKE.num_examples), slice(SMOKE.num_examples, None))
    return datasets.Data("synthetic", *(Tensors(pictures[s] / 5 - 1, labels[s]) for s in parts), 10)


class Prepared:
    """A model with its private step, ready to be trained."""

    def __init__(self, run: Training, device: str) -> None:
        warnings.simplefilter("ignore")
        if device == "cuda":
            torch.set_num_threads(1)  # several processes share the processors too
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True  # all batches have one size
            torch.cuda.reset_peak_memory_stats()
        tuning = run.seed < 0
        plan = self.plan = plan_of(run.case, run.batch, tuning=tuning)
        train, self.test = data_of(run, device)
        self._before = torch.cuda.memory_allocated() if device == "cuda" else 0
        seed = TUNING_SEEDS[-1 - run.seed] if tuning else run.seed
        shape = tuple(train.inputs.shape[1:])
        self.net = models.build(run.case.size.model, shape, 10, seed=seed).to(device)
        self.params = list(self.net.parameters())
        count = sum(param.numel() for param in self.params)
        self.rate = run.multiple * training.default_rate(plan, CLIP_NORM, count)
        momentum, weight_decay = training.sgd_settings(MOMENTUM, DECAY, self.rate)
        self.engine = PrivacyEngine(data_fingerprint="CIFAR-10")
        _, _, self.loader = self.engine.make_private(
            module=self.net,
            optimizer=torch.optim.SGD(
                self.params, lr=self.rate, momentum=momentum, weight_decay=weight_decay
            ),
            data_loader=DataLoader(train, batch_size=plan.batch_size, collate_fn=whole_batch),
            max_grad_norm=CLIP_NORM,
            plan=plan,
            grad_sample_mode="one_pass",
        )
        low = run.case.precision == "bf16"

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=low):
                found = self.net(x)
            return nn.functional.cross_entropy(found.float(), y)

        self.step = self.engine.step_function(loss, size=graph_size(plan))

    def steps(self) -> Iterator[None]:
        """Take all steps of the plan, one each time."""
        while self.engine.steps_taken < self.plan.num_steps:
            for batch in self.loader:
                self.step(*batch)
                yield

    def gibibytes(self) -> float | None:
        """The most memory that was allocated, without the images."""
        if not self.params[0].is_cuda:
            return None
        return (torch.cuda.max_memory_allocated() - self._before) / 2**30


def train(run: Training) -> dict[str, Any]:
    """One run, or what is kept of it."""
    return json.loads(jobs.kept(run.name, lambda: json.dumps(_on_device(_train, run)).encode()))


def _on_device(work: Callable[[Training, str], dict[str, Any]], run: Training) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = work(run, device)
    if device == "cuda":
        gc.collect()  # the model and its graph
        torch.cuda.empty_cache()
    return {
        **asdict(run),
        **found,
        "machine": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _train(run: Training, device: str) -> dict[str, Any]:
    start = time.perf_counter()
    made = Prepared(run, device)
    right = {"last": 0.0, "averaged": 0.0}
    with closing(made.engine):
        average = Average(made.params, made.plan.num_steps, AVERAGED)
        try:
            for _ in made.steps():
                average.update()
        except ValueError as problem:
            if DIVERGED not in str(problem):
                raise
        else:
            right["last"] = 100 * training.evaluate(made.net, made.test)[1]
            with average.weights():
                right["averaged"] = 100 * training.evaluate(made.net, made.test)[1]
    return {
        "learning_rate": made.rate,
        "steps": made.engine.steps_taken,
        "accuracy": right,
        "seconds": round(time.perf_counter() - start, 2),
        "gibibytes": made.gibibytes(),
        "num_parameters": sum(param.numel() for param in made.params),
    }


def measure(run: Training) -> dict[str, Any]:
    """What a step of a run costs in a process that has the GPU alone, or what is kept of it."""
    return json.loads(jobs.kept(run.time_name, lambda: json.dumps(_on_device(_time, run)).encode()))


def _time(run: Training, device: str) -> dict[str, Any]:
    """The median time of a step, the fetching of its batch included."""
    made = Prepared(run, device)
    times: list[float] = []
    with closing(made.engine):
        for count, _ in enumerate(made.steps()):
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            if count == TIMED:
                break
    passed = [b - a for a, b in itertools.pairwise(times[len(times) // 10 :])]
    return {"milliseconds": 1e3 * statistics.median(passed), "gibibytes": made.gibibytes()}


def restore(row: dict[str, Any], case: Case) -> int:
    """Keep a row's runs and its measurement, where none is kept, and say how many those are."""
    found: dict[str, dict[str, Any]] = {}
    for result in [*row["tried"], *row["runs"]]:
        run = Training(case, result["batch"], result["rung"], result["seed"])
        found[run.name] = result
    if row["cost"]["alone"] is not None:
        found[Training(case, row["batch"], 0, 0).time_name] = row["cost"]["alone"]
    missing = {name: result for name, result in found.items() if finished(name) is None}
    for name, result in missing.items():
        jobs.kept(name, json.dumps(result).encode)
    return len(missing)


def finished(name: str) -> dict[str, Any] | None:
    """What is kept of a run or a measurement of this name, if it has ended."""

    def missing() -> bytes:
        raise FileNotFoundError

    try:
        return json.loads(jobs.kept(name, missing))
    except FileNotFoundError:
        return None
