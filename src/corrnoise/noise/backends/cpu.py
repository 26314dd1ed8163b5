"""Correlated noise on the CPU: tiles that stay in cache, distributed over threads.

OpenSSL and NumPy release the interpreter's lock, so threads run in parallel. Each thread needs a
``Workspace`` and one tile per row that it computes. No temporary array grows with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from corrnoise.algebra.sections import Section
from corrnoise.noise.generator.normals import Normals
from corrnoise.noise.generator.stream import NoiseStream, Workspace, room_size, tiles

Layout = tuple[tuple[int, int], ...]  # (flat offset, size) of each tensor
Work = Callable[["Room", int, int, int], None]


class Target(Protocol):
    """An array that noise is added to."""

    def add(self, start: int, stop: int, noise: Normals) -> None:
        """Add ``noise`` to the elements [start, stop)."""
        ...


class ArrayTarget:
    """A flat NumPy array."""

    def __init__(self, array: npt.NDArray[np.floating]) -> None:
        self._array = array

    def add(self, start: int, stop: int, noise: Normals) -> None:
        """Add ``noise`` to the elements [start, stop)."""
        part = self._array[start:stop]
        np.add(part, noise, out=part)


class Room:
    """The memory of one thread: a workspace and tiles for sums."""

    def __init__(self, rows: int, size: int) -> None:
        self.workspace = Workspace(size)
        self.rows = [np.empty(size, dtype=np.float32) for _ in range(rows)]


# The fewest elements per thread: starting a thread costs about as much as 2^17 draws.
_SHARE = 1 << 18


class CpuBackend:
    """Adds noise to arrays in main memory. Sums run from the oldest z to the newest, in float32."""

    def __init__(self, stream: NoiseStream, threads: int) -> None:
        self._stream, self._threads = stream, threads

    def zeros(self, rows: int, size: int) -> Normals:
        """New state vectors, all zero."""
        return np.zeros((rows, size), dtype=np.float32)

    def adopt(self, vectors: Any) -> Normals:
        """A copy of state vectors that another backend made."""
        return as_array(vectors)

    def add_weighted(
        self, targets: Sequence[Target], layout: Layout, step: int, weights: Normals, scale: float
    ) -> None:
        """Add scale·Σ_t weights[t]·z_{step-len+1+t}: every z is regenerated, none is stored."""

        def work(room: Room, k: int, low: int, high: int) -> None:
            noise = self._weighted(room, step, weights, low, high)
            _add(targets, layout, k, low, high, noise, scale)

        self._run(layout, work, 1)

    def row(self, step: int, weights: Normals, start: int, stop: int) -> Normals:
        """The noise of a slice, as the reference for all other methods."""
        result = np.empty(stop - start, dtype=np.float32)
        room = Room(1, room_size(stop - start))
        for low, high in tiles(start, stop):
            noise = self._weighted(room, step, weights, low, high)
            result[low - start : high - start] = noise
        return result

    def add_lookahead(
        self,
        targets: Sequence[Target],
        layout: Layout,
        first: int,
        weights: Sequence[Normals],
        use: int,
        scale: float,
        state: Normals,
    ) -> None:
        """Compute the rows of the steps first, first + 1, … at once.

        Row 0 is added and not kept, unless ``use`` names another row to be added; rows 1, 2, …
        are written to the state.
        """
        starts = local_starts(layout)

        def work(room: Room, k: int, low: int, high: int) -> None:
            sums = [row[: high - low] for row in room.rows]
            product = sums.pop()
            oldest = min(first + r - w.size + 1 for r, w in enumerate(weights))
            for step in range(oldest, first + len(weights)):
                z = self._stream.fill(step, low, high, room.workspace)
                for r, w in enumerate(weights):
                    t = step - (first + r - w.size + 1)
                    if t == 0:
                        np.multiply(z, w[0], out=sums[r])
                    elif 0 < t < w.size:
                        np.multiply(z, w[t], out=product)
                        np.add(sums[r], product, out=sums[r])
            here = starts[k] + low - layout[k][0]
            for r in range(1, len(weights)):
                state[r - 1, here : here + high - low] = sums[r]
            _add(targets, layout, k, low, high, sums[use], scale)

        self._run(layout, work, len(weights) + 1)

    def add_stored(
        self, targets: Sequence[Target], layout: Layout, scale: float, vector: Normals
    ) -> None:
        """Add scale times a state vector."""
        starts = local_starts(layout)

        def work(room: Room, k: int, low: int, high: int) -> None:
            here = starts[k] + low - layout[k][0]
            noise = room.rows[0][: high - low]
            np.copyto(noise, vector[here : here + high - low])
            _add(targets, layout, k, low, high, noise, scale)

        self._run(layout, work, 1)

    def store_normals(self, layout: Layout, step: int, vector: Normals) -> None:
        """Write z_step into a state vector."""
        starts = local_starts(layout)

        def work(room: Room, k: int, low: int, high: int) -> None:
            here = starts[k] + low - layout[k][0]
            z = self._stream.fill(step, low, high, room.workspace)
            vector[here : here + high - low] = z

        self._run(layout, work, 0)

    def add_filtered(
        self,
        targets: Sequence[Target] | None,
        layout: Layout,
        step: int,
        sections: Sequence[Section],
        scale: float,
        state: Normals,
        older: Normals | None = None,
    ) -> None:
        """Run z_step through the sections, advance the state, and add the output.

        A section's value of step i is in slot i mod s of its s state vectors. Without targets only
        the state advances. ``older`` is for a single section that is a ring of s past z. It has the
        weights of the z before those, oldest first; these z are regenerated.
        """
        starts = local_starts(layout)
        begun = older is not None and older.size > 0
        last = step - sections[0].num_past - 1  # the newest of the older z

        def work(room: Room, k: int, low: int, high: int) -> None:
            here = starts[k] + low - layout[k][0]
            part = state[:, here : here + high - low]
            y, w, product, other = (row[: high - low] for row in room.rows)
            if older is not None and begun:
                y = self._weighted(room, last, older, low, high)
            x = self._stream.fill(step, low, high, room.workspace)
            base = 0
            for section in sections:
                past = part[base : base + section.num_past]
                _section(section, step, x, past, w, y, product, begun)
                base += section.num_past
                x, y, other = y, other, y
            if targets is not None:
                _add(targets, layout, k, low, high, x, scale)

        self._run(layout, work, 4)

    def _weighted(self, room: Room, step: int, weights: Normals, low: int, high: int) -> Normals:
        noise = room.rows[0][: high - low]
        oldest = step - weights.size + 1
        for t, weight in enumerate(weights):
            z = self._stream.fill(oldest + t, low, high, room.workspace)
            if t == 0:
                np.multiply(z, weight, out=noise)
            else:
                np.multiply(z, weight, out=z)
                np.add(noise, z, out=noise)
        return noise

    def _run(self, layout: Layout, work: Work, rows: int) -> None:
        items = [
            (k, low, high)
            for k, (offset, size) in enumerate(layout)
            for low, high in tiles(offset, offset + size)
        ]
        total = sum(high - low for _, low, high in items)
        threads = min(self._threads, len(items), max(1, total // _SHARE))
        size = room_size(max((high - low for _, low, high in items), default=0))

        def share(thread: int) -> None:
            room = Room(rows, size)
            for k, low, high in items[thread::threads]:
                work(room, k, low, high)

        if threads <= 1:
            share(0) if items else None
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(share, range(threads)))


def as_array(vectors: Any) -> Normals:
    """A copy of state vectors, torch or NumPy, as a NumPy array."""
    here = vectors.detach().cpu().numpy() if hasattr(vectors, "detach") else vectors
    return np.array(here, dtype=np.float32)


def local_starts(layout: Layout) -> list[int]:
    """Where each tensor begins in the state vectors."""
    starts, total = list[int](), 0
    for _, size in layout:
        starts.append(total)
        total += size
    return starts


def _add(
    targets: Sequence[Target],
    layout: Layout,
    k: int,
    low: int,
    high: int,
    noise: Normals,
    scale: float,
) -> None:
    np.multiply(noise, np.float32(scale), out=noise)
    offset = layout[k][0]
    targets[k].add(low - offset, high - offset, noise)


def _section(
    section: Section,
    step: int,
    x: Normals,
    past: Normals,
    w: Normals,
    y: Normals,
    product: Normals,
    begun: bool,
) -> None:
    """Run one section on x: y gets the output, and w replaces the oldest slot of the past.

    If the output has ``begun``, y has a value already, and the output is added to it.
    """
    s = section.num_past

    def total(coefs: Normals, lead: float, out: Normals, begun: bool) -> None:
        def add(value: Normals, coef: np.float32) -> None:
            nonlocal begun
            np.multiply(value, coef, out=product if begun else out)
            if begun:
                np.add(out, product, out=out)
            begun = True

        for t, coef in enumerate(coefs):  # w_{step-s} is in the slot that w_step will overwrite
            add(past[(step + t) % s], coef)
        add(x, np.float32(lead))

    total(section.feedback if section.recursive else section.feedback[:0], section.gain, w, False)
    if section.passes:
        np.copyto(y, w)
    else:
        total(section.output, section.direct, y, begun)
    if s:
        past[step % s] = w
