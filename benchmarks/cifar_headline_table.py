"""The results of cifar_headline.py as Markdown tables and as a figure, for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corrnoise import _tables

BASE, CHOICE = "DP-SGD, Poisson", "planner's choice"
_COST = (
    "ε", "method", "mechanism", "batch", "noise", "expected error", "rate", "weights",
    "GPU s a run", "GiB", "vectors stored", "draws a step",
)  # fmt: skip


def best_batch(method: str) -> str:
    """The column of a method whose batch size is tuned as well."""
    return f"{method}, best batch"


# The method of the paper's figures whose colour and marker each one has, and its line, in the order
# of columns.
_LOOKS = {
    BASE: ("dp_sgd", "--"),
    "Band-MF, cyclic Poisson": ("band_mf", "-"),
    "BISR p = 4, balls-in-bins": ("bisr", "-"),
    CHOICE: ("band_inv_mf", "-"),
    best_batch(BASE): ("dp_sgd", ":"),
    best_batch(CHOICE): ("band_inv_mf", ":"),
}
COLUMNS = tuple(_LOOKS)
# What the planner gains: the name of the column, and the two methods.
_GAINS = {
    "planner over DP-SGD": (CHOICE, BASE),
    "planner over DP-SGD, best batches": (best_batch(CHOICE), best_batch(BASE)),
}


def place(row: dict[str, Any]) -> tuple[float, int]:
    """Of a row among the others: by ε, then in the order of columns."""
    return row["epsilon"], COLUMNS.index(row["method"])


def summary(accuracies: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard error over seeds."""
    several = len(accuracies) > 1
    error = statistics.stdev(accuracies) / len(accuracies) ** 0.5 if several else None
    return {"mean": statistics.mean(accuracies), "standard_error": error}


def table(found: dict[str, Any]) -> str:
    """Test accuracy by ε and method, and below it what each row costs."""
    return f"{accuracies(found)}\n\n{costs(found)}"


def accuracies(found: dict[str, Any]) -> str:
    """Mean and standard error of the test accuracy, and what the planner gains over DP-SGD."""
    methods = _methods(found)
    compared = {name: pair for name, pair in _GAINS.items() if set(pair) <= set(methods)}
    rows: list[list[str]] = []
    for epsilon in _epsilons(found):
        here = {row["method"]: row for row in found["rows"] if row["epsilon"] == epsilon}
        gains = [_gain(here, *pair) for pair in compared.values()]
        rows.append([f"{epsilon:g}", *(_percent(here.get(method)) for method in methods), *gains])
    return _tables.markdown(["ε", *methods, *compared], rows)


def brief(found: dict[str, Any]) -> str:
    """DP-SGD beside the planner's choice: with batches of one size, and with the best of each."""
    rows: list[list[str]] = []
    for epsilon in _epsilons(found):
        here = {row["method"]: row for row in found["rows"] if row["epsilon"] == epsilon}
        cells = [f"{epsilon:g}"]
        for ours, theirs in _GAINS.values():
            cells += [_percent(here[theirs]), _percent(here[ours]), _gain(here, ours, theirs)]
        rows.append(cells)
    gains = [name for pair in _GAINS.values() for name in (*reversed(pair), "gain")]
    return _tables.markdown(["ε", *gains], rows)


def costs(found: dict[str, Any]) -> str:
    """What was run for each mean, and what it costs."""
    rows: list[list[str]] = []
    for row in found["rows"]:
        cost, alone = row["cost"], row["cost"]["alone"]
        seconds = "" if alone is None else f"{alone['milliseconds'] * row['steps'] / 1e3:.1f}"
        used = None if alone is None else alone["gibibytes"]
        memory = "" if used is None else f"{used:.2f}"
        rows.append(
            [
                f"{row['epsilon']:g}",
                row["method"],
                f"`{row['mechanism'].split('(')[0]}"
                + f"({row['mechanism'].split('), ')[-1]}`, {row['sampling']}",
                str(row["batch"]),
                f"{row['noise_multiplier']:.3g}",
                f"{row['expected_error']:.0f}",
                f"{row['runs'][0]['learning_rate']:.2g} ({row['multiple']:g}x)",
                row["weights"],
                seconds,
                memory,
                str(cost["vectors_stored"]),
                f"{cost['draws_per_step']:g}",
            ]
        )
    return _tables.markdown(_COST, rows, left=(1, 2, 7))


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    size = found["size"]
    larger = {run["batch"] for row in found["rows"] for run in row["tried"]} - {size["batch_size"]}
    every = [run for row in found["rows"] for run in row["runs"]]
    known = [*every, *(run for row in found["rows"] for run in row["tried"])]
    machines = ", ".join(sorted({run["machine"] for run in known}, reverse=True))
    versions = ", ".join(sorted({run["versions"]["torch"] for run in every}))
    dates = sorted({run["date"] for run in every})
    when = "" if not dates else dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    fewest = min((len(row["runs"]) for row in found["rows"]), default=0)
    return (
        f"δ = {found['delta']:g}, batch {size['batch_size']}, or the best of it and "
        f"{', '.join(map(str, sorted(larger)))}, {size['epochs']} epochs, clip norm "
        f"{found['clip_norm']:g}, {found['precision'].upper()}; mean and standard error of "
        f"{fewest} seeds on the test set. Rate and weights (the last ones, or the average of the "
        "last tenth), and the best batch where it says so, were chosen by one rule on "
        f"{size['held_out']:,} held-out training images with another seed, and with a second one "
        f"where accuracies were within {found['close']:g} points of the best; this search is not "
        "part of ε. Rates are multiples of `training.default_rate`; GPU time and memory are those "
        "of a run alone on the GPU, memory without the images. "
        f"{machines}, torch {versions}, {when}."
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Accuracy over ε, a line for each method, with standard errors."""
    import matplotlib as mpl
    from corrnoise.papers.back_to_square_roots import style
    from matplotlib.figure import Figure

    with mpl.rc_context(style.LOOK):
        figure = Figure(figsize=(7.0, 3.8), layout="constrained")
        panel = figure.subplots()
        for method in _methods(found):
            look, line = _LOOKS[method]
            rows = [row for row in found["rows"] if row["method"] == method]
            panel.errorbar(
                [row["epsilon"] for row in rows],
                [row["mean"] for row in rows],
                yerr=[row["standard_error"] or 0.0 for row in rows],
                color=style.COLOURS[look],
                marker=style.MARKERS[look],
                linestyle=line,
                linewidth=2.2 if method == CHOICE else 1.3,
                capsize=2.5,
                label=method,
            )
        panel.set_xscale("log")
        style.counts(panel.xaxis, _epsilons(found))
        panel.set(xlabel="ε", ylabel="test accuracy, %")
        panel.legend(loc="upper left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def _gain(rows: dict[str, dict[str, Any]], ours: str, theirs: str) -> str:
    if not {ours, theirs} <= rows.keys():
        return ""
    return f"{rows[ours]['mean'] - rows[theirs]['mean']:+.1f}"


def _methods(found: dict[str, Any]) -> list[str]:
    here = {row["method"] for row in found["rows"]}
    return [method for method in _LOOKS if method in here]


def _epsilons(found: dict[str, Any]) -> list[float]:
    return sorted({row["epsilon"] for row in found["rows"]})


def _percent(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    error = row["standard_error"]
    return f"{row['mean']:.1f}" + ("" if error is None else f" ± {error:.1f}")
