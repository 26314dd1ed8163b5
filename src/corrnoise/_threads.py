"""How many threads work: ours, one for each processor, and one BLAS thread for each of ours.

A BLAS library starts as many threads as there are cores, whatever else runs. Beside our own threads
or other busy processes they wait for each other, and a search takes many times as long. With one
thread the results do not depend on the number of cores either. It needs ``threadpoolctl``.
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
    """How many processors this process may use: those of its affinity, where the system has it."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found or 1


@contextmanager
def pool() -> Generator[ThreadPoolExecutor, None, None]:
    """A thread for each processor; after an error or Ctrl-C nothing more is begun."""
    found = ThreadPoolExecutor(processors())
    try:
        yield found
    finally:
        found.shutdown(cancel_futures=True)


@contextmanager
def one_blas_thread() -> Generator[None, None, None]:
    """Within it, BLAS uses one thread; a function may be decorated with it."""
    if importlib.util.find_spec("threadpoolctl") is None:
        yield
        return
    with _controller().limit(limits=1, user_api="blas"):
        yield


@cache
def _controller() -> ThreadpoolController:
    """The BLAS libraries of NumPy and SciPy, looked for once: it takes milliseconds."""
    import scipy.linalg  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
