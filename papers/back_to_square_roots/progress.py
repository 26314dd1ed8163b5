"""How far a run has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Progress = Callable[[int, int], None]
Item = TypeVar("Item")


def tracked(items: Sequence[Item], progress: Progress | None) -> Iterator[Item]:
    """The items; ``progress`` is told when each of them is done."""
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, len(items))
