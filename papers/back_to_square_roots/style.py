"""How every figure looks: one colour and one marker to a method, whatever the figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corrnoise import _extras

from . import record
from .settings import METHODS

# Okabe and Ito's palette, which the colour-blind can tell apart; the markers differ as well.
COLOURS = {
    "dp_sgd": "#7a7a7a",
    "bsr": "#e69f00",
    "bisr": "#0072b2",
    "blt": "#cc79a7",
    "band_mf": "#009e73",
    "band_inv_mf": "#d55e00",
}
MARKERS = {
    "dp_sgd": "x",
    "bsr": "s",
    "bisr": "o",
    "blt": "D",
    "band_mf": "^",
    "band_inv_mf": "v",
}
INK = "#222222"
# Leading digits of ticks, from few to many.
_LEADS = (
    (1.0,),
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0),
    (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 9.0),
)
LOOK = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "text.color": INK,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.hashsalt": "corrnoise",  # the same numbers give the same file
}


def require() -> None:
    """Raise unless matplotlib is installed; the message names the extra that has it."""
    _extras.load("matplotlib")


@contextmanager
def sheet(
    result: dict[str, Any],
    folder: Path,
    rows: int,
    columns: int,
    size: tuple[float, float],
    heights: Sequence[float] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, written as SVG and PNG at the end of the block."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(LOOK):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / record.stem(result)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=160, metadata={"Software": None})


def curve(axes: Any, method: str, x: Sequence[float], y: Sequence[float], **options: Any) -> None:
    """The line of one method, in its colour, with its marker and its name."""
    look: dict[str, Any] = {
        "color": COLOURS[method],
        "marker": MARKERS[method],
        "label": METHODS[method],
        "markeredgewidth": 1.2 if method == "dp_sgd" else 0.0,
    }
    axes.plot(x, y, **(look | options))


def below(axes: Any, x: Sequence[float], y: Sequence[float]) -> None:
    """Shade what no factorization can reach."""
    axes.plot(x, y, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), label="lower bound")
    axes.fill_between(x, y, 1e-9, color="#efefef", linewidth=0)


def counts(axis: Any, ticks: Sequence[float]) -> None:
    """Ticks at these whole numbers, written out."""
    axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
    axis.set_ticks([], minor=True)


def plain(axis: Any, at_least: int = 4) -> None:
    """Plain numbers on a logarithmic axis, as few as its range needs; call with limits set."""
    low, high = axis.get_view_interval()
    powers = [10.0**i for i in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    ticks: list[float] = []
    for leads in _LEADS:
        ticks = [x for power in powers for lead in leads if low <= (x := lead * power) <= high]
        if len(ticks) >= at_least:
            break
    axis.set_ticks(ticks, [f"{tick:,.6g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def percents(axis: Any) -> None:
    """The powers of ten of a logarithmic axis, in per cent."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def marked(panel: Any, x: float, text: str) -> None:
    """A dotted vertical line with its name at the top."""
    panel.axvline(x, color="#aaaaaa", linewidth=1.0, linestyle=":")
    panel.text(
        x, 0.97, f" {text}", transform=panel.get_xaxis_transform(), va="top", color="#777777"
    )


def legend(figure: Any, axes: Any, **options: Any) -> None:
    """One legend for all panels, above them, from those of ``axes``."""
    found: dict[str, Any] = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        for label, handle in zip(labels, handles, strict=True):
            found.setdefault(label, handle)
    look = {"loc": "outside upper center", "ncols": len(found), "handlelength": 2.2}
    figure.legend(found.values(), found.keys(), **(look | options))
