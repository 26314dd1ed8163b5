"""One run of the wide residual network: settings, plan, and training that can be resumed."""

from __future__ import annotations

import datetime
import json
import math
import os
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import corrnoise as cn
import wrn_data
from corrnoise import _files
from corrnoise.apps.datasets import whole_batch
from corrnoise.torch import PrivacyEngine
from wrn_layers import WideResNet, use_kernels

DELTA, HELD_OUT = 1e-5, 5_000
# name: (mechanisms, sampling)
METHODS: dict[str, tuple[list[str] | None, str]] = {
    "planner": (None, "best"),
    "dp-sgd": (["dp_sgd"], "poisson"),
}
SAVED = 60.0  # seconds between checkpoints


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
    """

    batch: int
    views: int
    epochs: int
    schedule: str = "cosine"
    momentum: float = 0.0
    clip_norm: float = 1.0


@dataclass(frozen=True)
class Run:
    """A run; a seed below 0 is held out from a part of the examples, to choose the rate."""

    method: str
    epsilon: float
    minutes: int
    recipe: Recipe
    rate: float
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.method}-{self.epsilon:g}-{self.minutes}"

    @property
    def folder(self) -> Path:
        r = self.recipe
        kind = "tune" if self.seed < 0 else f"seed{self.seed}"
        return cache() / (
            f"wrn-{self.name}-b{r.batch}-v{r.views}-e{r.epochs}-{r.schedule}-m{r.momentum:g}"
            f"-c{r.clip_norm:g}-r{self.rate:g}-{kind}"
        )


@dataclass(frozen=True)
class Machine:
    """How a run is computed, which does not change what is computed but for rounding.

    Attributes:
        rows: that go through the model at once.
        low: bfloat16 between layers; else float32 with products in TF32.
        channels_last: the layout of pictures.
        kernels: our own, for normalisation and gradients of convolutions.
    """

    rows: int = 2048
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


def set_precision() -> None:
    if device() == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True


def plan_of(run: Run, num_examples: int) -> cn.Plan:
    """From the folder of plans, or made, which takes up to some minutes."""
    r, (mechanisms, sampling) = run.recipe, METHODS[run.method]
    path = cache() / (
        f"wrn-plan-{run.method}-{run.epsilon:g}-n{num_examples}-b{r.batch}-e{r.epochs}"
        f"-m{r.momentum:g}.json"
    )
    if not path.exists():
        plan = cn.plan(
            num_examples=num_examples,
            batch_size=r.batch,
            epochs=r.epochs,
            epsilon=run.epsilon,
            delta=DELTA,
            momentum=r.momentum,
            sampling=sampling,
            mechanisms=mechanisms,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        _files.write(path, plan.to_json())
    return cn.Plan.from_json(path.read_text(encoding="utf-8"))


class Ema:
    """An exponential average of the weights whose decay grows: min(0.9999, (1 + t)/(10 + t))."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = list(params)
        self.means = [param.detach().clone() for param in params]

    def update(self, step: int) -> None:
        decay = min(0.9999, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(self.means, self._params, 1.0 - decay)

    @contextmanager
    def weights(self) -> Generator[None]:
        """The model with the averaged weights; then with its own again."""
        own = [param.detach().clone() for param in self._params]
        with torch.no_grad():
            torch._foreach_copy_(self._params, self.means)
            try:
                yield
            finally:
                torch._foreach_copy_(self._params, own)


def accuracy(net: nn.Module, pictures: Tensor, labels: Tensor) -> float:
    """In percent."""
    right = 0
    with torch.no_grad():
        for x, y in zip(pictures.split(1000), labels.split(1000), strict=True):
            right += int((net(x).argmax(1) == y).sum())
    return 100.0 * right / len(labels)


def data_of(run: Run, smoke: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is trained on, and what accuracy is measured on."""
    if smoke:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (96, 3, 8, 8), dtype=torch.uint8, generator=generator)
        y = torch.randint(0, 10, (96,), generator=generator)
        x, y, x_test, y_test, held = x[:64], y[:64], x[64:], y[64:], 16
    else:
        x, y, x_test, y_test = wrn_data.load()
        held = HELD_OUT
    if run.seed < 0:
        x, y, x_test, y_test = x[:-held], y[:-held], x[-held:], y[-held:]
    found = [part.to(device()) for part in (x, y, x_test, y_test)]
    return found[0], found[1], found[2], found[3]


def piece(plan: cn.Plan, target: float) -> int:
    """Examples of a physical batch near the target for which the fewest rows are filled up.

    A batch of B examples, a random number, takes ⌈B/size⌉·size of them.
    """
    from scipy.stats import binom

    count = plan.num_examples
    drawn = binom(count, plan.expected_batch / count)
    low, high = (int(drawn.ppf(p)) for p in (1e-4, 1 - 1e-4))
    sizes = range(max(1, math.ceil(0.6 * target)), max(1, math.ceil(1.05 * target)) + 1)
    weights = [(b, float(drawn.pmf(b))) for b in range(low, high + 1)]

    def cost(size: int) -> float:
        return sum(p * -(-b // size) * size for b, p in weights)

    return min(reversed(sizes), key=cost)


def rate_at(run: Run, step: int, num_steps: int) -> float:
    rate = run.rate * (1.0 - run.recipe.momentum)
    if run.recipe.schedule == "constant":
        return rate
    return rate * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))


def train(run: Run, machine: Machine, end: float, *, smoke: bool = False) -> dict[str, Any] | None:
    """The result of a run, or ``None`` where it must go on after ``end``."""
    kept = run.folder / "result.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    warnings.simplefilter("ignore")
    set_precision()
    x, y, x_test, y_test = data_of(run, smoke)
    plan, recipe = plan_of(run, len(y)), run.recipe
    net = machine.network(abs(run.seed), smoke=smoke)
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=run.rate, momentum=recipe.momentum)
    run.folder.mkdir(parents=True, exist_ok=True)
    engine = PrivacyEngine(
        key=run.folder / "key",
        ledger=run.folder / "ledger",
        settings={**asdict(run), "recipe": str(recipe)},
        data_fingerprint=f"CIFAR-10, {len(y)} examples",
        publishes="checkpoints",
    )
    with closing(engine):
        start = time.perf_counter()
        pictures = wrn_data.Pictures(x, y, recipe.views, run.seed, lambda: engine.steps_taken)
        _, _, loader = engine.make_private(
            module=net,
            optimizer=optimizer,
            data_loader=DataLoader(pictures, batch_size=recipe.batch, collate_fn=whole_batch),
            max_grad_norm=recipe.clip_norm,
            plan=plan,
            grad_sample_mode="one_pass",
            views=recipe.views,
        )
        step = engine.step_function(
            lambda a, b: functional.cross_entropy(net(a), b),
            size=piece(plan, machine.rows / recipe.views),
        )
        ema, before, file = Ema(params), 0.0, run.folder / "checkpoint.pt"
        if file.exists():
            found = engine.load_checkpoint(path=file, module=net, optimizer=optimizer)
            before = found["seconds"]
            torch._foreach_copy_(ema.means, found["ema"])

        def save() -> None:
            nonlocal before, start
            now = time.perf_counter()
            before, start = before + now - start, now
            engine.save_checkpoint(
                path=file,
                module=net,
                optimizer=optimizer,
                checkpoint_dict={"seconds": before, "ema": ema.means},
            )

        count, first, saved = plan.num_steps, engine.steps_taken, time.monotonic()
        while engine.steps_taken < count:
            for batch in loader:
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(run, engine.steps_taken, count)
                loss = step(*batch)
                ema.update(engine.steps_taken)
                late = time.monotonic() > end
                if (late or time.monotonic() - saved > SAVED) and engine.steps_taken < count:
                    save()
                    saved = time.monotonic()
                    shown = math.nan if loss is None else float(loss)
                    print(
                        f"{run.name} step {engine.steps_taken}/{count}, {before / 60:.1f} minutes, "
                        f"{engine.steps_taken - first} steps in this call, loss {shown:.3f}",
                        flush=True,
                    )
                    if late:  # the folder may have to travel
                        file.with_name(file.name + ".previous").unlink(missing_ok=True)
                        return None
        save()
        plain = accuracy(net, x_test, y_test)
        with ema.weights():
            averaged = accuracy(net, x_test, y_test)
    result = {
        **asdict(run),
        "accuracy": averaged,
        "plain_accuracy": plain,
        "gpu_minutes": before / 60,
        "views": recipe.views * recipe.epochs * len(y),
        "num_steps": count,
        "num_examples": len(y),
        "num_parameters": sum(param.numel() for param in params),
        "mechanism": repr(plan.mechanism),
        "sampling": plan.sampling.name,
        "noise_multiplier": plan.noise_multiplier,
        "error": plan.error,
        "machine": asdict(machine),
        "device": torch.cuda.get_device_name() if device() == "cuda" else "cpu",
        "date": datetime.date.today().isoformat(),
    }
    _files.write(kept, json.dumps(result, indent=1) + "\n")
    file.unlink()
    file.with_name(file.name + ".previous").unlink(missing_ok=True)
    return result
