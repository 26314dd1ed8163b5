"""Thread counts: a pool with one thread for each processor, and one BLAS thread for each of these.

A BLAS library starts one thread for each core, even where our own threads or other processes keep
the cores busy. The threads then wait for each other, and a search takes many times as long. With
one BLAS thread the results do not depend on the number of cores either. Limiting BLAS needs
``threadpoolctl``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


def processors() -> int:
    """How many processors this process may use: its CPU affinity, where the system has one."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found or 1


@contextmanager
def pool() -> Generator[ThreadPoolExecutor, None, None]:
    """A pool with a thread for each processor; it starts no more work after an error or Ctrl-C."""
    found = ThreadPoolExecutor(processors())
    try:
        yield found
    finally:
        found.shutdown(cancel_futures=True)


@contextmanager
def one_blas_thread() -> Generator[None, None, None]:
    """Limit BLAS to one thread within a block, or within a function that it decorates."""
    if importlib.util.find_spec("threadpoolctl") is None:
        yield
        return
    with _controller().limit(limits=1, user_api="blas"):
        yield


@cache
def _controller() -> ThreadpoolController:
    """The BLAS libraries of NumPy and SciPy; cached, as finding them takes milliseconds."""
    import scipy.linalg  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
