"""Ranks of torch.distributed as forks of one process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable


def on_ranks(world: int, work: Callable[[int], None]) -> bool:
    """Whether the work of every rank ended without an exception."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                work(rank)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]  # of all, also after a failure
    return not any(statuses)
