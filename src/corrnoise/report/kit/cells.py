"""A matrix as coloured cells, in SVG."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from corrnoise.report.kit.axes import NARROW, drawing, words
from corrnoise.report.kit.markup import tag
from corrnoise.report.kit.numbers import number

Array = npt.NDArray[np.float64]

WRITTEN = 0.5  # the largest opacity of a cell that has a number in it


def picture(title: str, matrix: Array, *, values: bool = False) -> Markup:
    """A lower-triangular matrix as coloured cells: blue below 0, orange above 0, none at 0.

    Args:
        title: the title for screen readers.
        matrix: the matrix, with entries in [-1, 1].
        values: whether each entry is written into its cell.
    """
    n, left, top = matrix.shape[0], 28.0, 32.0
    size = (NARROW - left - 4.0) / n
    every = 1 if n <= 10 else 4
    parts = [words(2, 11, "step", kind="name")]
    for i in range(n):
        if i % every == 0:
            parts.append(words(left - 6, top + size * (i + 0.5) + 4, str(i + 1), anchor="end"))
            parts.append(words(left + size * (i + 0.5), top - 7, str(i + 1), anchor="middle"))
    for i, j in itertools.product(range(n), range(n)):
        entry = float(matrix[i, j])
        if j > i or (abs(entry) < 0.005 and not values):
            continue
        x, y = left + size * j, top + size * i
        box = tag(
            "rect",
            tag("title", f"{i + 1}, {j + 1}: {number(entry, 3)}"),
            x=x + 0.5,
            y=y + 0.5,
            width=size - 1.0,
            height=size - 1.0,
            rx=1.5 if values else 0.8,
            class_="minus" if entry < 0 else "plus",
            fill_opacity=shade(entry) * (WRITTEN if values else 1.0),
        )
        parts.append(box)
        if values and abs(entry) >= 0.005:
            shown = f"{entry:.2f}".replace("0.", ".").replace("-", "−").replace("1.00", "1")
            parts.append(words(x + size / 2, y + size / 2 + 4, shown, anchor="middle", kind="cell"))
    return drawing(title, *parts, width=NARROW, height=top + size * n + 4.0)


def shade(value: float) -> float:
    """The opacity of a cell: a square root, so that small entries are visible."""
    return round(math.sqrt(min(abs(value), 1.0)), 3)


def key() -> Markup:
    """The colour scale of ``picture``."""
    marks = (-1.0, -0.5, -0.25, -0.1, 0.0, 0.1, 0.25, 0.5, 1.0)
    size = NARROW / len(marks)
    parts = [
        tag(
            "rect",
            x=size * i + 0.5,
            y=0.5,
            width=size - 1.0,
            height=11.0,
            class_="minus" if value < 0 else "plus",
            fill_opacity=shade(value),
        )
        + words(size * (i + 0.5), 25, number(value), anchor="middle")
        for i, value in enumerate(marks)
    ]
    return drawing("Colour scale: blue below 0, orange above 0", *parts, width=NARROW, height=30.0)
