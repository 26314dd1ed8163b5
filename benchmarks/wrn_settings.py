"""What a run of the wide residual network is: its recipe, plan, pictures and machine."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import corrnoise as cn
import wrn_data
from corrnoise import _files, workloads
from corrnoise.algebra import toeplitz
from wrn_layers import WideResNet, use_kernels

DELTA, HELD_OUT = 1e-5, 5_000
# How far the noise moves the weights by default. At ε = 8 with 125 epochs that is the rate of De et
# al. (2022), 4; with 40 epochs 12 was the best of 6, 12 and 24 for DP-SGD.
MOVED = 140.0
# name: (mechanisms, sampling)
METHODS: dict[str, tuple[list[str] | None, str]] = {
    "planner": (None, "best"),
    "dp-sgd": (["dp_sgd"], "poisson"),
}


@dataclass(frozen=True)
class Recipe:
    """What a run does in its time.

    Attributes:
        batch: expected examples of a step.
        views: of each example in a step.
        epochs: passes over the examples.
        schedule: of the rate: "constant" or "cosine", which falls to 0.
        momentum: β of SGD. A rate η of the recipe is that of a long run of equal gradients, so
            that torch's is η·(1 - β).
        clip_norm: C.
        decay: α, the factor that the weights of convolutions and of the head keep in a step at the
            first rate; 1 is no decay. It shrinks with the rate, as torch's does.
        told: the decay that the planner is told instead. Where the loss is curved, later steps
            take back what a step's noise has done, so that noise is forgotten as with decay.
    """

    batch: int
    views: int
    epochs: int
    schedule: str = "constant"
    momentum: float = 0.0
    clip_norm: float = 1.0
    decay: float = 1.0
    told: float | None = None

    @property
    def decayed(self) -> str:
        """The part of a file's name that tells the decays."""
        own = "" if self.decay == 1.0 else f"-d{self.decay:g}"
        return own if self.told is None else f"{own}-t{self.told:g}"


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        method: of ``METHODS``.
        epsilon: ε; ∞ is a run without noise, which is not private.
        minutes: the time that the recipe is made for.
        recipe: what it does.
        rate: η; 0 where none was chosen yet.
        seed: of weights and views. Below 0 a part of the examples is held out, to choose with.
        average: of the weights, whose accuracy counts; it does not change the training.
    """

    method: str
    epsilon: float
    minutes: int
    recipe: Recipe
    rate: float = 0.0
    seed: int = 0
    average: str = "hundred"

    @property
    def name(self) -> str:
        return f"{self.method}-{self.epsilon:g}-{self.minutes}"

    @property
    def folder(self) -> Path:
        r = self.recipe
        kind = "tune" if self.seed < 0 else f"seed{self.seed}"
        return cache() / (
            f"wrn-{self.name}-b{r.batch}-v{r.views}-e{r.epochs}-{r.schedule}-m{r.momentum:g}"
            f"{r.decayed}-c{r.clip_norm:g}-r{self.rate:g}-{kind}"
        )

    def rate_at(self, step: int, num_steps: int) -> float:
        """What torch's optimizer is told."""
        rate = self.rate * (1.0 - self.recipe.momentum)
        if self.recipe.schedule == "constant":
            return rate
        return rate * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))


@dataclass(frozen=True)
class Machine:
    """How a run is computed, which does not change what is computed but for rounding.

    Attributes:
        rows: that go through the model at once.
        low: bfloat16 between layers; else float32 with products in TF32.
        channels_last: the layout of pictures.
        kernels: our own, for normalisation and gradients of convolutions.
    """

    rows: int = 4096
    low: bool = True
    channels_last: bool = True
    kernels: bool = True

    def network(self, seed: int, *, smoke: bool = False) -> WideResNet:
        torch.manual_seed(seed)
        use_kernels(self.kernels)
        size: dict[str, int] = {"depth": 10, "widen": 1, "groups": 4} if smoke else {}
        net = WideResNet(
            **size,
            dtype=torch.bfloat16 if self.low else torch.float32,
            channels_last=self.channels_last,
        )
        return net.to(device())


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def cache() -> Path:
    return Path(os.environ["CORRNOISE_CACHE"])


def set_precision(rounds: bool = True) -> None:
    """Products of float32 in TF32 on a GPU, or in float32.

    Torch refuses to tell its precision where that of matrices was set for one backend alone.
    """
    if device() == "cuda":
        set_flags(rounds)
        torch.backends.cudnn.benchmark = True


def set_flags(rounds: bool) -> None:
    torch.set_float32_matmul_precision("high" if rounds else "highest")
    torch.backends.cudnn.allow_tf32 = rounds  # which is for convolutions


def plan_of(run: Run, num_examples: int) -> cn.Plan:
    """From the folder of plans, or made, which takes up to some minutes."""
    r, (mechanisms, sampling) = run.recipe, METHODS[run.method]
    path = cache() / (
        f"wrn-plan-{run.method}-{run.epsilon:g}-n{num_examples}-b{r.batch}-e{r.epochs}"
        f"-m{r.momentum:g}{r.decayed}.json"
    )
    if not path.exists():
        plan = cn.plan(
            num_examples=num_examples,
            batch_size=r.batch,
            epochs=r.epochs,
            epsilon=run.epsilon,
            delta=DELTA,
            momentum=r.momentum,
            decay=r.decay if r.told is None else r.told,
            sampling=sampling,
            mechanisms=mechanisms,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        _files.write(path, plan.to_json())
    return cn.Plan.from_json(path.read_text(encoding="utf-8"))


@functools.cache
def num_parameters() -> int:
    return sum(param.numel() for param in WideResNet().parameters())


def default_rate(run: Run, plan: cn.Plan) -> float:
    """The rate at which the noise moves the weights by ``MOVED``, of two digits.

    With N the noise that a coordinate of the summed gradients has at the end, by momentum, that
    is η·N·√d over the plan's divisor. Decay and a falling rate are left out.
    """
    n, momentum = plan.num_steps, run.recipe.momentum
    sums = (1.0 - momentum) * workloads.sgd(n, momentum=momentum).coef
    shares = toeplitz.multiply(sums, plan.mechanism.noising_coef, n)
    noise = run.recipe.clip_norm * plan.noise_multiplier * float(np.linalg.norm(shares))
    return float(f"{MOVED * plan.divisor / (noise * num_parameters() ** 0.5):.2g}")


def with_rate(run: Run, *, smoke: bool = False) -> Run:
    """The run with its default rate."""
    return replace(run, rate=default_rate(run, plan_of(run, num_examples(run, smoke))))


def num_examples(run: Run, smoke: bool) -> int:
    """Those that are trained on."""
    count, held = (64, 16) if smoke else (50_000, HELD_OUT)
    return count - (held if run.seed < 0 else 0)


def data_of(run: Run, smoke: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is trained on, and what accuracy is measured on."""
    if smoke:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (96, 3, 8, 8), dtype=torch.uint8, generator=generator)
        y = torch.randint(0, 10, (96,), generator=generator)
        x, y, x_test, y_test = x[:64], y[:64], x[64:], y[64:]
    else:
        x, y, x_test, y_test = wrn_data.load()
    if run.seed < 0:
        count = num_examples(run, smoke)
        x, y, x_test, y_test = x[:count], y[:count], x[count:], y[count:]
    found = [part.to(device()) for part in (x, y, x_test, y_test)]
    return found[0], found[1], found[2], found[3]
