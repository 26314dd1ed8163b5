"""A table of accuracies: five methods, amplified and not, three seeds, beside the printed ones.

And DP-SGD with Poisson batches, which the paper does not have and most people run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import corrnoise as cn
from corrnoise import _tables
from corrnoise._progress import Progress

from . import markdown, noise_table, style
from .jobs import Job, cached_plan, run_all
from .record import SEED
from .settings import METHODS, Row, select

NUM_SEEDS = 3
NAMES = {"balls-in-bins": "amplified", "fixed": "not amplified", "poisson": "Poisson"}
USUAL = ("dp_sgd", "poisson")


class Setting(NamedTuple):
    """How a method trains: the learning rate of m ← βm + x̂, and C."""

    rate: float
    clip_norm: float


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: as in ``Job``.
        dataset: as in ``noise_table``, which has momentum and decay.
        printed: the paper's accuracies, in the order of ``noise_table.COMPARED``.
        options: more for ``corrnoise.apps.training.train``.
        seeds: how many, by sampling; three each by default.
    """

    name: str
    dataset: str
    printed: Mapping[str, Sequence[float]]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seeds: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, NUM_SEEDS))

    def methods(self, *, gpu: bool) -> Sequence[str]:
        """Those that are compared; without a GPU, two."""
        return noise_table.COMPARED if gpu else ("dp_sgd", "bisr")

    def plan(self, method: str, sampling: str, size: Mapping[str, int]) -> cn.Plan:
        """(9, 1e-5)-DP with the paper's bandwidth, for the coefficients that run in float32."""
        num_examples, batch_size, epochs = (
            size[k] for k in ("num_examples", "batch_size", "epochs")
        )

        def make() -> cn.Plan:
            own = noise_table.DATASETS[self.dataset]
            b = -(-num_examples // batch_size)
            part = cn.Participation(epochs * b, b, epochs)
            workload = cn.workloads.sgd(
                part.num_steps, momentum=own["momentum"], decay=own["decay"]
            )
            found = cn.calibrate(
                noise_table.mechanism(method, workload, part).in_float32(),
                part,
                epsilon=noise_table.EPSILON,
                delta=noise_table.DELTA,
                sampling=sampling,
                seed=SEED,
            )
            return cn.Plan(num_examples=num_examples, batch_size=batch_size, calibration=found)

        key = f"{self.name} {method} {sampling} {num_examples} {batch_size} {epochs}"
        return cached_plan(key, make)

    def job(self, name: str, plan: cn.Plan, setting: Setting, seed: int, **more: Any) -> Job:
        """One run of the task."""
        return Job(
            name=name,
            plan=plan.to_json(),
            seed=seed,
            rate=setting.rate,
            clip_norm=setting.clip_norm,
            options=tuple(self.options.items()),
            task=self.name,
            **more,
        )

    def run(
        self,
        size: Mapping[str, int],
        *,
        gpu: bool,
        setting: Callable[[str, str, cn.Plan], Setting],
        progress: Progress | None,
        finished: Sequence[Row] = (),
    ) -> list[Row]:
        """Train every method with every seed; without a GPU, two methods and one seed.

        Rows of ``finished`` are kept, and what they lack of the seeds is trained as they were. A
        row whose noise would be another one now is trained anew, unless it lacks nothing.
        """
        samplings = noise_table.SAMPLINGS if gpu else ("fixed",)
        cases = [(method, sampling) for sampling in samplings for method in self.methods(gpu=gpu)]
        cases.append(USUAL)
        seeds = {case: self.seeds[case[1]] if gpu else 1 for case in cases}
        kept = {(row["method"], row["sampling"]): row for row in finished}
        whole = {case: row for case, row in kept.items() if len(row["accuracy"]) >= seeds[case]}
        plans = {
            (method, sampling): self.plan(method, sampling, size)
            for method, sampling in cases
            if (method, sampling) not in whole
        }
        chosen: dict[tuple[str, str], Setting] = {}
        found: dict[str, dict[int, Any]] = {"/".join(case): {} for case in plans}
        for case, plan in plans.items():
            row = kept.get(case)
            same = row is not None and math.isclose(
                row["noise_multiplier"], plan.noise_multiplier, rel_tol=1e-6
            )
            if row is not None and same:
                chosen[case] = Setting(row["rate"], row["clip_norm"])
                runs = zip(row["accuracy"], row["seconds"], strict=True)
                found["/".join(case)] = {
                    seed: {"accuracy": values, "seconds": seconds}
                    for seed, (values, seconds) in enumerate(runs)
                }
            else:
                chosen[case] = setting(*case, plan)
        jobs = [
            self.job(
                "/".join(case), plan, chosen[case], seed, size=None if gpu else size["num_examples"]
            )
            for seed in range(max(self.seeds.values()))
            for case, plan in plans.items()
            if seed < seeds[case] and seed not in found["/".join(case)]
        ]
        done = run_all(jobs, device="cuda" if gpu else "cpu")
        for count, (job, result) in enumerate(done, 1):
            found[job.name][job.seed] = result
            if progress is not None:
                progress(count, len(jobs))
        rows = whole | {
            (method, sampling): {
                "method": method,
                "sampling": sampling,
                "noise_multiplier": plan.noise_multiplier,
                "kind": plan.calibration.kind,
                "rate": chosen[method, sampling].rate,
                "clip_norm": chosen[method, sampling].clip_norm,
                **summary([run for _, run in sorted(found[f"{method}/{sampling}"].items())]),
                "printed": None
                if (method, sampling) == USUAL
                else self.printed[sampling][noise_table.COMPARED.index(method)],
            }
            for (method, sampling), plan in plans.items()
        }
        return [rows[case] for case in cases]


def summary(runs: Sequence[Mapping[str, Any]]) -> Row:
    """Mean and standard error after the last epoch, and all that they come from."""
    last = [100 * one["accuracy"][-1] for one in runs]
    return {
        "mean": statistics.mean(last),
        "standard_error": statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None,
        "accuracy": [one["accuracy"] for one in runs],
        "seconds": [one["seconds"] for one in runs],
    }


def percent(row: Row, digits: int = 1) -> str:
    """The mean and its standard error."""
    error = row["standard_error"]
    return f"{row['mean']:.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "")


def device_name() -> str:
    """What the training ran on."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def draw(result: dict[str, Any], folder: Path) -> None:
    """Accuracy after each epoch, mean of the seeds, with the spread of them.

    DP-SGD with Poisson batches is a dashed line in every panel.
    """
    rows = result["data"]["rows"]
    samplings = list(dict.fromkeys(row["sampling"] for row in rows if row["sampling"] != USUAL[1]))
    with style.sheet(result, folder, 1, len(samplings), (4.5 * len(samplings), 3.6)) as (
        figure,
        axes,
    ):
        for panel, sampling in zip(axes[0], samplings, strict=True):
            for row in select(rows, sampling=sampling) + select(rows, sampling=USUAL[1]):
                usual = row["sampling"] == USUAL[1]
                each = [[100 * v for v in values] for values in zip(*row["accuracy"], strict=True)]
                epochs = range(1, len(each) + 1)
                colour = style.COLOURS[row["method"]]
                panel.plot(
                    epochs,
                    [statistics.mean(values) for values in each],
                    color=colour,
                    marker="o",
                    markersize=3,
                    linestyle="--" if usual else "-",
                    label=METHODS[row["method"]] + (f", {NAMES[USUAL[1]]}" if usual else ""),
                )
                low, high = [min(values) for values in each], [max(values) for values in each]
                panel.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
            panel.set(title=NAMES[sampling], xlabel="epoch")
            panel.xaxis.get_major_locator().set_params(integer=True)
        axes[0][0].set_ylabel("test accuracy, %")
        style.legend(figure, axes[0])


def table(rows: Sequence[Row], printed: str, digits: int = 1) -> str:
    """The rows in Markdown; ``printed`` heads the paper's column."""
    lines = [
        [
            f"{METHODS[row['method']]}, {NAMES[row['sampling']]}",
            f"{row['noise_multiplier']:.3f}",
            row["kind"],
            f"{row['rate']:.2g}",
            percent(row, digits),
            "" if row["printed"] is None else f"{row['printed']:.{digits}f}",
        ]
        for row in rows
    ]
    header = ["", "noise", "kind", "learning rate", "accuracy, %", printed]
    return _tables.markdown(header, lines, left=(0,))


def means(rows: Sequence[Row], sampling: str) -> dict[str, float]:
    """The mean of each method."""
    return {row["method"]: row["mean"] for row in select(rows, sampling=sampling)}


def claims(rows: Sequence[Row]) -> str:
    """Whether the paper's order of the methods holds, in Markdown."""
    return markdown.claims([_claim(rows, sampling) for sampling in noise_table.SAMPLINGS])


def kept_note(data: Mapping[str, Any]) -> list[str]:
    """Where rows of an earlier run were kept, in Markdown."""
    when = data.get("kept_from")
    return [] if when is None else [f"Rows that were finished in the run of {when} were kept."]


def _claim(rows: Sequence[Row], sampling: str) -> markdown.Claim:
    mine = means(rows, sampling)
    inverse = min(mine["bisr"], mine["band_inv_mf"])
    banded = max(mine["bsr"], mine["band_mf"])
    return markdown.Claim(
        f"{NAMES[sampling]}: inverse methods are above BSR and Band-MF, and all above DP-SGD",
        markdown.verdict(inverse > banded > mine["dp_sgd"]),
        f"inverse at least {inverse:.1f}, banded at most {banded:.1f}, DP-SGD {mine['dp_sgd']:.1f}",
    )
