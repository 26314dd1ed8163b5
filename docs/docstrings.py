"""An extension of Griffe for the API pages: doctests in docstrings become fenced code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

# A doctest: from its prompt to the next blank line.
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts doctests into fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(
                r"\g<indent>```pycon\n\g<0>\n\g<indent>```", obj.docstring.value
            )
