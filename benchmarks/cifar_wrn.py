"""CIFAR-10 from scratch with WRN-16-4: accuracy against GPU minutes, planner's choice and DP-SGD.

    export CORRNOISE_DATA=DIR CORRNOISE_CACHE=DIR        # DIR/cifar10.npz; plans and runs
    python benchmarks/cifar_wrn.py prepare               # plans, on any machine
    python benchmarks/cifar_wrn.py probe                 # views a second, on the GPU, one minute
    python benchmarks/cifar_wrn.py tune --minutes 9      # three rates on 45,000 pictures
    python benchmarks/cifar_wrn.py run --minutes 9       # as often as it takes
    python benchmarks/cifar_wrn.py table [--json FILE]

The recipe is that of De et al. (2022): weight-standardised convolutions and GroupNorm, several
random crops and flips of each example in a step, an exponential average of the weights, SGD and
clip norm 1. Both methods see as many views of each example; batch size and momentum are those that
suit the noise of each. A call stops after --minutes, a run continues from its last checkpoint in
the next one, and its clock counts the training of all calls. Rates are chosen on 5,000 pictures
that are not trained on; the search is not part of ε. The planner's workload is that of a constant
rate.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import corrnoise as cn
import wrn_data
from corrnoise import _files, _tables
from corrnoise.apps.datasets import whole_batch
from corrnoise.torch import PrivacyEngine
from wrn_layers import WideResNet, use_kernels

DELTA, HELD_OUT = 1e-5, 5_000
EPSILONS, MINUTES = (8.0, 4.0, 2.0, 1.0), (3, 10, 30)
# name: (mechanisms, sampling)
METHODS: dict[str, tuple[list[str] | None, str]] = {
    "planner": (None, "best"),
    "dp-sgd": (["dp_sgd"], "poisson"),
}
RATES = (2.0, 4.0, 1.0)  # tried in this order; the first is the default
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


# For about 25,000 views a second. Batch and momentum are those for which n·batch/((1 - β)·error),
# what is learned over what the noise adds, is large: large batches for independent noise.
RECIPES = {
    ("planner", 3): Recipe(1024, 4, 20, momentum=0.9),
    ("planner", 10): Recipe(1024, 8, 36, momentum=0.9),
    ("planner", 30): Recipe(1024, 16, 54, momentum=0.9),
    ("dp-sgd", 3): Recipe(2048, 4, 20),
    ("dp-sgd", 10): Recipe(4096, 8, 36),
    ("dp-sgd", 30): Recipe(4096, 16, 54),
}
SMOKE = Recipe(16, 2, 2)


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
                    if late:
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


def result_of(run: Run) -> dict[str, Any] | None:
    path = run.folder / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def tuned(run: Run) -> tuple[Run, dict[float, float]]:
    """The run with the rate that is best on held-out pictures, where any was tried."""
    tried = {rate: result_of(replace(run, rate=rate, seed=-1)) for rate in RATES}
    found = {rate: got["accuracy"] for rate, got in tried.items() if got is not None}
    return replace(run, rate=max(found, key=found.__getitem__)) if found else run, found


def chosen(runs: Sequence[Run], rate: float | None) -> list[Run]:
    """With the rate that is given, or tuned in the same minutes, or in the shortest."""
    found: list[Run] = []
    for run in runs:
        if rate is not None:
            found.append(replace(run, rate=rate))
            continue
        best, tried = tuned(run)
        if not tried:
            recipe = RECIPES[run.method, MINUTES[0]]
            short, _ = tuned(replace(run, minutes=MINUTES[0], recipe=recipe))
            best = replace(run, rate=short.rate)
        found.append(best)
    return found


def table(found: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for row in found["rows"]:
        accuracies = [each["accuracy"] for each in row]
        shown = f"{statistics.mean(accuracies):.1f}"
        if len(row) > 1:
            shown += f" ± {statistics.stdev(accuracies) / len(row) ** 0.5:.1f}"
        first, recipe = row[0], row[0]["recipe"]
        rows.append(
            [
                f"{first['epsilon']:g}", first["method"],
                f"{statistics.mean(each['gpu_minutes'] for each in row):.1f}", f"{shown} %",
                f"{statistics.mean(each['plain_accuracy'] for each in row):.1f} %",
                f"{first['mechanism']}, {first['sampling']}",
                f"{recipe['batch']}", f"{recipe['views']}", f"{recipe['epochs']}",
                f"{first['rate']:g}", str(len(row)),
            ]
        )  # fmt: skip
    columns = (
        "ε", "method", "GPU minutes", "averaged weights", "last weights", "mechanism",
        "batch", "views", "epochs", "rate", "seeds",
    )  # fmt: skip
    return _tables.markdown(columns, rows)


def results() -> list[list[dict[str, Any]]]:
    """What is finished, the seeds of one setting together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(cache().glob("wrn-*-seed*/result.json")):
        groups.setdefault(path.parent.name.rpartition("-")[0], []).append(
            json.loads(path.read_text(encoding="utf-8"))
        )
    return sorted(groups.values(), key=lambda row: (-row[0]["epsilon"], row[0]["minutes"]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("prepare", "check", "probe", "tune", "run", "table"))
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after them")
    parser.add_argument(
        "--only", action="append", help="METHOD-EPSILON-MINUTES, such as dp-sgd-8-10"
    )
    for name in ("batch", "views", "epochs"):
        parser.add_argument(f"--{name}", type=int, help="instead of the recipe's")
    parser.add_argument("--schedule", choices=("constant", "cosine"), help="likewise")
    parser.add_argument("--momentum", type=float, help="likewise")
    parser.add_argument("--rate", type=float, help="instead of the tuned one")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=Machine.rows, help="in the model at once")
    parser.add_argument("--precision", choices=("bf16", "tf32"), default="bf16")
    parser.add_argument("--layout", choices=("last", "first"), default="last", help="of channels")
    parser.add_argument("--no-kernels", action="store_true", help="torch's operations alone")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the table's rows there")
    given = parser.parse_args(arguments)
    if "CORRNOISE_CACHE" not in os.environ:
        parser.error("set CORRNOISE_CACHE to a folder that keeps plans and runs")
    machine = Machine(
        given.rows, given.precision == "bf16", given.layout == "last", not given.no_kernels
    )  # fmt: skip
    changes = {
        name: value
        for name in ("batch", "views", "epochs", "schedule", "momentum")
        if (value := getattr(given, name)) is not None
    }
    runs = [
        Run(method, epsilon, minutes,
            replace(SMOKE if given.smoke else RECIPES[method, minutes], **changes), RATES[0])
        for minutes in MINUTES
        for epsilon in EPSILONS
        for method in METHODS
    ]  # fmt: skip
    runs = [run for run in runs if given.only is None or run.name in given.only]
    if not runs:
        parser.error(f"--only must name a run, such as planner-8-10, got {given.only}")
    end = time.monotonic() + 60.0 * given.minutes
    if given.command == "prepare":
        for run in runs:
            for seed in (-1, 0):
                count = len(data_of(replace(run, seed=seed), True)[1]) if given.smoke else (
                    50_000 - (HELD_OUT if seed < 0 else 0)
                )  # fmt: skip
                plan = plan_of(run, count)
                print(f"{run.name} {count}: {plan.mechanism} {plan.sampling.name} {plan.error:.4g}")
    elif given.command in ("check", "probe"):
        import wrn_probe

        wrn_probe.check() if given.command == "check" else wrn_probe.probe(given.minutes)
    elif given.command == "table":
        found = {"delta": DELTA, "rows": results()}
        print(table(found))
        if given.json:
            _files.write(given.json, json.dumps(found, indent=1) + "\n")
    else:
        if given.command == "tune":
            rates = RATES if given.rate is None else (given.rate,)
            runs = [replace(run, rate=rate, seed=-1) for run in runs for rate in rates]
        else:
            runs = chosen(runs, given.rate)
            runs = [replace(run, seed=seed) for run in runs for seed in range(given.seeds)]
        execute(runs, machine, end, smoke=given.smoke)


def execute(runs: Sequence[Run], machine: Machine, end: float, *, smoke: bool) -> None:
    """One run after the other, until the time is over."""
    for run in runs:
        if time.monotonic() > end:
            print(f"{run.name} is still to be run")
            continue
        got = train(run, machine, end, smoke=smoke)
        if got is not None:
            print(
                f"{run.name} rate {run.rate:g} {'held out' if run.seed < 0 else 'test'}: "
                f"{got['accuracy']:.2f} % averaged, {got['plain_accuracy']:.2f} % last, "
                f"{got['gpu_minutes']:.2f} minutes",
                flush=True,
            )


if __name__ == "__main__":
    main()
