# pyright: basic
"""Correlated noise on a CUDA device: tables of tensors for the kernels of ``triton_programs``.

A list of tensors of one dtype takes one launch: each program looks up its tensor, so the launch
cost does not grow with the number of tensors. The map from programs to tensors depends only on
sizes and offsets and is cached; addresses are sent again when they change. The cached data belongs
to one CUDA stream. Its copies and kernels run in order, so that no kernel reads a table before it
has arrived or after it has been overwritten.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

from corrnoise.algebra.sections import Section
from corrnoise.noise.backends import triton_programs as programs
from corrnoise.noise.backends.cpu import Layout, as_array, local_starts
from corrnoise.noise.generator.normals import Normals
from corrnoise.noise.generator.stream import NoiseStream

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int32: tl.uint32,
}
_NEAR = 1 << 36  # below this index state word 13 is 0
_KEPT = 16  # how many tables and coefficient vectors are cached on the device


@dataclass(frozen=True)
class Tuning:
    """How the kernels are laid out; every choice gives the same words.

    Attributes:
        block: ChaCha blocks of one program, a power of 2 of at least 32. With 32, a program is one
            warp, so that no other warp waits when one meets the tail.
        num_warps: warps of one program; block / (32·num_warps) blocks for each thread.
        fast: whether logarithm, root, sine and cosine use the special-function unit.
        registers: the largest number of registers of a thread in ``add_weighted`` per block of the
            thread; ``None`` for the compiler's choice. With 56, a multiprocessor of an H200 runs 36
            warps. The rare refined pass needs more and spills them to memory. The slow functions
            have no limit.
    """

    block: int = 32
    num_warps: int = 1
    fast: bool = True
    registers: int | None = 56

    def limit(self) -> int | None:
        """The most registers of a thread in ``add_weighted``."""
        if self.registers is None or not self.fast:
            return None
        return min(255, self.registers * max(1, self.block // (32 * self.num_warps)))


@dataclass(frozen=True)
class _Group:
    """The tensors of one dtype, with the table and the map for one launch."""

    dtype: Any
    members: tuple[int, ...]
    table: torch.Tensor
    owners: torch.Tensor
    far: bool


class TritonBackend:
    """The counterpart of ``CpuBackend`` for tensors on a CUDA device."""

    def __init__(self, stream: NoiseStream, device: str, tuning: Tuning | None = None) -> None:
        self._device = torch.device(device)
        self.tuning = tuning or Tuning()
        self._stream = stream
        self._groups: OrderedDict[Any, list[_Group]] = OrderedDict()
        self._addresses: dict[int, tuple[int, ...]] = {}
        self._constants: OrderedDict[Any, torch.Tensor] = OrderedDict()

    def zeros(self, rows: int, size: int) -> torch.Tensor:
        """New state vectors, all zero."""
        return torch.zeros(rows, size, dtype=torch.float32, device=self._device)

    def adopt(self, vectors: Any) -> torch.Tensor:
        """A copy of state vectors that another backend made."""
        return torch.from_numpy(as_array(vectors)).to(self._device)

    def add_weighted(
        self,
        targets: Sequence[torch.Tensor],
        layout: Layout,
        step: int,
        weights: Normals,
        scale: float,
    ) -> None:
        """Add scale·Σ_t weights[t]·z_{step-len+1+t}, of one term or more, in one pass."""
        _check_terms(weights.size)
        coefs = self._constant(weights)
        for group in self._prepare(targets, layout):
            self._launch(
                programs.add_weighted, group, weights=coefs, count=weights.size, scale=scale,
                DTYPE=group.dtype, maxnreg=self.tuning.limit(),
                **self._draw(step - weights.size + 1, group.far),
            )  # fmt: skip

    def add_lookahead(
        self,
        targets: Sequence[torch.Tensor],
        layout: Layout,
        first: int,
        weights: Sequence[Normals],
        use: int,
        scale: float,
        state: torch.Tensor,
    ) -> None:
        """Compute the rows of the steps first, first + 1, … at once; see ``CpuBackend``."""
        _check_terms(min(w.size for w in weights))
        oldest = min(first + r - w.size + 1 for r, w in enumerate(weights))
        table = np.zeros((first + len(weights) - oldest, len(weights)), dtype=np.float32)
        for r, w in enumerate(weights):
            begin = first + r - w.size + 1 - oldest
            table[begin : begin + w.size, r] = w
        coefs = self._constant(table)
        for group in self._prepare(targets, layout):
            self._launch(
                programs.add_lookahead, group, weights=coefs, count=table.shape[0], scale=scale,
                use=use, state=state, stride=state.shape[1], ROWS=len(weights),
                DTYPE=group.dtype, **self._draw(oldest, group.far),
            )  # fmt: skip

    def add_stored(
        self, targets: Sequence[torch.Tensor], layout: Layout, scale: float, vector: torch.Tensor
    ) -> None:
        """Add scale times a state vector."""
        for group in self._prepare(targets, layout):
            self._launch(
                programs.add_stored, group, vector=vector, scale=scale, DTYPE=group.dtype,
                BLOCK=self.tuning.block,
            )  # fmt: skip

    def store_normals(self, layout: Layout, step: int, vector: torch.Tensor) -> None:
        """Write z_step into a state vector."""
        vector.zero_()
        parts = vector.split([size for _, size in layout])
        self.add_weighted(parts, layout, step, np.ones(1, dtype=np.float32), 1.0)

    def add_filtered(
        self,
        targets: Sequence[torch.Tensor] | None,
        layout: Layout,
        step: int,
        sections: Sequence[Section],
        scale: float,
        state: torch.Tensor,
        older: Normals | None = None,
    ) -> None:
        """Run z_step through the sections, advance the state, and add the output.

        The weights ``older`` are for the z before the past of a single section; see ``CpuBackend``.
        """
        coefs, shapes, vectors = list[np.ndarray](), list[int](), 0
        for section in sections:
            s = section.num_past
            shapes += [s, step % s if s else 0, vectors, sum(c.size for c in coefs)]
            lead = np.array([section.gain, section.direct], dtype=np.float32)
            coefs += [lead, section.feedback, section.output]
            vectors += s
        numbers = self._constant(np.concatenate(coefs))
        weights = np.zeros(1 if older is None else older.size + 1, dtype=np.float32)
        weights[:-1] = () if older is None else older
        places = self._constant(np.array(shapes, dtype=np.int32))
        parts = state[0].split([size for _, size in layout]) if targets is None else targets
        for group in self._prepare(parts, layout):
            self._launch(
                programs.add_filtered, group, coefs=numbers, shapes=places,
                weights=self._constant(weights), count=weights.size - 1, scale=scale,
                state=state, stride=state.shape[1], SECTIONS=len(sections),
                RECURSIVE=any(section.recursive for section in sections),
                WRITE=targets is not None, DTYPE=group.dtype, **self._draw(step, group.far),
            )  # fmt: skip

    def words(self, step: int, start: int, stop: int) -> torch.Tensor:
        """The keystream words of a slice, as int32; they must equal ``NoiseStream.words``."""
        out = torch.zeros(stop - start, dtype=torch.int32, device=self._device)
        for group in self._prepare([out], ((start, stop - start),)):
            options = self._draw(step, True)
            del options["FAST"], options["FAR"]
            self._launch(programs.write_words, group, **options)
        return out

    def _draw(self, step: int, far: bool) -> dict[str, Any]:
        words = np.frombuffer(self._stream.secret, "<i4").tolist()
        return {
            **{f"k{i}": word for i, word in enumerate(words)},
            "step": _signed(step),
            "stream_id": _signed(self._stream.stream),
            "BLOCK": self.tuning.block,
            "FAR": far,
            "ROUNDS": self._stream.rounds,
            "FAST": self.tuning.fast,
        }

    def _launch(self, kernel: Any, group: _Group, **arguments: Any) -> None:
        on_cuda = self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_cuda else contextlib.nullcontext():
            kernel[(group.owners.numel(),)](
                group.table, group.owners, num_warps=self.tuning.num_warps, **arguments
            )

    def _prepare(self, targets: Sequence[torch.Tensor], layout: Layout) -> list[_Group]:
        """One group per dtype, with the tensors' current addresses."""
        dtypes = tuple(tensor.dtype for tensor in targets)
        name = (layout, dtypes, self.tuning.block, self._queue())
        if name not in self._groups:
            self._groups[name] = [
                self._group(layout, tuple(k for k, d in enumerate(dtypes) if d == dtype), dtype)
                for dtype in dict.fromkeys(dtypes)
            ]
            if len(self._groups) > _KEPT:
                for old in self._groups.popitem(last=False)[1]:
                    self._addresses.pop(id(old), None)
        self._groups.move_to_end(name)
        groups = [group for group in self._groups[name] if group.owners.numel()]
        for group in groups:
            addresses = tuple(targets[k].data_ptr() for k in group.members)
            if self._addresses.get(id(group)) != addresses:
                group.table[:, 0] = self._send(np.array(addresses, dtype=np.int64))
                self._addresses[id(group)] = addresses
        return groups

    def _group(self, layout: Layout, members: tuple[int, ...], dtype: torch.dtype) -> _Group:
        tile = 16 * self.tuning.block
        places, starts = [layout[k] for k in members], local_starts(layout)
        counts = [-(-(o + s) // tile) - o // tile if s else 0 for o, s in places]
        begins = np.concatenate([[0], np.cumsum(counts)])
        rows = [
            [0, offset, size, offset // tile - int(begin), starts[k]]
            for k, (offset, size), begin in zip(members, places, begins[:-1], strict=True)
        ]
        owners = np.repeat(np.arange(len(members), dtype=np.int32), counts)
        return _Group(
            _TYPES[dtype],
            members,
            self._send(np.array(rows, dtype=np.int64)),
            self._send(owners),
            any(offset + size > _NEAR for offset, size in places),
        )

    def _constant(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device; the most recent arrays are cached."""
        name = (array.tobytes(), array.dtype.char, self._queue())
        if name not in self._constants:
            self._constants[name] = self._send(np.array(array).reshape(-1))
            if len(self._constants) > _KEPT:
                self._constants.popitem(last=False)
        self._constants.move_to_end(name)
        return self._constants[name]

    def _queue(self) -> int:
        """The CUDA stream that kernels are launched on."""
        on_cuda = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device).cuda_stream if on_cuda else 0

    def _send(self, array: np.ndarray) -> torch.Tensor:
        """Copy to the device from pinned memory, so that the host does not wait for the queue."""
        here = torch.from_numpy(array)
        if self._device.type == "cuda":
            here = here.pin_memory()
        return here.to(self._device, non_blocking=True)


def _check_terms(count: int) -> None:
    """Refuse sums of no terms: the kernels are compiled for at least one."""
    if count < 1:
        raise ValueError(f"weights must have at least 1 term, got {count}; leave out empty sums")


def _signed(word: int) -> int:
    """A 32-bit word as Triton's i32, whatever its top bit."""
    return word - (1 << 32) if word >= 1 << 31 else word
