"""Noise for slices of the flat parameter vector, in pieces: no temporary grows with the model."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from corrnoise.jax import pallas_kernel
from corrnoise.jax.rows import Source, blocks_of, noise_of
from corrnoise.noise.generator.normals import GROUP

Array = Any

# Groups that are computed at once by XLA: few enough to stay in the cache of a processor.
_GROUPS = 1 << 8


def add_to_slices(
    values: Array, groups: Array, rests: Array | int, source: Source, divisor: float
) -> Array:
    """(values + noise)/divisor for contiguous slices of the flat vector.

    On a CUDA device by a kernel, with one read and one write; elsewhere by XLA.

    Args:
        values: shape (number of slices, length), with at most 2^31 - 1 elements.
        groups: the number of the group of 512 indices in which each begins; uint32.
        rests: where in this group; int32, or a number where it is known and the same for all.
        source: of the noise.
        divisor: of the sum.
    """
    places = jnp.broadcast_to(jnp.asarray(rests, jnp.int32), groups.shape)

    def by_kernel(values: Array, groups: Array, places: Array, source: Source) -> Array:
        return pallas_kernel.add_to_slices(values, groups, places, source, divisor)

    def by_xla(values: Array, groups: Array, places: Array, source: Source) -> Array:
        known = rests if isinstance(rests, int) else places
        return add_by_xla(values, groups, known, source, divisor)

    return lax.platform_dependent(values, groups, places, source, cuda=by_kernel, default=by_xla)


def add_by_xla(
    values: Array, groups: Array, rests: Array | int, source: Source, divisor: float
) -> Array:
    """``add_to_slices`` by XLA alone."""
    rows, size = values.shape
    if rows == 1:
        rest = rests if isinstance(rests, int) else rests[0]
        return _add_to_one(values[0], groups[0], rest, source, divisor)[None]
    each = covering(size, rests)
    if each > _GROUPS:

        def whole(k: Array, out: Array) -> Array:
            rest = rests if isinstance(rests, int) else rests[k]
            return out.at[k].set(_add_to_one(out[k], groups[k], rest, source, divisor))

        return lax.fori_loop(0, rows, whole, values)
    count = min(rows, max(1, _GROUPS // each))
    starts = jnp.broadcast_to(jnp.asarray(rests, jnp.int32), groups.shape)

    def some(k: Array | int, out: Array, count: int) -> Array:
        first = jnp.asarray(k * count, jnp.int32)
        here, group, start = (
            lax.dynamic_slice_in_dim(part, first, count) for part in (out, groups, starts)
        )
        numbers = (group[:, None] + jnp.arange(each, dtype=jnp.uint32)).reshape(-1)
        found = noise_of(source, blocks_of(numbers)).reshape(count, -1)
        at = start[:, None] + jnp.arange(size, dtype=jnp.int32)
        here = noisy(here, jnp.take_along_axis(found, at, axis=1), divisor)
        return lax.dynamic_update_slice_in_dim(out, here, first, 0)

    whole_batches, left = divmod(rows, count)
    out = lax.fori_loop(0, whole_batches, lambda k, out: some(k, out, count), values)
    if left:
        out = lax.fori_loop(rows - left, rows, lambda k, out: some(k, out, 1), out)
    return out


def _add_to_one(
    values: Array, group: Array, rest: Array | int, source: Source, divisor: float
) -> Array:
    """Add noise to one slice, piece by piece."""
    size, step = values.shape[0], _GROUPS * GROUP

    def piece(out: Array, k: Array | int, length: int) -> Array:
        start = (jnp.asarray(k * step, jnp.int32),)
        first = group + jnp.asarray(k * _GROUPS, jnp.uint32)
        numbers = jnp.arange(covering(length, rest), dtype=jnp.uint32) + first
        found = noise_of(source, blocks_of(numbers)).reshape(-1)
        noise = lax.dynamic_slice(found, (jnp.asarray(rest, jnp.int32),), (length,))
        here = noisy(lax.dynamic_slice(out, start, (length,)), noise, divisor)
        return lax.dynamic_update_slice(out, here, start)

    count, left = divmod(size, step)
    out = values
    if count:
        out = lax.fori_loop(0, count, lambda k, out: piece(out, k, step), out)
    return piece(out, count, left) if left else out


def covering(size: int, rest: Array | int) -> int:
    """The groups that a slice touches, at most; exactly if ``rest`` is known."""
    return -(-(size + (rest if isinstance(rest, int) else GROUP - 1)) // GROUP)


def noisy(values: Array, noise: Array, divisor: float) -> Array:
    """(values + noise)/divisor in float32, rounded once."""
    return ((values.astype(jnp.float32) + noise) / divisor).astype(values.dtype)
