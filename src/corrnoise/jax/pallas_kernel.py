"""The noise kernel for CUDA devices, in Pallas: one read and one write of the gradient.

XLA alone computes a block either 16 times, once for each of its words, or in fusions with 16
results, which take long to compile for every leaf, and which a second pass has to interleave. Here
one lane computes one block and keeps its 16 words in registers, as in
``noise.backends.triton_kernel``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from corrnoise.jax.chacha import in_registers
from corrnoise.jax.normals import pair
from corrnoise.jax.rows import SECOND, Source
from corrnoise.noise.generator.normals import GROUP, GROUP_BLOCKS, TAIL

Array = Any

_LANES = 128  # blocks of a program: one for each thread of four warps
_TILE = _LANES * 16


def add_to_slices(
    values: Array,
    groups: Array,
    rests: Array,
    source: Source,
    divisor: float,
    *,
    interpret: bool = False,
) -> Array:
    """(values + noise)/divisor for contiguous slices, as ``slices.add_to_slices``.

    Args:
        values: shape (number of slices, length).
        groups: the number of the group of 512 indices in which each begins; uint32.
        rests: where in this group; int32.
        source: of the noise.
        divisor: of the sum.
        interpret: run it with JAX's operations, to test it without a GPU.
    """
    (rows, size), count = values.shape, source.weights.shape[0]
    programs = -(-(size + GROUP - 1) // _TILE)  # of a slice

    def kernel(
        values: Any, groups: Any, rests: Any, secret: Any, weights: Any, step: Any, out: Any
    ) -> None:
        lane = jnp.arange(_LANES, dtype=jnp.uint32)
        row, tile = pl.program_id(0) // programs, pl.program_id(0) % programs
        first = groups[row] * np.uint32(GROUP_BLOCKS)
        counter = first + tile.astype(jnp.uint32) * np.uint32(_LANES) + lane
        key = [secret[k] for k in range(8)]
        own = (lane // GROUP_BLOCKS * GROUP + lane % GROUP_BLOCKS).astype(jnp.int32)
        start = tile * _TILE + own - rests[row]

        def sums(refined: bool) -> tuple[list[Array], Array]:
            def draw(k: Array, carry: Any) -> Any:
                total, least = carry
                lag = count - 1 - k
                at = step[()] - lag.astype(jnp.uint32)
                more: list[Any] = [None] * 8
                if refined:
                    second = _words(key, counter, SECOND, at, source)
                    more = [(second[j], second[j + 8]) for j in range(8)]
                words = _words(key, counter, 0, at, source)
                total, weight = list(total), weights[lag]
                for j in range(8):
                    one, other = pair(words[j], words[j + 8], more[j])
                    total[j] = total[j] + weight * one
                    total[j + 8] = total[j + 8] + weight * other
                    least = jnp.minimum(least, words[j])
                return total, least

            zeros = [jnp.zeros(_LANES, jnp.float32)] * 16
            return lax.fori_loop(0, count, draw, (zeros, jnp.full(_LANES, SECOND, jnp.uint32)))

        def add(total: list[Array]) -> None:
            for j in range(16):
                here = start + GROUP_BLOCKS * j
                inside = (here >= 0) & (here < size)
                here = row * size + here
                old = plgpu.load(values.at[here], mask=inside, other=0.0)
                new = (old.astype(jnp.float32) + total[j]) / divisor
                plgpu.store(out.at[here], new.astype(out.dtype), mask=inside)

        total, least = sums(False)
        tail = jnp.min(least) < TAIL

        @pl.when(jnp.logical_not(tail))
        def _() -> None:
            add(total)

        @pl.when(tail)
        def _() -> None:
            add(sums(True)[0])

    parts = source.secret, source.weights, source.step
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows * size,), values.dtype),
        grid=(rows * programs,),
        input_output_aliases={0: 0},
        interpret=interpret,
        compiler_params=None if interpret else plgpu.CompilerParams(num_warps=4),
    )(values.reshape(-1), groups, rests, *parts).reshape(rows, size)


def _words(key: list[Array], counter: Array, high: int, step: Array, source: Source) -> list[Array]:
    tail = counter, np.uint32(high), step, np.uint32(source.stream)
    return in_registers(key, tail, source.rounds)
