"""Table 2 of the paper: CIFAR-10, five methods, amplified and not, trained by this project."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise.noise.filters import Filter

from . import markdown, noise_table, style
from .jobs import Job, cached_plan, cuda, run_all
from .markdown import Claim
from .progress import Progress
from .record import SEED
from .settings import METHODS, Row, select

TITLE = "Accuracy on CIFAR-10"
NUM_EXAMPLES, BATCH_SIZE, CLIP_NORM, NUM_SEEDS = 50_000, 512, 10.0, 3
# The paper's learning rates belong to m ← βm + (1-β)x̂; those of its Algorithm 1 are a tenth.
RATES = {
    "balls-in-bins": {"dp_sgd": 0.1, "bsr": 0.3, "bisr": 0.7, "band_mf": 0.3, "band_inv_mf": 0.4},
    "fixed": {"dp_sgd": 0.1, "bsr": 0.2, "bisr": 0.7, "band_mf": 0.2, "band_inv_mf": 0.5},
}
# As printed, after the last epoch, in the order of ``noise_table.COMPARED``.
PRINTED = {
    "balls-in-bins": (44.6, 49.8, 61.8, 50.0, 57.4),
    "fixed": (39.0, 45.2, 56.2, 45.8, 57.9),
}
NAMES = {"balls-in-bins": "amplified", "fixed": "not amplified"}
# What a machine without a GPU does instead, and what a test does.
REDUCED = {"num_examples": 2_000, "batch_size": 100, "epochs": 1}
SMOKE = {"num_examples": 180, "batch_size": 9, "epochs": 1}


def plan_of(
    method: str, sampling: Any, *, num_examples: int, batch_size: int, epochs: int
) -> cn.Plan:
    """(9, 1e-5)-DP with the paper's bandwidth, for the coefficients that run in float32."""
    key = f"cifar10 {method} {sampling} {num_examples} {batch_size} {epochs}"
    return cached_plan(key, lambda: _plan(method, sampling, num_examples, batch_size, epochs))


def _plan(method: str, sampling: Any, num_examples: int, batch_size: int, epochs: int) -> cn.Plan:
    b = -(-num_examples // batch_size)
    participation = cn.Participation(epochs * b, b, epochs)
    own = noise_table.DATASETS["CIFAR-10"]
    workload = cn.workloads.sgd(
        participation.num_steps, momentum=own["momentum"], decay=own["decay"]
    )
    made = noise_table.mechanism(method, workload, participation)
    found = cn.calibrate(
        Filter.of(made).realized,
        participation,
        epsilon=noise_table.EPSILON,
        delta=noise_table.DELTA,
        sampling=sampling,
        seed=SEED,
    )
    return cn.Plan(num_examples=num_examples, batch_size=batch_size, calibration=found)


def run(*, smoke: bool, progress: Progress | None) -> dict[str, Any]:
    """Train every method with three seeds; on a CPU, a small part of it."""
    gpu = cuda() and not smoke
    size = {"num_examples": NUM_EXAMPLES, "batch_size": BATCH_SIZE, "epochs": noise_table.EPOCHS}
    size = size if gpu else SMOKE if smoke else REDUCED
    seeds = range(NUM_SEEDS) if gpu else range(1)
    methods = noise_table.COMPARED if gpu else ("dp_sgd", "bisr")
    samplings = noise_table.SAMPLINGS if gpu else ("fixed",)
    plans = {(m, s): plan_of(m, s, **size) for s in samplings for m in methods}
    jobs = [
        Job(
            name=f"{method}/{sampling}",
            plan=plan.to_json(),
            seed=seed,
            rate=RATES[sampling][method] * (1 - 0.9),
            clip_norm=CLIP_NORM,
            size=None if gpu else size["num_examples"],
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
                "kind": plan.calibration.kind,
                "rate": RATES[sampling][method] * (1 - 0.9),
                "mean": statistics.mean(last),
                "standard_error": (
                    statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None
                ),
                "accuracy": [one["accuracy"] for one in runs],
                "printed": PRINTED[sampling][noise_table.COMPARED.index(method)],
                "seconds": [one["seconds"] for one in runs],
            }
        )
    return {"reduced": not gpu, **size, "device": device_name(), "rows": rows}


def device_name() -> str:
    """What the training ran on."""
    import torch

    return torch.cuda.get_device_name() if cuda() else "CPU"


def draw(result: dict[str, Any], folder: Path) -> None:
    """Accuracy after each epoch, mean of the seeds, with the spread of them."""
    rows = result["data"]["rows"]
    samplings = list(dict.fromkeys(row["sampling"] for row in rows))
    with style.sheet(result, folder, 1, len(samplings), (4.5 * len(samplings), 3.6)) as (
        figure,
        axes,
    ):
        for panel, sampling in zip(axes[0], samplings, strict=True):
            for row in select(rows, sampling=sampling):
                curves = [[100 * value for value in seed] for seed in row["accuracy"]]
                epochs = range(1, len(curves[0]) + 1)
                each = list(zip(*curves, strict=True))
                colour = style.COLOURS[row["method"]]
                panel.plot(
                    epochs,
                    [statistics.mean(values) for values in each],
                    color=colour,
                    marker="o",
                    markersize=3,
                    label=METHODS[row["method"]],
                )
                low, high = [min(values) for values in each], [max(values) for values in each]
                panel.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
            panel.set(title=NAMES[sampling], xlabel="epoch")
        axes[0][0].set_ylabel("test accuracy, %")
        style.legend(figure, axes[0])


def report(result: dict[str, Any]) -> str:
    """The table beside the printed one."""
    data = result["data"]
    rows = data["rows"]
    if data["reduced"]:
        head = (
            f"**Reduced**: no GPU was there, so {data['num_examples']} images and "
            f"{data['epochs']} epoch; it shows that everything runs, and nothing else."
        )
    else:
        head = (
            f"({noise_table.EPSILON:g}, {noise_table.DELTA:g})-DP, {data['num_examples']:,} "
            f"training images, batch {data['batch_size']}, {data['epochs']} epochs, no "
            f"augmentation, constant learning rate, {len(rows[0]['accuracy'])} seeds, the official "
            f"test set after the last epoch; trained on one {data['device']} through "
            "`corrnoise.torch.PrivacyEngine`."
        )
    header = ["", "noise", "learning rate", "accuracy, %", "printed, %"]
    lines = [
        [
            f"{METHODS[row['method']]}, {NAMES[row['sampling']]}",
            f"{row['noise_multiplier']:.3f}",
            f"{row['rate']:.2g}",
            f"{row['mean']:.1f}"
            + (f" ± {row['standard_error']:.1f}" if row["standard_error"] is not None else ""),
            f"{row['printed']:.1f}",
        ]
        for row in rows
    ]
    parts = [head, markdown.table(header, lines, numbers=True)]
    if not data["reduced"]:
        parts.append(markdown.claims([_claim(rows, sampling) for sampling in NAMES]))
    return "\n\n".join(parts)


def _claim(rows: list[Row], sampling: str) -> Claim:
    mine = {row["method"]: row["mean"] for row in select(rows, sampling=sampling)}
    inverse = min(mine["bisr"], mine["band_inv_mf"])
    banded = max(mine["bsr"], mine["band_mf"])
    return Claim(
        f"{NAMES[sampling]}: inverse methods are far above BSR and Band-MF, and all above DP-SGD",
        markdown.verdict(inverse > banded > mine["dp_sgd"]),
        f"inverse at least {inverse:.1f}, banded at most {banded:.1f}, DP-SGD {mine['dp_sgd']:.1f}",
    )
