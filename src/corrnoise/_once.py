"""A thread-safe cache: each result is computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from threading import Lock, RLock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """A thread-safe cache of results by key.

    A thread that asks for a result that another thread is computing waits for it. A computation
    that raises is not cached.

    Args:
        most: the largest number of cached results; the oldest are dropped. No limit by default.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forget all results, and computations whose threads do not exist after a fork."""
        self._lock = Lock()
        self._found: dict[Hashable, T] = {}
        self._making: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The cached result with this key, or the result of ``make``, which is then cached."""
        with self._lock:
            if key in self._found:
                return self._found[key]
            turn = self._making.setdefault(key, RLock())
        with turn:
            with self._lock:  # another thread may have computed or dropped it
                if key in self._found:
                    return self._found[key]
            try:
                found = make()
                with self._lock:
                    self._found[key] = found
                    while len(self._found) > self._most:
                        del self._found[next(iter(self._found))]
                return found
            finally:
                self._making.pop(key, None)
