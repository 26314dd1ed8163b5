"""Results that are computed once, whichever thread asks first."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from threading import Lock, RLock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Results by key. Who asks for one that is under way waits for it; a failure is not kept.

    Args:
        most: results that are kept; the oldest make room. All are by default.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forget everything; also what a thread is making that a fork has left behind."""
        self._lock = Lock()
        self._found: dict[Hashable, T] = {}
        self._making: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result with this key, made where it is not known."""
        with self._lock:
            if key in self._found:
                return self._found[key]
            turn = self._making.setdefault(key, RLock())
        with turn:
            with self._lock:  # another thread may make room
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
