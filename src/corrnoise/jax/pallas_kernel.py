"""The noise kernel for CUDA devices, in Pallas: one read and one write of the gradient.

XLA alone computes a block either 16 times, once for each of its words, or in fusions with 16
results, which take long to compile for every leaf, and which a second pass has to interleave. Here
one lane computes one block and keeps its 16 words in registers, as in
``noise.backends.triton_kernel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from corrnoise.jax import ptx
from corrnoise.jax.chacha import Steps, in_registers
from corrnoise.jax.normals import fraction, pair
from corrnoise.jax.rows import SECOND, Source
from corrnoise.noise.generator.normals import GROUP, GROUP_BLOCKS, TAIL

Array = Any


@dataclass(frozen=True)
class Layout:
    """How the kernel is laid out; every choice gives the same noise.

    Attributes:
        lanes: ChaCha blocks of a program, a power of 2 of at least 32.
        warps: of a program; one for each 32 lanes gives every thread one block.
        unroll: how many double rounds an iteration of ChaCha's loop has; 9 leave no loop, and take
            3 times as long to compile.
    """

    lanes: int = 128
    warps: int = 4
    unroll: int = 3


DEFAULT = Layout()


def add_to_slices(
    values: Array,
    groups: Array,
    rests: Array,
    source: Source,
    divisor: float,
    *,
    interpret: bool = False,
    layout: Layout | None = None,
) -> Array:
    """(values + noise)/divisor for contiguous slices, as ``slices.add_to_slices``.

    Args:
        values: shape (number of slices, length).
        groups: the number of the group of 512 indices in which each begins; uint32.
        rests: where in this group; int32.
        source: of the noise.
        divisor: of the sum.
        interpret: run it with JAX's operations, to test it without a GPU.
        layout: of the kernel; ``DEFAULT`` if not given.
    """
    (rows, size), count = values.shape, source.weights.shape[0]
    layout = layout or DEFAULT
    lanes, tile_size = layout.lanes, 16 * layout.lanes
    programs = -(-(size + GROUP - 1) // tile_size)  # of a slice
    add_normals = _add_normals if interpret else ptx.add_normals

    def kernel(
        values: Any, groups: Any, rests: Any, secret: Any, weights: Any, step: Any, out: Any
    ) -> None:
        lane = jnp.arange(lanes, dtype=jnp.uint32)
        program = pl.program_id(0)
        row, tile = (0, program) if rows == 1 else (program // programs, program % programs)
        rest = rests[row]
        first = groups[row] * np.uint32(GROUP_BLOCKS)
        counter = first + tile.astype(jnp.uint32) * np.uint32(lanes) + lane
        key = [secret[k] for k in range(8)]
        own = (lane // GROUP_BLOCKS * GROUP + lane % GROUP_BLOCKS).astype(jnp.int32)
        start = tile * tile_size - rest
        # A 1 that the compiler knows neither to be one nor to be the same for all lanes.
        one = (lane & (rest.astype(jnp.uint32) >> 31)) + np.uint32(1)
        steps = Steps() if interpret else ptx.steps(one)

        def words_at(at: Array, high: int, unroll: int) -> list[Array]:
            tail = counter, np.uint32(high), at, np.uint32(source.stream)
            return in_registers(key, tail, source.rounds, steps=steps, unroll=unroll)

        def when(k: Array) -> tuple[Array, Array]:
            lag = count - 1 - k
            return step[()] - lag.astype(jnp.uint32), weights[lag]

        def draw(k: Array, carry: Any) -> Any:
            sums, least = carry
            at, weight = when(k)
            words = words_at(at, 0, layout.unroll)
            return add_normals(sums, words, weight, None), _least([least, *words[:8]])

        def add(sums: list[Array], places: Sequence[Array | int], masked: bool) -> None:
            for total, place in zip(sums, places, strict=True):
                here = start + own + GROUP_BLOCKS * place
                inside = (here >= 0) & (here < size) if masked else None
                here = row * size + here
                old = plgpu.load(values.at[here], mask=inside, other=0.0 if masked else None)
                new = (old.astype(jnp.float32) + total) / divisor
                plgpu.store(out.at[here], new.astype(out.dtype), mask=inside)

        def refine(half: Array, _: None) -> None:
            """The same with second blocks, for half of the pairs, so that registers suffice."""

            def some(of: list[Array], number: int) -> list[Array]:
                return [
                    jnp.where(half == 0, of[k + j], of[k + j + 4])
                    for k in range(0, number, 8)
                    for j in range(4)
                ]

            def draw_refined(k: Array, sums: list[Array]) -> list[Array]:
                at, weight = when(k)
                second = words_at(at, SECOND, 1)
                found = some([fraction(second[j], second[j + 8]) for j in range(8)], 8)
                return add_normals(sums, some(words_at(at, 0, 1), 16), weight, found)

            sums = lax.fori_loop(0, count, draw_refined, zeros[:8])
            add(sums, [4 * half + k + j for k in (0, 8) for j in range(4)], True)

        zeros = [jnp.zeros(lanes, jnp.float32)] * 16
        none_yet = jnp.full(lanes, SECOND, jnp.uint32)
        sums, least = lax.fori_loop(0, count, draw, (zeros, none_yet))
        tail = jnp.min(least) < TAIL
        whole = (start >= 0) & (start + tile_size <= size)
        plain = jnp.logical_not(tail)
        pl.when(plain & whole)(lambda: add(sums, range(16), False))
        pl.when(plain & jnp.logical_not(whole))(lambda: add(sums, range(16), True))
        pl.when(tail)(lambda: lax.fori_loop(0, 2, refine, None))

    parts = source.secret, source.weights, source.step
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows * size,), values.dtype),
        grid=(rows * programs,),
        input_output_aliases={0: 0},
        interpret=interpret,
        compiler_params=None if interpret else plgpu.CompilerParams(num_warps=layout.warps),
    )(values.reshape(-1), groups, rests, *parts).reshape(rows, size)


def _add_normals(
    sums: list[Array], words: list[Array], weight: Array, found: list[Array] | None
) -> list[Array]:
    """``ptx.add_normals`` by JAX's operations."""
    half = len(words) // 2
    pairs = [
        pair(words[k], words[k + half], None if found is None else found[k]) for k in range(half)
    ]
    normals = [one for one, _ in pairs] + [other for _, other in pairs]
    return [total + weight * z for total, z in zip(sums, normals, strict=True)]


def _least(words: list[Array]) -> Array:
    while len(words) > 1:
        words = [reduce(jnp.minimum, words[k : k + 2]) for k in range(0, len(words), 2)]
    return words[0]
