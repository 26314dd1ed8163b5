"""Noise for one leaf of a pytree, whole or sharded: every device makes its own slice.

XLA asks here how to partition the operation. A shard of an array is a number of contiguous slices
of the flat parameter vector, whose beginnings follow from the position of the device in the mesh.
So there is no communication, and the noise is that of the unsharded run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from corrnoise.jax.rows import Source
from corrnoise.jax.slices import add_to_slices, noisy
from corrnoise.noise.generator.normals import GROUP

Array = Any

# Slices shorter than a group would cost a group each: the whole rows are computed and cut.
_SHORT = GROUP
_MOST_ROWS = 1 << 23


class Place(NamedTuple):
    """The place of a leaf, and what else is known before the program runs.

    Attributes:
        offset: of its first element in the flat vector.
        divisor: of the sum.
        stream: the id.
        rounds: of ChaCha.
    """

    offset: int
    divisor: float
    stream: int
    rounds: int


def add_noise(values: Array, secret: Array, weights: Array, step: Array, place: Place) -> Array:
    """(values + noise)/divisor for a leaf.

    Args:
        values: the leaf.
        secret: the 8 words of the subkey.
        weights: of z[step], z[step - 1], …, times the scale.
        step: uint32.
        place: where the leaf is, and how noise is made.
    """
    if not values.size:
        return values

    @jax.custom_batching.custom_vmap
    def add(values: Array, secret: Array, weights: Array, step: Array) -> Array:
        typed = jax.typeof(values).sharding
        if AxisType.Explicit in getattr(typed.mesh, "axis_types", ()):
            make = _local(typed.mesh, typed.spec, values.shape, place)
            every = PartitionSpec()
            return jax.shard_map(
                make, in_specs=(typed.spec, every, every, every), out_specs=typed.spec,
                mesh=typed.mesh, check_vma=False,
            )(values, secret, weights, step)  # fmt: skip
        return _add(values, secret, weights, step, place)

    @add.def_vmap
    def _(size: int, batched: list[bool], *arguments: Array) -> tuple[Array, bool]:
        if batched[0] and not batched[1]:
            raise ValueError(
                "updates must not be batched by vmap: each would get the same noise, and their "
                "differences would be released without any; call update once, on the sum over the "
                "batch, or give each its own key by batching secret as well"
            )
        whole = [
            argument if has else jnp.broadcast_to(argument, (size, *jnp.shape(argument)))
            for argument, has in zip(arguments, batched, strict=True)
        ]
        return lax.map(lambda each: add(*each), tuple(whole)), True

    with jax.disable_jit(False):  # loops of a kernel cannot run step by step
        return add(values, secret, weights, step)


@partial(custom_partitioning, static_argnums=(4,))
def _add(values: Array, secret: Array, weights: Array, step: Array, place: Place) -> Array:
    source = Source(secret, weights, step, place.stream, place.rounds)
    return _add_local(values, values.shape, [0] * values.ndim, place.offset, source, place.divisor)


def _partition(place: Place, mesh: Any, given: Any, result: Any) -> Any:
    del result
    mesh, spec = given[0].sharding.mesh, given[0].sharding.spec
    shards, every = NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec())
    lowered = _local(mesh, spec, given[0].shape, place)
    return mesh, lowered, shards, (shards, every, every, every)


def _local(mesh: Any, spec: Any, whole: Sequence[int], place: Place) -> Callable[..., Array]:
    """What each device does, as a function of its shard."""
    axes = [_names(part) for part in (*spec, *(None,) * (len(whole) - len(spec)))]

    def add(values: Array, secret: Array, weights: Array, step: Array) -> Array:
        at = [_position(names, mesh) for names in axes]
        source = Source(secret, weights, step, place.stream, place.rounds)
        return _add_local(values, whole, at, place.offset, source, place.divisor)

    return add


def _infer(*arguments: Any) -> Any:
    return arguments[-2][0].sharding


def _rule(*arguments: Any) -> str:
    rank = len(arguments[-2][0].shape)
    axes = " ".join(f"i{k}" for k in range(rank))
    return f"{axes}, k, w, -> {axes}"


_add.def_partition(partition=_partition, infer_sharding_from_operands=_infer, sharding_rule=_rule)


def _names(part: Any) -> tuple[str, ...]:
    return () if part is None else part if isinstance(part, tuple) else (part,)


def _position(names: tuple[str, ...], mesh: Any) -> Array | int:
    """The number of this device's shard along one axis of an array."""
    position: Array | int = 0
    for name in names:
        position = position * mesh.shape[name] + lax.axis_index(name)
    return position


def _add_local(
    values: Array,
    whole: Sequence[int],
    at: Sequence[Array | int],
    offset: int,
    source: Source,
    divisor: float,
) -> Array:
    """Add noise to one shard of an array.

    Args:
        values: the shard.
        whole: the shape of the array.
        at: the number of the shard along each axis; 0 for an axis that is not cut.
        offset: of the array in the flat vector.
        source: of the noise.
        divisor: of the sum.
    """
    shape = values.shape
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    cut = [axis for axis in range(len(whole)) if shape[axis] != whole[axis]]
    last = cut[-1] if cut else 0  # from here on the elements of the shard are contiguous
    length = math.prod(shape[last:])
    if len(cut) and last and length < _SHORT:
        return _add_short(values, whole, at, offset, source, divisor)
    groups, rests = jnp.full((1,) * (last + 1), offset // GROUP, jnp.uint32), offset % GROUP
    for axis in cut:
        groups, rests = _moved(groups, rests, at[axis], shape[axis] * strides[axis])
    for axis in range(last):
        if shape[axis] >= _MOST_ROWS:
            raise ValueError(
                f"axis {axis} of a leaf of shape {tuple(whole)} must have less than 2^23 elements "
                "on a device, since a later axis is sharded; shard the first axis"
            )
        line = (-1,) + (1,) * (last - axis)
        here = jnp.arange(shape[axis], dtype=jnp.uint32).reshape(line)
        groups, rests = _moved(groups, rests, here, strides[axis])
    flat = values.reshape(-1, length)
    if not isinstance(rests, int):
        rests = rests.reshape(-1)
    return add_to_slices(flat, groups.reshape(-1), rests, source, divisor).reshape(shape)


def _add_short(
    values: Array,
    whole: Sequence[int],
    at: Sequence[Array | int],
    offset: int,
    source: Source,
    divisor: float,
) -> Array:
    """The same where slices are short: compute the noise of whole rows, and take a part of it."""
    shape = values.shape
    wide = jnp.zeros((shape[0], *whole[1:]), jnp.float32)
    noise = _add_local(wide, whole, [at[0]] + [0] * (len(whole) - 1), offset, source, 1.0)
    # Shards of one size may go beyond an axis; dynamic_slice would then move back, to the noise of
    # another shard. What is beyond is dropped by whoever asked for uneven shards.
    noise = jnp.pad(
        noise,
        [(0, 0)] + [(0, -size % part) for part, size in zip(shape[1:], whole[1:], strict=True)],
    )
    starts = [jnp.int32(0)] + [
        jnp.asarray(place, jnp.int32) * size for place, size in zip(at[1:], shape[1:], strict=True)
    ]
    return noisy(values, lax.dynamic_slice(noise, starts, shape), divisor)


def _moved(group: Array, rest: Array | int, count: Array | int, stride: int) -> tuple[Array, Array]:
    """The place that is ``count`` times ``stride`` further on, as a group and a rest below 512.

    Exact as long as 512·count fits 32 bits.
    """
    steps = jnp.asarray(count, jnp.uint32)
    more = steps * np.uint32(stride % GROUP) + jnp.asarray(rest, jnp.uint32)
    group = group + steps * np.uint32(stride // GROUP) + more // np.uint32(GROUP)
    return group, (more % np.uint32(GROUP)).astype(jnp.int32)
