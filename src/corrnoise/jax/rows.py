"""The noise of whole groups of 512 indices: Σ_t weights[t]·z[step - t], regenerated and summed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from corrnoise.jax.chacha import in_rows
from corrnoise.jax.normals import fraction, pair
from corrnoise.noise.generator.normals import GROUP_BLOCKS, TAIL

Array = Any

SECOND = 1 << 31  # in word 13: the blocks that refine the tail


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["secret", "weights", "step"],
    meta_fields=["stream", "rounds"],
)
@dataclass(frozen=True)
class Source:
    """Where the noise of a step comes from.

    Attributes:
        secret: the 8 words of the subkey.
        weights: of z[step], z[step - 1], …; 0 where there is no such step.
        step: uint32.
        stream: the id.
        rounds: of ChaCha.
    """

    secret: Array
    weights: Array
    step: Array
    stream: int
    rounds: int

    def tail(self, numbers: Array, lag: Array, high: int = 0) -> tuple[Array, ...]:
        """Words 12 to 15 of some blocks, ``lag`` steps ago."""
        return numbers, np.uint32(high), self.step - lag, np.uint32(self.stream)


def blocks_of(groups: Array) -> Array:
    """The numbers of the blocks of some groups, shape (number of groups, 32)."""
    lanes = jnp.arange(GROUP_BLOCKS, dtype=jnp.uint32)
    return groups.astype(jnp.uint32)[:, None] * np.uint32(GROUP_BLOCKS) + lanes


def noise_of(source: Source, numbers: Array) -> Array:
    """The noise of groups, shape (number of groups, 512), by XLA alone.

    A draw with a pair in the tail is computed again with second blocks.

    Args:
        source: of the step.
        numbers: of their blocks, uint32, shape (number of groups, 32).
    """
    count = source.weights.shape[0]

    def add(k: Array, total: Array) -> Array:
        lag = (count - 1 - k).astype(jnp.uint32)
        words = in_rows(source.secret, source.tail(numbers, lag), source.rounds)

        def refined() -> Array:
            second = in_rows(source.secret, source.tail(numbers, lag, SECOND), source.rounds)
            return jnp.concatenate(pair(words[:8], words[8:], fraction(second[:8], second[8:])))

        def plain() -> Array:
            return jnp.concatenate(pair(words[:8], words[8:]))

        z = lax.cond((words[:8] < TAIL).any(), refined, plain)
        return total + source.weights[lag] * z

    start = jnp.zeros((16, numbers.shape[0], GROUP_BLOCKS), jnp.float32)
    total = lax.fori_loop(0, count, add, start)
    return total.transpose(1, 0, 2).reshape(numbers.shape[0], -1)
