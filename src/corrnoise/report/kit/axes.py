"""Axes with round ticks, and a frame to draw in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from corrnoise.report.kit.markup import joined, tag
from corrnoise.report.kit.numbers import number

# A drawing is shown on a phone at about this size, and on a desktop enlarged with smaller letters:
# two in a row, or three narrow ones.
WIDTH, NARROW, HEIGHT = 370.0, 300.0, 270.0
CHARACTER = 6.5  # an upper bound of the width of a letter


@dataclass(frozen=True)
class Axis:
    """A map from values to fractions of a length.

    Attributes:
        label: the label, with the unit.
        low: the value at 0.
        high: the value at 1.
        ticks: round values in between.
        scale: a monotone function; the axis is linear in it.
        show: formats a tick.
        tell: formats any value.
    """

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    scale: Callable[[float], float] = float
    show: Callable[[float], str] = number
    tell: Callable[[float], str] = number

    def share(self, value: float) -> float:
        """The position of ``value`` as a fraction of the way from ``low`` to ``high``."""
        low, high = self.scale(self.low), self.scale(self.high)
        return (self.scale(value) - low) / (high - low)


def linear(
    label: str,
    values: Sequence[float],
    *,
    show: Callable[[float], str] = number,
    tell: Callable[[float], str] = number,
) -> Axis:
    """An axis that ends on round values.

    >>> linear("loss", [0.31, 1.84]).ticks
    (0.0, 0.5, 1.0, 1.5, 2.0)
    """
    low, high = min(values), max(values)
    if high == low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    step = _step(high - low)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(float(f"{i * step:.12g}") for i in range(first, last + 1))
    return Axis(label, ticks[0], ticks[-1], ticks, show=show, tell=tell)


def steps(label: str, last: float) -> Axis:
    """An axis from 0 to the last step, with whole ticks.

    >>> steps("step", 12).ticks, steps("step", 980).ticks
    ((0, 3, 6, 9, 12), (0, 200, 400, 600, 800))
    """
    last = max(last, 1.0)
    step = math.ceil(_step(last))
    return Axis(label, 0.0, last, tuple(i * step for i in range(int(last / step) + 1)))


def logarithmic(label: str, values: Sequence[float]) -> Axis:
    """An axis in equal ratios, for positive values.

    >>> logarithmic("error", [8.2, 163.0]).ticks
    (10.0, 20.0, 50.0, 100.0)
    """
    low, high = min(values) / 1.08, max(values) * 1.08
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for mantissas in ((1.0, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{m}e{e}") for e in range(first, last + 1) for m in mantissas]
        inside = [t for t in ticks if low <= t <= high]
        if len(inside) <= 6:
            break
    if len(inside) < 3:
        inside = [t for t in linear("", [low, high]).ticks if low <= t <= high]
    return Axis(label, low, high, tuple(inside), math.log)


def counts(label: str, most: int) -> Axis:
    """An axis for 0, 1, 2 and ever larger counts.

    >>> counts("vectors", 22).ticks
    (0, 1, 2, 4, 8, 16)
    """
    most = max(most, 4)
    ticks = [0, *(2**i for i in range(most.bit_length()) if 2**i <= most)]
    if len(ticks) > 8:
        ticks = [0, *(4**i for i in range(most.bit_length()) if 4**i <= most)]
    return Axis(label, -0.2, float(most), tuple(ticks), lambda value: math.log1p(value))


def _step(span: float) -> float:
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


@dataclass(frozen=True)
class Frame:
    """A pair of axes on a drawing of height ``HEIGHT``.

    Attributes:
        x: the horizontal axis.
        y: the vertical axis.
        margin: the space on the right that is kept free for labels.
        width: the width of the drawing.
    """

    x: Axis
    y: Axis
    margin: float = 12.0
    width: float = WIDTH

    @property
    def left(self) -> float:
        """Where the area starts: beside the longest label of a tick."""
        return 12.0 + CHARACTER * max(len(self.y.show(tick)) for tick in self.y.ticks)

    top, bottom = 34.0, HEIGHT - 40.0

    @property
    def right(self) -> float:
        """Where the area ends."""
        return self.width - self.margin

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The point of a pair of values."""
        return self.across(x), self.up(y)

    def across(self, x: float) -> float:
        """The abscissa of a value."""
        return self.left + (self.right - self.left) * self.x.share(x)

    def up(self, y: float) -> float:
        """The ordinate of a value."""
        return self.bottom - (self.bottom - self.top) * self.y.share(y)

    def draw(self) -> Markup:
        """Grid, ticks and labels."""
        parts: list[Markup] = []
        for tick in self.y.ticks:
            y = self.up(tick)
            parts.append(tag("line", x1=self.left, x2=self.right, y1=y, y2=y, class_="gridline"))
            parts.append(words(self.left - 6, y + 4, self.y.show(tick), anchor="end"))
        for tick in self.x.ticks:
            x = self.across(tick)
            parts.append(tag("line", x1=x, x2=x, y1=self.bottom, y2=self.bottom + 4, class_="axis"))
            parts.append(words(x, self.bottom + 17, self.x.show(tick), anchor="middle"))
        parts.append(
            tag("line", x1=self.left, x2=self.right, y1=self.bottom, y2=self.bottom, class_="axis")
        )
        parts.append(words(4, 14, self.y.label, kind="name"))
        middle = (self.left + self.right) / 2
        parts.append(words(middle, HEIGHT - 5, self.x.label, anchor="middle", kind="name"))
        return joined(parts)


def words(x: float, y: float, value: str, *, anchor: str | None = None, kind: str = "") -> Markup:
    """A piece of text in a drawing."""
    return tag("text", value, x=x, y=y, text_anchor=anchor, class_=kind or None)


def spread(
    wanted: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf
) -> list[float]:
    """Positions at least ``gap`` apart and within [low, high], near the wanted ones.

    >>> spread([10.0, 11.0, 50.0], 8.0)
    [6.5, 14.5, 50.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[tuple[float, int]] = []  # pairs (mean of the wanted first positions, size)
    for rank, index in enumerate(order):
        start, size = wanted[index] - rank * gap, 1
        while groups and groups[-1][0] > start:
            before, count = groups.pop()
            start, size = (before * count + start * size) / (count + size), count + size
        groups.append((start, size))
    starts = [start for start, size in groups for _ in range(size)]
    most = high - gap * (len(order) - 1)
    placed = [0.0] * len(order)
    for rank, index in enumerate(order):
        placed[index] = max(low, min(starts[rank], most)) + rank * gap
    return placed


def drawing(title: str, *parts: Markup, width: float = WIDTH, height: float = HEIGHT) -> Markup:
    """An SVG image that fills the width of its container; screen readers read ``title``."""
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=title,
    )
