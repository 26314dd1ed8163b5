"""ChaCha blocks in JAX: the words of the stream, bit for bit those of ``noise.generator.chacha``.

Two forms of one function. ``in_registers`` has the 16 words of a block in 16 arrays, for a kernel
that keeps them in the registers of one thread. ``in_rows`` has the rows of the state as arrays of
4, for XLA, whose operations each read and write memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from corrnoise.noise.generator.chacha import WORDS_PER_BLOCK

Array = Any

_SIGMA = tuple(np.frombuffer(b"expand 32-byte k", dtype="<u4").astype(np.uint32))
_COLUMNS = (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)
_DIAGONALS = (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)


class Steps(NamedTuple):
    """The two steps of a quarter round, on arrays.

    Attributes:
        add: a + b.
        turn: (a ^ b) rotated to the left by some bits.
    """

    add: Callable[[Array, Array], Array] = lambda a, b: a + b
    turn: Callable[[Array, Array, int], Array] = lambda a, b, left: _rotate(a ^ b, left)


def in_registers(
    secret: list[Array],
    tail: tuple[Array, ...],
    rounds: int,
    *,
    steps: Steps | None = None,
    unroll: int = 1,
) -> list[Array]:
    """The 16 words of each block, as 16 arrays of the shape of the counters.

    In the first round of columns only one column has the counters; the others are scalars.

    Args:
        secret: the 8 words of the subkey.
        tail: words 12 to 15 of the state: the low and the high half of the block number, the step
            and the stream id; scalars or arrays.
        rounds: 20, 12 or 8.
        steps: on arrays, where the usual operations are not the best; int32 or uint32.
        unroll: how many double rounds an iteration of the loop has.
    """
    steps = steps or Steps()
    shape = jnp.broadcast_shapes(*(jnp.shape(word) for word in tail))
    start = [jnp.asarray(word, jnp.uint32) for word in (*_SIGMA, *secret, *tail)]
    columns = _quarters(start, _COLUMNS, Steps())
    x = _quarters([jnp.broadcast_to(word, shape) for word in columns], _DIAGONALS, steps)
    turns, left = divmod(rounds // 2 - 1, unroll)

    def double(x: list[Array], count: int) -> list[Array]:
        return _quarters(x, (_COLUMNS + _DIAGONALS) * count, steps)

    x = double(x, left)
    if turns == 1:
        x = double(x, unroll)
    elif turns:
        x = lax.fori_loop(0, turns, lambda _, x: double(x, unroll), x)
    return [
        lax.bitcast_convert_type(steps.add(word, first), jnp.uint32)
        for word, first in zip(x, start, strict=True)
    ]


def _quarters(x: list[Array], places: tuple[tuple[int, ...], ...], steps: Steps) -> list[Array]:
    x = list(x)
    for a, b, c, d in places:
        x[a], x[b], x[c], x[d] = _quarter(x[a], x[b], x[c], x[d], steps=steps)
    return x


def in_rows(secret: Array, tail: tuple[Array, ...], rounds: int) -> Array:
    """The same in one array of shape (16, *shape of the counters); ``secret`` is an array."""
    shape = jnp.broadcast_shapes(*(jnp.shape(word) for word in tail))

    def row(words: Sequence[Array]) -> Array:
        return jnp.stack([jnp.broadcast_to(word, shape) for word in words])

    usual = Steps()
    start = row(_SIGMA), row(list(secret[:4])), row(list(secret[4:])), row(tail)

    def double(_: Array, rows: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b, c, d = _quarter(*rows, steps=usual, separate=True)
        a, b, c, d = _quarter(a, _turn(b, 1), _turn(c, 2), _turn(d, 3), steps=usual, separate=True)
        return a, _turn(b, 3), _turn(c, 2), _turn(d, 1)

    rows = lax.fori_loop(0, rounds // 2, double, start)
    words = [row + first for row, first in zip(rows, start, strict=True)]
    return jnp.concatenate(words).reshape(WORDS_PER_BLOCK, *shape)


def _quarter(
    a: Array, b: Array, c: Array, d: Array, *, steps: Steps, separate: bool = False
) -> tuple[Array, Array, Array, Array]:
    """The quarter round. ``separate`` keeps XLA from computing each value anew for each use."""
    for first, second in ((16, 12), (8, 7)):
        a = steps.add(a, b)
        d = steps.turn(d, a, first)
        if separate:
            a, d = lax.optimization_barrier((a, d))
        c = steps.add(c, d)
        b = steps.turn(b, c, second)
        if separate:
            b, c = lax.optimization_barrier((b, c))
    return a, b, c, d


def _rotate(x: Array, left: int) -> Array:
    return (x << np.uint32(left)) | (x >> np.uint32(32 - left))


def _turn(rows: Array, by: int) -> Array:
    return jnp.concatenate([rows[by:], rows[:by]])
