"""The blocks of a page: sections, figures, tables, lists of facts, and folded content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from corrnoise.report.kit.markup import joined, tag


def section(name: str, title: str, *parts: Markup | None) -> Markup:
    """A part of the page, under its heading; ``name`` is its id."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *parts, id=name, aria_labelledby=f"{name}-title")


def figure(title: str, picture: Markup, caption: str) -> Markup:
    """A picture between its title and its caption."""
    return tag("figure", tag("h3", title), picture, tag("figcaption", caption))


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    strong: int | None = None,
) -> Markup:
    """A table that scrolls by itself where the screen is narrow.

    Args:
        caption: the caption of the table.
        head: the names of the columns.
        rows: cells, as text or markup. The first of each row names it.
        numeric: the columns whose cells are aligned to the right.
        strong: the row that stands out.
    """

    def cell(name: str, column: int, content: str, scope: str | None = None) -> Markup:
        return tag(name, content, class_="num" if column in numeric else None, scope=scope)

    top = tag("tr", *(cell("th", i, name, "col") for i, name in enumerate(head)))
    body = (
        tag(
            "tr",
            cell("th", 0, row[0], "row"),
            *(cell("td", i, content) for i, content in enumerate(row) if i),
            class_="strong" if index == strong else None,
        )
        for index, row in enumerate(rows)
    )
    whole = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", top),
        tag("tbody", *body),
    )
    return tag("div", whole, class_="scroll", role="region", tabindex="0", aria_label=caption)


def facts(rows: Iterable[tuple[str, str]]) -> Markup:
    """Names and their values."""
    pairs = (tag("div", tag("dt", name), tag("dd", value)) for name, value in rows)
    return tag("dl", *pairs, class_="facts")


def paragraphs(sentences: Iterable[str]) -> Markup:
    """One paragraph for each item."""
    return joined(tag("p", sentence) for sentence in sentences)


def folded(content: Markup) -> Markup:
    """Content that is folded, such as the values of a picture, and that the reader can unfold."""
    return tag("details", tag("summary", "Values"), content)


def swatch(color: str, label: str) -> Markup:
    """A label with the colour of its curves."""
    return joined([tag("span", class_=f"swatch {color}"), label])
