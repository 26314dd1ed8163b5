"""One run of the wide residual network, which can be resumed."""

from __future__ import annotations

import datetime
import json
import math
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import corrnoise as cn
import wrn_data
from corrnoise import _files
from corrnoise.apps.datasets import whole_batch
from corrnoise.apps.training import sgd_settings
from corrnoise.torch import PrivacyEngine
from wrn_settings import Machine, Run, data_of, device, plan_of, set_precision

SAVED = 60.0  # seconds between checkpoints
# Averages of the weights: the largest decay, and k of the warm-up (1 + t)/(k + t), which is an
# average with weights like t^(k - 2), so mostly of the last k-th of the steps so far. With k = 10
# that of 0.999 is the same as of 0.9999 up to step 8,990, which no recipe here reaches.
AVERAGES = {"tenth": (0.9999, 10), "quarter": (0.9999, 4), "hundred": (0.99, 10)}


class Ema:
    """An exponential average of the weights whose decay grows: min(decay, (1 + t)/(k + t))."""

    def __init__(self, params: Sequence[nn.Parameter], decay: float, warm: int) -> None:
        self._params, self._decay, self._warm = list(params), decay, warm
        self.means = [param.detach().clone() for param in params]

    def update(self, step: int) -> None:
        decay = min(self._decay, (1 + step) / (self._warm + step))
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


def accuracies(
    net: nn.Module, averages: dict[str, Ema], pictures: Tensor, labels: Tensor
) -> dict[str, float]:
    """Of the last weights and of each average."""
    found = {"last": accuracy(net, pictures, labels)}
    for name, ema in averages.items():
        with ema.weights():
            found[name] = accuracy(net, pictures, labels)
    return found


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


def optimizer_of(run: Run, net: nn.Module) -> torch.optim.SGD:
    """With decay for weights alone: biases, gains and scales keep what they are."""
    recipe, params = run.recipe, list(net.parameters())
    momentum, decay = sgd_settings(recipe.momentum, recipe.decay, run.rate_at(0, 1))
    if recipe.decay == 1.0:
        return torch.optim.SGD(params, lr=run.rate, momentum=momentum)
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": decay},
        {"params": [param for param in params if param.dim() == 1]},
    ]
    return torch.optim.SGD(groups, lr=run.rate, momentum=momentum)


def with_average(run: Run, result: dict[str, Any]) -> dict[str, Any]:
    """A result with the accuracy of the run's average, or the best one of pictures held out."""
    found = result["accuracies"]
    best = max(found, key=found.__getitem__) if run.seed < 0 else run.average
    return {**result, "average": best, "accuracy": found[best]}


def train(
    run: Run, machine: Machine, end: float, *, shown: int = 0, smoke: bool = False
) -> dict[str, Any] | None:
    """The result of a run, or ``None`` where it must go on after ``end``.

    Args:
        run: which.
        machine: how it is computed.
        end: of ``time.monotonic``.
        shown: how often held-out accuracy and the norm of the weights are shown; never that on
            the test set.
        smoke: with a tiny network and a few random pictures.
    """
    kept = run.folder / "result.json"
    if kept.exists():  # perhaps since then another average was chosen
        result = with_average(run, json.loads(kept.read_text(encoding="utf-8")))
        _files.write(kept, json.dumps(result, indent=1) + "\n")
        return result
    warnings.simplefilter("ignore")
    set_precision()
    x, y, x_test, y_test = data_of(run, smoke)
    recipe, private = run.recipe, math.isfinite(run.epsilon)
    net = machine.network(abs(run.seed), smoke=smoke)
    params, optimizer = list(net.parameters()), optimizer_of(run, net)
    run.folder.mkdir(parents=True, exist_ok=True)
    engine = PrivacyEngine(
        key=run.folder / "key",
        ledger=run.folder / "ledger",
        settings={**asdict(run), "epsilon": str(run.epsilon), "recipe": str(recipe)},
        data_fingerprint=f"CIFAR-10, {len(y)} examples",
        publishes="checkpoints",
    )
    noise: dict[str, Any] = {"plan": plan_of(run, len(y))} if private else {
        "noise_multiplier": 0.0, "epochs": recipe.epochs, "mechanism": "dp_sgd",
        "sampling": "poisson",
    }  # fmt: skip
    with closing(engine):
        start = time.perf_counter()
        pictures = wrn_data.Pictures(x, y, recipe.views, run.seed, lambda: engine.steps_taken)
        _, _, loader = engine.make_private(
            module=net,
            optimizer=optimizer,
            data_loader=DataLoader(pictures, batch_size=recipe.batch, collate_fn=whole_batch),
            max_grad_norm=recipe.clip_norm,
            grad_sample_mode="one_pass",
            views=recipe.views,
            **noise,
        )
        plan = engine.plan
        assert plan is not None
        step = engine.step_function(
            lambda a, b: functional.cross_entropy(net(a), b),
            size=piece(plan, machine.rows / recipe.views),
        )
        averages = {name: Ema(params, *kind) for name, kind in AVERAGES.items()}
        before, file = 0.0, run.folder / "checkpoint.pt"
        if file.exists():
            found = engine.load_checkpoint(path=file, module=net, optimizer=optimizer)
            before = found["seconds"]
            for name, ema in averages.items():
                torch._foreach_copy_(ema.means, found["averages"][name])

        def save() -> None:
            nonlocal before, start
            now = time.perf_counter()
            before, start = before + now - start, now
            engine.save_checkpoint(
                path=file,
                module=net,
                optimizer=optimizer,
                checkpoint_dict={
                    "seconds": before,
                    "averages": {name: ema.means for name, ema in averages.items()},
                },
            )

        count, first, saved = plan.num_steps, engine.steps_taken, time.monotonic()
        while engine.steps_taken < count:
            for batch in loader:
                now = engine.steps_taken
                for group in optimizer.param_groups:
                    group["lr"] = run.rate_at(now, count)
                loss = step(*batch)
                for ema in averages.values():
                    ema.update(engine.steps_taken)
                if run.seed < 0 and engine.steps_taken * shown // count > now * shown // count:
                    begun = time.perf_counter()
                    found = accuracies(net, averages, x_test, y_test)
                    show(run, engine.steps_taken, count, params, loss, found)
                    start += time.perf_counter() - begun  # it is not part of the training
                late = time.monotonic() > end
                if (late or time.monotonic() - saved > SAVED) and engine.steps_taken < count:
                    save()
                    saved = time.monotonic()
                    print(
                        f"{run.name} step {engine.steps_taken}/{count}, {before / 60:.1f} minutes, "
                        f"{engine.steps_taken - first} steps in this call",
                        flush=True,
                    )
                    if late:  # the folder may have to travel
                        file.with_name(file.name + ".previous").unlink(missing_ok=True)
                        return None
        save()
        found = accuracies(net, averages, x_test, y_test)
    result = {
        **asdict(run),
        "accuracies": found,
        "plain_accuracy": found["last"],
        "weight_norm": norm_of(params),
        "gpu_minutes": before / 60,
        "views": recipe.views * recipe.epochs * len(y),
        "num_steps": count,
        "num_examples": len(y),
        "num_parameters": sum(param.numel() for param in params),
        "mechanism": repr(plan.mechanism),
        "sampling": plan.sampling.name,
        "noise_multiplier": plan.noise_multiplier,
        "error": plan.error if private else 0.0,
        "machine": asdict(machine),
        "device": torch.cuda.get_device_name() if device() == "cuda" else "cpu",
        "date": datetime.date.today().isoformat(),
    }
    result = with_average(run, result)
    _files.write(kept, json.dumps(result, indent=1) + "\n")
    file.unlink()
    file.with_name(file.name + ".previous").unlink(missing_ok=True)
    return result


def norm_of(params: Sequence[Tensor]) -> float:
    with torch.no_grad():
        return math.sqrt(sum(float(param.square().sum()) for param in params))


def show(
    run: Run, step: int, count: int, params: Sequence[Tensor], loss: Any, found: dict[str, float]
) -> None:
    """One line in the course of a run."""
    accuracies = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
    last = math.nan if loss is None else float(loss)
    print(
        f"  {run.name} rate {run.rate:g} step {step}/{count}: loss {last:.3f}, "
        f"norm of the weights {norm_of(params):.1f}, held out {accuracies}",
        flush=True,
    )
