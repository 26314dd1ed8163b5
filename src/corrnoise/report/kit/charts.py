"""Charts as SVG: lines, means beside lines, and points with labels.

Colours are CSS variables, so that one drawing serves light mode, dark mode and print. A mark has a
``<title>`` that explains it, which browsers show beside the pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from corrnoise.report.kit.axes import CHARACTER, WIDTH, Axis, Frame, drawing, spread, words
from corrnoise.report.kit.markup import joined, tag
from corrnoise.report.kit.numbers import number

Box = tuple[float, float, float, float]  # left, top, right, bottom

_LONGEST = 16  # characters of a label in a drawing; the tables show all of it
_MOST_POINTS, _MARKS = 240, 13


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        label: written at its end; "" for none.
        color: the number of its colour.
        x: abscissae, ascending.
        y: ordinates.
        dashed: to tell two curves of one colour apart.
        what: the name of the ordinate, for the titles of marks.
    """

    label: str
    color: int
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    what: str = ""


@dataclass(frozen=True)
class Mean:
    """One value beside the curves, with its label; a bound has no colour."""

    label: str
    color: int | None
    value: float


def lines(
    title: str,
    x: Axis,
    y: Axis,
    curves: Sequence[Line],
    *,
    reference: tuple[str, float] | None = None,
    means: Sequence[Mean] = (),
    mean_label: str = "",
    width: float = WIDTH,
) -> Markup:
    """Curves with their names at their ends.

    Args:
        title: the title for screen readers.
        x: the axis of the abscissa.
        y: the axis of the ordinate.
        curves: the curves, the most important first.
        reference: a name and an ordinate, drawn as a horizontal line.
        means: values in a strip on the right, instead of names at the ends of curves.
        mean_label: the label of the strip.
        width: the width of the drawing.
    """
    ends = [(m.label, m.value, m.color) for m in means] or [
        (short(line.label), line.y[-1], line.color) for line in curves if line.label
    ]
    longest = max((len(label) for label, _, _ in ends), default=0)
    strip = 36.0 if means else 0.0
    frame = Frame(x, y, margin=strip + CHARACTER * longest + 16.0, width=width)
    parts = [frame.draw()]
    if reference:
        parts.append(level(frame, *reference))
    parts += [_curve(frame, line) for line in reversed(curves)]
    side = frame.right
    if means:
        side = frame.right + strip
        parts.append(_strip(frame, side, means, mean_label))
    heights = spread([frame.up(v) for _, v, _ in ends], 14.0, frame.top, frame.bottom)
    for (label, _, color), height in zip(ends, heights, strict=True):
        kind = "label bound" if color is None else f"label {hue(color)}"
        parts.append(words(side + 8, height + 4, label, kind=kind))
    return drawing(title, *parts, width=width)


def _curve(frame: Frame, line: Line) -> Markup:
    kept = sorted({round(i) for i in np.linspace(0, len(line.x) - 1, _MOST_POINTS)})
    points = " ".join(
        "{:.1f},{:.1f}".format(*frame.at(float(line.x[i]), float(line.y[i]))) for i in kept
    )
    stroke = tag("polyline", points=points, class_="line dashed" if line.dashed else "line")
    marked = sorted({round(i) for i in np.linspace(0, len(line.x) - 1, _MARKS)})
    marks = (
        dot(
            *frame.at(float(line.x[i]), float(line.y[i])),
            f"{line.what or line.label}, {frame.x.label} {number(float(line.x[i]))}: "
            f"{frame.y.tell(float(line.y[i]))}",
            size=2.6,
        )
        for i in marked
    )
    return tag("g", stroke, *marks, class_=hue(line.color))


def _strip(frame: Frame, side: float, means: Sequence[Mean], label: str) -> Markup:
    left, middle = frame.right + 10.0, (frame.right + 10.0 + side) / 2
    parts = [
        tag(
            "rect",
            x=left,
            y=frame.top,
            width=side - left,
            height=frame.bottom - frame.top,
            class_="strip",
        ),
        words(middle, frame.bottom + 17, label, anchor="middle"),
    ]
    for mean in means:
        height = frame.up(mean.value)
        if mean.color is None:
            line = tag("line", x1=left, x2=side, y1=height, y2=height, class_="bound")
            parts.append(tag("g", tag("title", mean.label), line))
        else:
            mark = dot(middle, height, mean.label, size=5.0)
            parts.append(tag("g", mark, class_=hue(mean.color)))
    return joined(parts)


@dataclass(frozen=True)
class Point:
    """A point of a scatter.

    Attributes:
        label: written beside the point if there is room; "" for none.
        what: a full description, for its title.
        kind: CSS classes.
        size: the radius.
    """

    label: str
    what: str
    x: float
    y: float
    kind: str
    size: float


def scatter(
    title: str,
    area: Frame,
    points: Sequence[Point],
    beneath: Sequence[Markup] = (),
    avoid: Sequence[Box] = (),
) -> Markup:
    """Points with as many labels as fit without touching; the first points get theirs first.

    Args:
        title: the title for screen readers.
        area: the frame with both axes.
        points: the points, the most important first.
        beneath: markup that is drawn below the points.
        avoid: boxes where no label may be placed.
    """
    places = [area.at(p.x, p.y) for p in points]
    taken = [*avoid] + [
        (px - p.size, py - p.size, px + p.size, py + p.size)
        for p, (px, py) in zip(points, places, strict=True)
    ]
    parts = [area.draw(), *beneath]
    for point, (px, py) in reversed(list(zip(points, places, strict=True))):
        mark = dot(px, py, point.what, size=point.size)
        parts.append(tag("g", mark, class_=point.kind))
    for point, (px, py) in zip(points, places, strict=True):
        room = _room(point, px, py, area, taken) if point.label else None
        if room:
            box, anchor = room
            taken.append(box)
            where = box[0] if anchor == "start" else box[2]
            parts.append(
                words(where, box[3] - 3, point.label, anchor=anchor, kind=f"label {point.kind}")
            )
    return drawing(title, *parts)


def _room(
    point: Point, x: float, y: float, area: Frame, taken: Sequence[Box]
) -> tuple[Box, str] | None:
    """The first free place for a label around its point."""
    wide, away = CHARACTER * len(point.label), point.size + 4.0
    for rise in (0.0, -7.0, 7.0, -12.0, 12.0, -17.0, 17.0):
        for anchor, left in (("start", x + away), ("end", x - away - wide)):
            box = (left, y + rise - 7.0, left + wide, y + rise + 7.0)
            inside = area.left < box[0] and box[2] < area.width - 2 and box[3] < area.bottom
            if inside and not any(_touch(box, other) for other in taken):
                return box, anchor
    return None


def _touch(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def dot(x: float, y: float, what: str, *, size: float) -> Markup:
    """A mark with a title."""
    return tag("circle", tag("title", what), cx=x, cy=y, r=size, class_="dot")


def level(frame: Frame, name: str, value: float) -> Markup:
    """A horizontal line at a value, across the whole frame, with its name."""
    y = frame.up(value)
    line = tag("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_="level")
    return joined([line, words(named_at(frame), y - 5, name, kind="small")])


def named_at(frame: Frame) -> float:
    """Where the name of a level starts: away from the axis and from the ends of curves."""
    return frame.left + 0.3 * (frame.right - frame.left)


def hue(color: int) -> str:
    """The CSS class of a colour."""
    return f"s{color % 6}"


def short(label: str, longest: int = _LONGEST) -> str:
    """A label, shortened to fit beside a curve."""
    return label if len(label) <= longest else label[: longest - 1] + "…"
