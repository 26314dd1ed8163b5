"""HTML and SVG as text: elements with everything escaped, and numbers as people write them."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence

from corrnoise.statement import rounded_up

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Attribute = str | float | None


def text(value: object) -> str:
    """``value`` as text that no browser reads as markup."""
    return html.escape(str(value))


def tag(name: str, *children: str, **attributes: Attribute) -> str:
    """An element. Children are markup; attributes are escaped, and left out where ``None``.

    >>> tag("a", text("1 < 2"), class_="x", aria_label='"')
    '<a class="x" aria-label="&quot;">1 &lt; 2</a>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{''.join(children)}</{name}>"


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return html.escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    strong: int | None = None,
) -> str:
    """A table that scrolls by itself where the screen is narrow.

    Args:
        caption: what it shows; text.
        head: names of the columns; text.
        rows: cells; markup. The first of each row names it.
        numeric: the columns whose cells are aligned to the right.
        strong: the row that stands out.
    """

    def cell(name: str, column: int, content: str, scope: str | None = None) -> str:
        return tag(name, content, class_="num" if column in numeric else None, scope=scope)

    top = "".join(cell("th", i, text(name), "col") for i, name in enumerate(head))
    body = "".join(
        tag(
            "tr",
            cell("th", 0, row[0], "row"),
            *(cell("td", i, content) for i, content in enumerate(row) if i),
            class_="strong" if index == strong else None,
        )
        for index, row in enumerate(rows)
    )
    whole = tag(
        "table", tag("caption", text(caption)), tag("thead", tag("tr", top)), tag("tbody", body)
    )
    return tag("div", whole, class_="scroll", role="region", tabindex="0", aria_label=caption)


def section(name: str, title: str, *parts: str) -> str:
    """A part of the page, under its heading."""
    heading = tag("h2", text(title), id=f"{name}-title")
    return tag("section", heading, *parts, id=name, aria_labelledby=f"{name}-title")


def figure(title: str, picture: str, caption: str) -> str:
    """A picture between its name and its explanation."""
    return tag("figure", tag("h3", text(title)), picture, tag("figcaption", text(caption)))


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, as text."""
    pairs = (tag("div", tag("dt", text(name)), tag("dd", text(value))) for name, value in rows)
    return tag("dl", *pairs, class_="facts")


def paragraphs(sentences: Iterable[str]) -> str:
    """Text, a paragraph each."""
    return "".join(tag("p", text(sentence)) for sentence in sentences)


def folded(content: str) -> str:
    """The values of a picture, shown when asked for."""
    return tag("details", tag("summary", "Values"), content)


def swatch(color: str, label: str) -> str:
    """A label with the colour of its curves."""
    return tag("span", class_=f"swatch {color}") + text(label)


def number(value: float | None, digits: int = 4) -> str:
    """A few digits, a true minus sign, and powers of ten as such.

    >>> number(1e-05), number(-0.125), number(2.5e-7), number(1234567), number(None)
    ('10⁻⁵', '−0.125', '2.5·10⁻⁷', '1,234,567', '–')
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return text(value)
    if isinstance(value, int) or (abs(value) >= 10**digits and abs(value) < 1e15):
        return f"{round(value):,}".replace("-", "−")
    return _pretty(f"{value:.{digits}g}")


def budget(value: float | None, digits: int = 5) -> str:
    """An ε or a δ, rounded up.

    >>> budget(3.141511), budget(1.00001e-6, 3), budget(None)
    ('3.1416', '1.01·10⁻⁶', '–')
    """
    return "–" if value is None else _pretty(rounded_up(value, digits))


def powers(sentence: str) -> str:
    """A sentence with powers of ten as people write them.

    >>> powers("at most 1e-09 of (4, 2.5e-06)")
    'at most 10⁻⁹ of (4, 2.5·10⁻⁶)'
    """
    return re.sub(r"\b\d+(\.\d+)?e[-+]\d+\b", lambda found: _pretty(found[0]), sentence)


def percent(value: float | None) -> str:
    """A share, in percent.

    >>> percent(0.8934), percent(None)
    ('89.3 %', '–')
    """
    return "–" if value is None else f"{100 * value:.1f} %"


def _pretty(shown: str) -> str:
    mantissa, e, exponent = shown.partition("e")
    if e:
        power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
        shown = power if mantissa == "1" else f"{mantissa}·{power}"
    return shown.replace("-", "−")
