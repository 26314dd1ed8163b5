"""HTML and SVG elements: markup is ``Markup``, and every other string is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

Attribute = str | float | bool | None

_VOID = frozenset({"input", "meta"})


def tag(name: str, /, *children: str | None, **attributes: Attribute) -> Markup:
    """An element.

    Args:
        name: the name of the element.
        children: markup; text, which is escaped; or ``None``, which is left out.
        attributes: values, which are escaped; ``None`` and ``False`` leave the attribute out, and
            ``True`` gives one without a value. A
            trailing underscore is dropped, and other underscores become hyphens.

    >>> tag("b", "1 < 2", tag("i", "&"), class_="x", aria_label='"', hidden=True)
    Markup('<b class="x" aria-label="&#34;" hidden>1 &lt; 2<i>&amp;</i></b>')
    """
    given = joined(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    content = joined(child for child in children if child is not None)
    return Markup(f"<{name}{given}>{content}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Pieces of markup, and text to escape, one after the other.

    >>> joined([tag("b", "a"), " < b"])
    Markup('<b>a</b> &lt; b')
    """
    return Markup().join(parts)


def data(name: str, json: str) -> Markup:
    r"""An element that carries JSON, which no browser shows or runs.

    A ``<``, which JSON has only inside strings, is written as ``\u003c``, so that nothing in the
    JSON can end the element.

    Args:
        name: the id of the element.
        json: the JSON text.
    """
    carried = Markup(json.replace("<", "\\u003c"))
    return tag("script", carried, type="application/json", id=name)


def carried_data(page: str, name: str) -> str | None:
    r"""The JSON that ``data`` put into a page under this name; ``None`` where there is none.

    >>> carried_data(data("plan", '{"a": "</script>"}'), "plan")
    '{"a": "\\u003c/script>"}'
    """
    start = f'<script type="application/json" id="{escape(name)}">'
    found = re.search(re.escape(start) + "(.*?)</script>", str(page), re.DOTALL)
    return None if found is None else found[1]


def _attribute(key: str, value: Attribute) -> Markup:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return Markup()
    if value is True:
        return Markup(f" {name}")
    shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return Markup(f' {name}="{escape(shown)}"')
