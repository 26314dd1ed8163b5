r"""Standard normals from words, in float32 and elementwise: ``noise.generator.normals`` in XLA.

The definition is that module's. What differs is how its functions are computed, which is the same
on every device: the quadrant of θ is split off as an integer, so that sine and cosine are short
polynomials on [-π/4, π/4], and -ln u near u = 1 is a polynomial in u - 1. Against exact arithmetic
a normal is off by at most a few units of 2^-24 times its radius.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from corrnoise.noise.generator.normals import TAIL

Array = Any

# Least-squares fits at Chebyshev nodes: sin x/x and cos x in x² for |x| ≤ π/4, errors 3e-9, 5e-11.
_SIN = (-0.0001950396253960207, 0.008332036435604095, -0.16666650772094727, 1.0)
_COS = (2.4379880414926447e-05, -0.0013886619126424193, 0.04166661575436592, -0.5, 1.0)
# -ln(1 + f)/f for f in [-1/2, 0), as in the Triton kernel, with a relative error of 2.4e-7.
LOG = (
    1.15861402865116, 1.0360389862196113, 0.7545884200503934, -0.048358057099842304,
    0.27047703435863596, -0.3320068296692502, 0.5000321724014637, -0.9999998738730526,
)  # fmt: skip


def fraction(high: Array, low: Array) -> Array:
    """v/2^40 of pairs in the tail, from E and F, words of second blocks."""
    return high.astype(jnp.float32) * 2.0**-72 + (low.astype(jnp.float32) * 2.0**-104 + 2.0**-105)


def refine(f: Array, radius_word: Array, found: Array) -> Array:
    """Replace f in the tail, where it is (N + 1/2)/2^40, exactly, by (N + v)/2^40."""
    return jnp.where(radius_word < TAIL, (f - 2.0**-41) + found, f)


def pair(radius_word: Array, angle_word: Array, found: Array | None = None) -> tuple[Array, Array]:
    """The two normals of each pair of words.

    Args:
        radius_word: R.
        angle_word: A.
        found: the ``fraction`` of each pair; without it a pair with R < 2^8 is not the stream's,
            and must be replaced.
    """
    low = (angle_word & 0xFF).astype(jnp.float32) * 2.0**-40 + 2.0**-41
    signed = lax.bitcast_convert_type(radius_word, jnp.int32)
    f = signed.astype(jnp.float32) * 2.0**-32 + low  # u, or u - 1 where the top bit of R is set
    if found is not None:
        f = refine(f, radius_word, found)
    far = -jnp.log(jnp.where(f > 0.0, f, 1.0))
    radius = jnp.sqrt(2.0 * jnp.where(f > 0.0, far, f * _polynomial(LOG, f)))
    # θ = π·(2m + 1)/2^24 with m = ⌊A/256⌋: a quadrant and an angle of at most π/4.
    m = angle_word >> 8
    quadrant = (m + (1 << 21)) >> 22
    rest = lax.bitcast_convert_type(m - (quadrant << 22), jnp.int32)
    x = (2 * rest + 1).astype(jnp.float32) * (math.pi / 2.0**24)
    square = x * x
    sine, cosine = x * _polynomial(_SIN, square), _polynomial(_COS, square)
    odd = (quadrant & 1) != 0
    first = jnp.where(odd, sine, cosine)
    other = jnp.where(odd, cosine, sine)
    first = jnp.where(((quadrant + 1) & 2) != 0, -first, first)
    other = jnp.where((quadrant & 2) != 0, -other, other)
    return radius * first, radius * other


def _polynomial(coefs: tuple[float, ...], x: Array) -> Array:
    value: Array = np.float32(coefs[0])
    for coef in coefs[1:]:
        value = value * x + np.float32(coef)
    return value
