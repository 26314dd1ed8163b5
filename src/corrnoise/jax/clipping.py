"""Sums of clipped gradients by ``jax.vmap``: one gradient for each example, for small models."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

Array = Any
Tree = Any

_ROUNDING = 2.0**-20


def clipped_sums(
    loss: Callable[..., Array], params: Tree, *batch: Tree, clip_norm: float, mask: Array = None
) -> Tree:
    """Σ_i g_i·C/max(‖g_i‖, C) over the examples of a batch, with g_i the gradient of example i.

    All of its gradients are in memory at once: (number of examples)·(number of parameters) floats.

    Guarantees: what one example adds has a norm of at most C. An example whose gradient is NaN or
    infinite, or has a norm beyond float32, adds zero; nothing tells of it, as nothing does within
    ``jit``, so look at the losses of a run whose weights stay as they are.

    Args:
        loss: of the parameters and one example.
        params: the pytree to differentiate for.
        batch: arrays, or pytrees of them, whose first axis is the examples.
        clip_norm: C.
        mask: 1 for each example that counts and 0 for padding, so that batches of different sizes
            can share one compiled program.

    >>> import jax.numpy as jnp
    >>> loss = lambda w, x: jnp.dot(w, x)
    >>> x = jnp.array([[3.0, 4.0], [0.0, 0.5]])
    >>> [round(float(each), 3) for each in clipped_sums(loss, jnp.zeros(2), x, clip_norm=1.0)]
    [0.6, 1.3]
    """
    if not isinstance(clip_norm, Tracer) and not 0.0 < float(clip_norm) < math.inf:
        raise ValueError(f"clip_norm must be finite and above 0, got {clip_norm}")
    each = jax.vmap(jax.grad(loss), in_axes=(None, *(0 for _ in batch)))(params, *batch)
    rows = [
        leaf.astype(jnp.float32).reshape(len(leaf), math.prod(leaf.shape[1:]))
        for leaf in jax.tree.leaves(each)
    ]
    # Squares of what is divided by the largest neither underflow nor overflow.
    largest = reduce(jnp.maximum, [jnp.max(jnp.abs(leaf), axis=1, initial=0.0) for leaf in rows])
    unit = jnp.where(largest > 0.0, largest, 1.0)
    squares = [jnp.sum(jnp.square(leaf / unit[:, None]), axis=1) for leaf in rows]
    # Norms and factors are rounded in float32; both err on the side of a shorter gradient.
    norms = unit * jnp.sqrt(sum(squares)) * (1.0 + _ROUNDING)
    factors = (1.0 - _ROUNDING) * clip_norm / jnp.maximum(norms, clip_norm)
    if mask is not None and jnp.shape(mask) != norms.shape:
        raise ValueError(
            f"mask must have one number for each of the {len(norms)} examples, got an array of "
            f"shape {jnp.shape(mask)}; pass jnp.arange({len(norms)}) < n for n examples"
        )
    counts = jnp.isfinite(norms) if mask is None else jnp.isfinite(norms) & (jnp.asarray(mask) > 0)
    factors = jnp.where(counts, factors, 0.0)
    # What does not count may be anything, and must not turn 0·NaN into NaN.
    each = jax.tree.map(
        lambda leaf: jnp.where(counts.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0), each
    )
    return jax.tree.map(
        lambda leaf: jnp.tensordot(
            factors, leaf.astype(jnp.float32), axes=1, precision=jax.lax.Precision.HIGHEST
        ),
        each,
    )
