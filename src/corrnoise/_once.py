"""Results that are computed once, whichever thread asks first."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Results by key. Who asks for one that is under way waits for it.

    Args:
        most: results that are kept; the oldest make room.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._found: dict[Hashable, Future[T]] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result with this key, made where it is not known. An error is a result too."""
        with self._lock:
            first = key not in self._found
            future = self._found.setdefault(key, Future())
            while len(self._found) > self._most:
                del self._found[next(iter(self._found))]
        if first:
            try:
                future.set_result(make())
            except BaseException as problem:
                future.set_exception(problem)
                if not isinstance(problem, Exception):  # Ctrl-C is no result to keep
                    with self._lock:
                        self._found.pop(key, None)
        return future.result()
