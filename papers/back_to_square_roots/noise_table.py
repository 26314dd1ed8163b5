"""Tables 1 and 3 of the paper: the noise that (9, 1e-5)-DP requires, amplified and not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise import _tables
from corrnoise._progress import Progress, tracked
from corrnoise._rounding import with_decimals

from . import markdown, style
from .markdown import Claim
from .record import SEED
from .settings import METHODS, Row, select

TITLE = "The noise multipliers"
EPSILON, DELTA = 9.0, 1e-5
NUM_BANDS = 4
EPOCHS = 10
COMPARED = ("dp_sgd", "bsr", "bisr", "band_mf", "band_inv_mf")
# Steps in an epoch: 50,000 and 25,000 examples in batches of 512, the last one smaller.
DATASETS: dict[str, dict[str, Any]] = {
    "CIFAR-10": {"min_sep": 98, "momentum": 0.9, "decay": 0.9999},
    "IMDB": {"min_sep": 49, "momentum": 0.95, "decay": 0.99999},
}
SAMPLINGS = ("balls-in-bins", "fixed")
# As printed, in the order of ``COMPARED``; the paper prints the same for both datasets.
PRINTED = {"balls-in-bins": (1.2, 2.3, 4.4, 2.4, 8.2), "fixed": (1.8, 3.3, 5.8, 3.5, 9.1)}
AGREES = 0.05
ROUNDING = 0.05  # of what is printed


def setting(dataset: str) -> tuple[cn.Workload, cn.Participation]:
    """The workload and the participation of a dataset."""
    own = DATASETS[dataset]
    participation = cn.Participation(EPOCHS * own["min_sep"], own["min_sep"], EPOCHS)
    A = cn.workloads.sgd(participation.num_steps, momentum=own["momentum"], decay=own["decay"])
    return A, participation


def mechanism(method: str, A: cn.Workload, participation: cn.Participation) -> cn.Mechanism:
    """A method with the paper's bandwidth."""
    family = cn.mechanisms.get(method)
    return family.build(A, participation, NUM_BANDS if family.banded else None)


def amplified(sampling: str) -> bool:
    """Whether the batches are random, so that they amplify privacy."""
    return cn.samplings.get(sampling).secret


def run(*, smoke: bool, progress: Progress | None) -> dict[str, Any]:
    """Calibrate every method for both datasets and both samplings."""
    datasets = ["IMDB"] if smoke else list(DATASETS)
    cases = [(d, s, m) for d in datasets for s in SAMPLINGS for m in COMPARED]
    rows: list[Row] = []
    for dataset, sampling, method in tracked(cases, progress):
        A, participation = setting(dataset)
        began = time.perf_counter()
        found = cn.calibrate(
            mechanism(method, A, participation),
            participation,
            epsilon=EPSILON,
            delta=DELTA,
            sampling=sampling,
            seed=SEED,
            samples=5_000 if smoke else None,
        )
        rows.append(
            {
                "dataset": dataset,
                "method": method,
                "sampling": sampling,
                "noise_multiplier": found.noise_multiplier,
                "printed": PRINTED[sampling][COMPARED.index(method)],
                "kind": found.kind,
                "failure_probability": found.failure_probability,
                "error": found.error,
                "seconds": round(time.perf_counter() - began, 2),
            }
        )
    return {"epsilon": EPSILON, "delta": DELTA, "num_bands": NUM_BANDS, "rows": rows}


def draw(result: dict[str, Any], folder: Path) -> None:
    """Bars for what was found, a line across each for what is printed."""
    rows = result["data"]["rows"]
    datasets = _datasets(rows)
    with style.sheet(result, folder, 1, len(datasets), (4.5 * len(datasets), 3.6)) as (
        figure,
        axes,
    ):
        for panel, dataset in zip(axes[0], datasets, strict=True):
            for i, method in enumerate(COMPARED):
                for j, sampling in enumerate(SAMPLINGS):
                    (row,) = select(rows, dataset=dataset, method=method, sampling=sampling)
                    _bar(panel, i + 0.4 * j - 0.2, row)
            panel.set_xticks(range(len(COMPARED)), [METHODS[method] for method in COMPARED])
            panel.set(title=dataset, ylim=(0, 14.2))
            panel.grid(visible=False, axis="x")
            panel.tick_params(axis="x", length=0)
        axes[0][0].set_ylabel("noise multiplier")
        style.legend(figure, axes[0])


def _bar(panel: Any, x: float, row: Row) -> None:
    random = amplified(row["sampling"])
    first = row["method"] == COMPARED[0]
    colour = style.COLOURS[row["method"]]
    # The legend shows the shades of the first bars, which are grey.
    panel.bar(
        x,
        row["noise_multiplier"],
        width=0.36,
        color=colour,
        alpha=1.0 if random else 0.45,
        label=("amplified (balls-in-bins)" if random else "not amplified") if first else None,
    )
    panel.text(
        x,
        max(row["noise_multiplier"], row["printed"]) + 0.15,
        f"{row['noise_multiplier']:.2f}",
        ha="center",
        fontsize=7.5,
    )
    panel.plot(
        [x - 0.19, x + 0.19],
        [row["printed"]] * 2,
        color=style.INK,
        linewidth=1.6,
        label="printed in the paper" if first and random else None,
    )


def report(result: dict[str, Any]) -> str:
    """Both tables beside the printed numbers."""
    data = result["data"]
    rows = data["rows"]
    datasets = _datasets(rows)
    lengths = " and ".join(f"b = {DATASETS[name]['min_sep']} ({name})" for name in datasets)
    setting = (
        f"({data['epsilon']:g}, {data['delta']:g})-DP, p = {data['num_bands']} bands, k = {EPOCHS} "
        f"epochs of {lengths} steps, each workload calibrated for itself."
    )
    header = [" "]
    for name in datasets:
        header += [f"{name}, amplified", "printed", f"{name}, not amplified", "printed"]
    lines = []
    for method in COMPARED:
        line = [METHODS[method]]
        for name in datasets:
            for sampling in SAMPLINGS:
                (row,) = select(rows, dataset=name, method=method, sampling=sampling)
                line += [with_decimals(row["noise_multiplier"], 3), f"{row['printed']:.1f}"]
        lines.append(line)
    certified, exact = (
        ", ".join(sorted({row["kind"] for row in select(rows, sampling=sampling)}))
        for sampling in SAMPLINGS
    )
    failure = max(row["failure_probability"] for row in rows)
    kinds = f"Amplified: {certified}, with failure probability at most {failure:g}. "
    return "\n\n".join(
        [
            setting,
            _tables.markdown(header, lines, left=(0,)),
            kinds + f"Not amplified: {exact}.",
            markdown.claims([_claim(rows, name) for name in datasets]),
        ]
    )


def _datasets(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["dataset"] for row in rows))


def _claim(rows: list[Row], dataset: str) -> Claim:
    mine = select(rows, dataset=dataset)
    ratios = [row["noise_multiplier"] / row["printed"] for row in mine]
    off = [row["noise_multiplier"] - row["printed"] for row in mine]
    close = max(abs(ratio - 1.0) for ratio in ratios) <= AGREES
    short = ", ".join(
        METHODS[row["method"]] + (" amplified" if amplified(row["sampling"]) else "")
        for row, missing in zip(mine, off, strict=True)
        if missing > ROUNDING
    )
    return Claim(
        f"The noise multipliers of {dataset}, printed with one decimal",
        markdown.verdict(
            max(map(abs, off)) <= ROUNDING,
            otherwise=f"within {100 * AGREES:.0f} %" if close else "differs",
        ),
        f"ours over printed: {markdown.span(ratios)}"
        + (
            f"; the printed noise is too small by more than its rounding for {short}"
            if short
            else ""
        ),
    )
