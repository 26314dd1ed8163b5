"""The results of cifar_wrn.py as Markdown tables, for the documentation."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from corrnoise import _tables

_COLUMNS = (
    "ε", "method", "GPU minutes", "test accuracy", "with last weights", "mechanism",
    "batch", "views", "epochs", "momentum", "rate", "average", "seeds",
)  # fmt: skip


_SHORT = ("ε", "10 epochs", "40 epochs", "long", "long, 16 views", "De et al. (2022)")
# De et al., "Unlocking high-accuracy differentially private image classification through scale"
# (2022): the best of WRN-16-4 and WRN-40-4 from scratch, δ = 1e-5, after hundreds of epochs.
PUBLISHED = {1.0: 56.8, 2.0: 65.9, 4.0: 73.5, 8.0: 81.4}
_TRIED = (
    "ε", "method", "epochs", "views", "batch", "rate", "GPU minutes", "held-out accuracy",
    "mechanism",
)  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Accuracy on the test set of what was run, and on held-out images of what was tried."""
    return (
        "Planner's choice / DP-SGD with Poisson batches, in percent, and GPU minutes; 3 views, but "
        f"for the last column of runs:\n\n{short(found)}\n\nEvery run:\n\n{_runs(found)}\n\n"
        f"Tried on 5,000 held-out training images:\n\n{_tried(found)}"
    )


def short(found: dict[str, Any]) -> str:
    """The planner's accuracy over that of DP-SGD at each ε, and what was published."""
    rows: list[list[str]] = []
    for epsilon in sorted(PUBLISHED, reverse=True):
        kinds = [(10, 3), (40, 3), (long(epsilon), 3), (long(epsilon), 16)]
        cells = [_both(found, epsilon, epochs, views) for epochs, views in kinds]
        rows.append([f"{epsilon:g}", *cells, f"{PUBLISHED[epsilon]:g}"])
    return _tables.markdown(_SHORT, rows)


def _both(found: dict[str, Any], epsilon: float, epochs: int, views: int) -> str:
    """Accuracy of the planner's choice and of DP-SGD, and the minutes of a run in the mean."""
    rows = [run_of(found, method, epsilon, epochs, views) for method in ("planner", "dp-sgd")]
    runs = [run for row in rows for run in row or ()]
    if not runs:
        return ""
    shown = " / ".join("–" if row is None else f"{accuracy(row):.1f}" for row in rows)
    return f"{shown} in {statistics.mean(run['gpu_minutes'] for run in runs):.1f} min"


def accuracy(row: list[dict[str, Any]]) -> float:
    """The mean of all seeds, in percent."""
    return statistics.mean(run["accuracy"] for run in row)


def long(epsilon: float) -> int:
    """The epochs of the long runs, which have no momentum."""
    return 125 if epsilon >= 4.0 else 60


def run_of(
    found: dict[str, Any], method: str, epsilon: float, epochs: int, views: int
) -> list[dict[str, Any]] | None:
    """The seeds of a run, with the tuned rate if several were run.

    Those of up to 40 epochs have momentum, and the longer ones have none.
    """
    every = [
        row for row in found["rows"]
        if (row[0]["method"], row[0]["epsilon"]) == (method, epsilon)
        and (row[0]["recipe"]["epochs"], row[0]["recipe"]["views"]) == (epochs, views)
        and (row[0]["recipe"]["momentum"] > 0.0) == (epochs <= 40)
    ]  # fmt: skip
    tried = [
        run for run in found["tried"]
        if (run["method"], run["epsilon"], run["recipe"]["epochs"]) == (method, epsilon, epochs)
    ]  # fmt: skip
    alike = [run for run in tried if run["recipe"]["views"] == views] or tried
    best = {run["rate"]: run["accuracy"] for run in alike}
    return max(every, key=lambda row: best.get(row[0]["rate"], 0.0), default=None)


def _runs(found: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for row in found["rows"]:
        shown = f"{accuracy(row):.1f}"
        if len(row) > 1:
            error = statistics.stdev(each["accuracy"] for each in row) / len(row) ** 0.5
            shown += f" ± {error:.1f}"
        first, recipe = row[0], row[0]["recipe"]
        rows.append(
            [
                f"{first['epsilon']:g}", first["method"],
                f"{statistics.mean(each['gpu_minutes'] for each in row):.1f}", f"{shown} %",
                f"{statistics.mean(each['plain_accuracy'] for each in row):.1f} %",
                f"{first['mechanism']}, {first['sampling']}",
                f"{recipe['batch']}", f"{recipe['views']}", f"{recipe['epochs']}",
                f"{recipe['momentum']:g}", f"{first['rate']:g}", first["average"], str(len(row)),
            ]
        )  # fmt: skip
    return _tables.markdown(_COLUMNS, rows)


def _tried(found: dict[str, Any]) -> str:
    """By ε, the best first."""
    every = sorted(found["tried"], key=lambda run: (-run["epsilon"], -run["accuracy"]))
    return _tables.markdown(
        _TRIED,
        [
            [
                f"{run['epsilon']:g}", run["method"],
                f"{run['recipe']['epochs']}", f"{run['recipe']['views']}",
                f"{run['recipe']['batch']}", f"{run['rate']:g}", f"{run['gpu_minutes']:.1f}",
                f"{run['accuracy']:.1f} %", f"{run['mechanism']}, {run['sampling']}",
            ]
            for run in every
        ],
    )  # fmt: skip


def draw(found: dict[str, Any], path: Path) -> None:
    """Accuracy over GPU minutes, a point for each setting, and what was published, by ε."""
    import matplotlib as mpl
    from corrnoise.papers.back_to_square_roots import style
    from matplotlib.figure import Figure

    looks = {
        "planner": ("planner's choice", "band_inv_mf"),
        "dp-sgd": ("DP-SGD, Poisson", "dp_sgd"),
    }
    colours = [style.COLOURS[name] for name in ("band_inv_mf", "bisr", "band_mf", "blt")]
    epsilons = sorted({row[0]["epsilon"] for row in found["rows"]}, reverse=True)
    with mpl.rc_context(style.LOOK):
        figure = Figure(figsize=(7.0, 3.8), layout="constrained")
        panel = figure.subplots()
        for epsilon, colour in zip(epsilons, colours, strict=True):
            panel.plot([], [], color=colour, marker="s", linestyle="", label=f"ε = {epsilon:g}")
            if epsilon in PUBLISHED:
                panel.axhline(PUBLISHED[epsilon], color=colour, linestyle=(0, (4, 2)), linewidth=1)
            for row in found["rows"]:
                if row[0]["epsilon"] == epsilon:
                    panel.plot(
                        statistics.mean(each["gpu_minutes"] for each in row),
                        accuracy(row),
                        color=colour,
                        marker=style.MARKERS[looks[row[0]["method"]][1]],
                        markersize=6.0,
                    )
        for label, look in looks.values():
            panel.plot(
                [], [], color=style.INK, marker=style.MARKERS[look], linestyle="", label=label
            )
        panel.plot(
            [], [], color=style.INK, linestyle=(0, (4, 2)), linewidth=1, label="De et al. (2022)"
        )
        panel.set_xscale("log")
        style.counts(panel.xaxis, (0.5, 1, 2, 5, 10, 20))
        panel.set(xlabel="GPU minutes", ylabel="test accuracy, %", xlim=(0.25, 30.0))
        figure.legend(loc="outside right upper")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    every = [run for row in found["rows"] for run in row]
    devices = ", ".join(sorted({run["device"] for run in every}))
    dates = ", ".join(sorted({run["date"] for run in every}))
    return f"δ = {found['delta']:g}; what was tried is not part of ε. {devices}, {dates}."
