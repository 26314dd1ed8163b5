"""Adam at the user's learning rates on handwritten digits: the table of docs/adam.md.

    python benchmarks/adam_digits.py [--quick] [--json FILE]

Data, split, model, batches and budget are those of digits.py: 20 epochs of batches of 64 at
(3, 1e-4)-DP, clip norm 1. Nothing is tuned: learning rates 1e-3 and 1e-2, Adam's own betas. A seed
is the model's initial weights; noise and batches are fresh.

Scale-then-privatize (arXiv 2507.01129) divides each example's gradient by the root of the second
moment of what was released before, then clips, adds noise and takes the mean, with no further
division. Its scaling has mean square 1, so that the clip norm keeps its meaning, and its steps are
divided by the same number as ours. "corrected" takes the noise out of its second moment as ours
does; without that, coordinates that had large noise get small gradients.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine as StockEngine
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

import corrnoise as cn
import digits
from corrnoise import _files
from corrnoise.torch import Adam, PrivacyEngine
from corrnoise.torch.gradient_noise import GradientNoise

EPSILON, BETA1, BETA2 = 3.0, 0.9, 0.999
RATES = (1e-3, 1e-2)
Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def plan_for(mechanism: str | None, sampling: str, num_examples: int, epochs: int) -> cn.Plan:
    options: dict[str, Any] = {} if mechanism is None else {"mechanisms": [mechanism]}
    if mechanism == "bisr":
        options["num_bands"] = 4
    return cn.plan(
        num_examples=num_examples,
        batch_size=digits.BATCH,
        epochs=epochs,
        epsilon=EPSILON,
        delta=digits.DELTA,
        momentum=BETA1,
        sampling=sampling,
        **options,
    )


def accuracy(net: Any, split: Split) -> float:
    with torch.no_grad():
        return (net(split[2]).argmax(dim=1) == split[3]).float().mean().item()


def loop(net: Any, optimizer: Any, loader: Any, epochs: int) -> None:
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


def noise_of(plan: cn.Plan) -> GradientNoise:
    return GradientNoise(plan.mechanism, plan.noise_multiplier * digits.CLIP / plan.divisor)


def step_noise(plan: cn.Plan) -> float:
    """The standard deviation of the noise in a coordinate of the gradient, at the last step."""
    return float(noise_of(plan).variances[-1]) ** 0.5


def stock(rate: float, seed: int, split: Split, epochs: int) -> float:
    """Opacus as its users run it: Poisson batches, independent noise, torch's Adam."""
    net = network(seed)
    net, optimizer, loader = StockEngine().make_private_with_epsilon(
        module=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=rate),
        data_loader=DataLoader(TensorDataset(*split[:2]), batch_size=digits.BATCH),
        target_epsilon=EPSILON,
        target_delta=digits.DELTA,
        epochs=epochs,
        max_grad_norm=digits.CLIP,
    )
    loop(net, optimizer, loader, epochs)
    return accuracy(net, split)


def ours(plan: cn.Plan, kind: Any, rate: float, seed: int, split: Split, epochs: int) -> float:
    net = network(seed)
    net, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=kind(net.parameters(), lr=rate),
        data_loader=DataLoader(TensorDataset(*split[:2]), batch_size=digits.BATCH),
        max_grad_norm=digits.CLIP,
        plan=plan,
    )
    loop(net, optimizer, loader, epochs)
    return accuracy(net, split)


def scaled(plan: cn.Plan, rate: float, seed: int, split: Split, *, corrected: bool) -> float:
    """Scale-then-privatize."""
    x, y = split[:2]
    net = network(seed)
    key = cn.noise.Key.generate()
    noise, batches = cn.noise.CorrelatedNoise(plan.mechanism, key), plan.batches(key)
    known = noise_of(plan)
    unit, spread = known.independent(BETA1), known.deviations(BETA2) / known.second_moment(BETA2)

    def loss(weights: Any, image: Any, label: Any) -> Any:
        return nn.functional.cross_entropy(functional_call(net, weights, image), label)

    weights = {name: value.detach() for name, value in net.named_parameters()}
    size = sum(value.numel() for value in weights.values())
    scale, first = torch.ones(size), torch.zeros(size)
    second, noisy = torch.zeros(size), torch.zeros(size)
    for step in range(plan.num_steps):
        here = torch.from_numpy(batches.indices(step))
        each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x[here], y[here])
        rows = torch.cat([g.flatten(1) for g in each.values()], 1) * scale
        factors = (digits.CLIP / rows.norm(dim=1).clamp(min=1e-12)).clamp(max=1.0)
        total = factors @ rows
        noise.add_([total], step, scale=plan.noise_multiplier * digits.CLIP)
        total /= plan.divisor
        first = BETA1 * first + (1 - BETA1) * total
        move = rate * first / (1 - BETA1 ** (step + 1)) / unit
        parts = move.split([value.numel() for value in weights.values()])
        weights = {
            name: value - part.view_as(value)
            for (name, value), part in zip(weights.items(), parts, strict=True)
        }
        second = BETA2 * second + (1 - BETA2) * (total / scale) ** 2
        noisy = BETA2 * noisy + (1 - BETA2) * float(known.variances[step]) / scale**2
        right = 1 - BETA2 ** (step + 1)
        below = second / right
        if corrected:
            sure = (1.0 + 3.0 * float(spread[step])) * noisy / right
            below = (below - sure).clamp_min(0.0) + unit**2
        scale = 1.0 / (below.sqrt() + 1e-8)
        scale /= scale.square().mean().sqrt()
    return accuracy(lambda inputs: functional_call(net, weights, inputs), split)


def run(epochs: int, seeds: int) -> dict[str, Any]:
    split = digits.data()
    best = plan_for(None, "balls-in-bins", len(split[0]), epochs)
    bisr = plan_for("bisr", "balls-in-bins", len(split[0]), epochs)
    plain = plan_for("dp_sgd", "poisson", len(split[0]), epochs)
    adam = torch.optim.Adam
    methods: dict[str, Any] = {
        "stock Opacus, Adam": lambda rate, seed: stock(rate, seed, split, epochs),
        "DP-SGD Poisson, torch's Adam": lambda r, s: ours(plain, adam, r, s, split, epochs),
        "DP-SGD Poisson, our Adam": lambda r, s: ours(plain, Adam, r, s, split, epochs),
        "planner's choice, torch's Adam": lambda r, s: ours(best, adam, r, s, split, epochs),
        "planner's choice, our Adam": lambda r, s: ours(best, Adam, r, s, split, epochs),
        "BISR p = 4, torch's Adam": lambda r, s: ours(bisr, adam, r, s, split, epochs),
        "BISR p = 4, our Adam": lambda r, s: ours(bisr, Adam, r, s, split, epochs),
        "planner's choice, scale-then-privatize": lambda r, s: scaled(
            best, r, s, split, corrected=False
        ),
        "planner's choice, scale-then-privatize, corrected": lambda r, s: scaled(
            best, r, s, split, corrected=True
        ),
    }
    rows: list[dict[str, Any]] = []
    for method, train in methods.items():
        start = time.perf_counter()
        found = {f"{rate:g}": [train(rate, seed) for seed in range(seeds)] for rate in RATES}
        seconds = time.perf_counter() - start
        rows.append({"method": method, "accuracy": found, "seconds": seconds})
        print(json.dumps(rows[-1]), flush=True)
    return {
        "epsilon": EPSILON,
        "delta": digits.DELTA,
        "epochs": epochs,
        "seeds": seeds,
        "planned": {"best": repr(best.mechanism), "noise_multiplier": best.noise_multiplier},
        "step_noise": {"planner's choice": step_noise(best), "DP-SGD Poisson": step_noise(plain)},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    rates = list(result["rows"][0]["accuracy"])
    lines = [
        "| method | " + " | ".join(f"learning rate {rate}" for rate in rates) + " |",
        "|---|" + "---:|" * len(rates),
    ]
    for row in result["rows"]:
        cells = [
            f"{100 * statistics.mean(row['accuracy'][rate]):.1f} ± "
            f"{100 * statistics.stdev(row['accuracy'][rate]) / result['seeds'] ** 0.5:.1f} %"
            for rate in rates
        ]
        lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 epochs, 2 seeds")
    parser.add_argument("--json", type=Path, help="write the result there")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    result = run(2, 2) if given.quick else run(20, 10)
    print(table(result))
    if given.json:
        _files.write(given.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
