"""Processes of the storm: forks that report what an observer would see of them.

A fork has imported everything already, and dies of SIGKILL as any process does. It reports the
weights after every step that it releases, and how it ended, through a pipe.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.optim.optimizer import register_optimizer_step_post_hook

from corrnoise.noise import Key
from corrnoise.records import Ledger
from storm_faults import Fault, Points

# New keys of the processes, which take turns: a key that was lost is not replaced by itself.
KEYS = [Key.from_bytes(hashlib.sha256(b"storm %d" % number).digest()) for number in range(3)]
_PATIENCE = 60.0  # seconds until a process counts as hanging

Tell = Callable[..., None]


class RefusedError(Exception):
    """A command ended with exit status 2 and one line."""


@dataclass
class Outcome:
    """What an observer saw of a process.

    Attributes:
        end: "done", "refused", "interrupted", "killed" or "broken".
        line: what was refused or broke.
        released: (step, digest of the weights after it) in the order of release.
        known: how many released steps the ledger had when it was opened.
        final: a digest of what the run ended with; "" before its end.
        points: the points of its files, where faults can strike.
        heard: everything else that the process told.
    """

    end: str = "killed"
    line: str = ""
    released: list[tuple[int, str]] = field(default_factory=list)
    known: int | None = None
    final: str = ""
    points: list[tuple[str, str]] = field(default_factory=list)
    heard: dict[str, Any] = field(default_factory=dict)


class Process:
    """A forked process that runs ``action(tell)``.

    Args:
        action: what it does; it calls ``tell`` with what the storm should know.
        key: the number of the key that it generates if it needs a new one.
        fault: what strikes it.
        limit: the largest file that it may write, in bytes.
    """

    _living: ClassVar[set[Process]] = set()

    def __init__(
        self,
        action: Callable[[Tell], None],
        *,
        key: int = 0,
        fault: Fault | None = None,
        limit: int | None = None,
    ) -> None:
        self._text = b""
        self._pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._pipe)
                _live(end, action, key, fault, limit)
            finally:
                os._exit(1)  # whatever happens, a fork does not become a second storm
        os.close(end)
        self._living.add(self)

    def wait(self) -> Outcome:
        """Until it ends; one that hangs is killed, and broken."""
        deadline = time.monotonic() + _PATIENCE
        while self._hear(deadline):
            pass
        late = time.monotonic() >= deadline
        self.end()
        return Outcome("broken", "the process hangs") if late else _outcome(self._text)

    def told(self, name: str) -> Any:
        """Wait until the process tells something of this name; ``None`` if it ends before."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            for line in self._text.splitlines():
                if line.endswith(b"}") and name in json.loads(line):
                    return json.loads(line)[name]
            if not self._hear(deadline):
                return None

    def stopped(self) -> bool:
        """Wait until the process has stopped itself; ``False`` if it ended instead."""
        return os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def end(self) -> None:
        """Kill it where it still lives."""
        if self in self._living:
            self._living.remove(self)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)  # of one that has ended: it is not reaped yet
                os.waitpid(self.pid, 0)
            os.close(self._pipe)

    @classmethod
    def end_all(cls) -> None:
        """Kill those that an interrupted event has left."""
        for process in list(cls._living):
            process.end()

    def _hear(self, deadline: float) -> bool:
        """Read on; ``False`` at the end of the process, or when it is late."""
        left = max(0.0, deadline - time.monotonic())
        data = os.read(self._pipe, 1 << 16) if select.select([self._pipe], [], [], left)[0] else b""
        self._text += data
        return bool(data)


def _outcome(text: bytes) -> Outcome:
    found = Outcome()
    for line in text.splitlines():
        if not line.endswith(b"}"):
            break  # torn by a kill
        for name, value in json.loads(line).items():
            if name == "release":
                found.released.append((value[0], value[1]))
            elif name == "points":
                found.points = [(writer, what) for writer, what in value]
            elif hasattr(found, name):
                setattr(found, name, value)
            else:
                found.heard[name] = value
    return found


def _live(
    pipe: int, action: Callable[[Tell], None], key: int, fault: Fault | None, limit: int | None
) -> None:
    """The life of a forked process."""

    def tell(**what: Any) -> None:
        os.write(pipe, json.dumps(what).encode() + b"\n")

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the storm
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    Key.generate = staticmethod(lambda: KEYS[key % len(KEYS)])  # type: ignore[method-assign]
    _observe(tell)
    points = Points(fault)
    points.install()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        action(tell)
        tell(end="done")
    except (ValueError, OSError, RefusedError) as refused:
        one_line = len(str(refused).splitlines()) == 1
        tell(end="refused" if one_line else "broken", line=str(refused))
    except KeyboardInterrupt:
        tell(end="interrupted")
    except BaseException:
        tell(end="broken", line=traceback.format_exc())
    tell(points=points.seen)
    os._exit(0)


def _observe(tell: Tell) -> None:
    """Tell of the weights after every step that is released, and of every ledger that is opened."""
    begin, record = Ledger.__init__, Ledger.record
    latest = [0]

    @functools.wraps(begin)
    def opened(self: Ledger, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        tell(known=self.num_released)

    @functools.wraps(record)
    def recorded(self: Ledger, step: int, gradient: str) -> None:
        record(self, step, gradient)
        latest[0] = step

    def stepped(optimizer: Any, args: Any, options: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        tell(release=[latest[0], digest(params)])

    Ledger.__init__ = opened  # type: ignore[method-assign]
    Ledger.record = recorded  # type: ignore[method-assign]
    register_optimizer_step_post_hook(stepped)


def digest(tensors: Any) -> str:
    """A digest of every bit of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()
