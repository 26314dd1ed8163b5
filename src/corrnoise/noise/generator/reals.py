r"""Normals as real numbers with infinitely many bits, for exactly rounded releases.

Index i takes its bits from block ⌊i/8⌋ of the step, at every level r = 0, 1, 2, …; each level has
its own subkey. A block is eight 64-bit numbers, a_0, …, a_3 and b_0, …, b_3, the low word of each
first. With j = i mod 8 and q = j mod 4, all levels together are the binary digits of

    u = Σ_r a_q⁽ʳ⁾·2^(-64(r + 1)),        θ = Σ_r b_q⁽ʳ⁾·2^(-64(r + 1)),
    z[i] = √(-2 ln u)·cos 2πθ for j < 4,    √(-2 ln u)·sin 2πθ for j ≥ 4.

With random bits u and θ are uniform real numbers, and z is normal: not truncated, not discrete.

``approximate`` gives z within ``ERROR`` in float64, from level 0 alone. It makes one assumption:
logarithm, root and tangent have a relative error of at most ``LIBRARY``, which is at least 64 times
what libraries document. ``enclosed`` gives z to any precision, from the requested number of levels.
Its logarithm and root are those of Python's ``decimal``, which are correctly rounded.
``docs/proofs/floating-point.md`` derives both bounds.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from corrnoise.noise.generator import keystream
from corrnoise.noise.generator.chacha import WORDS_PER_BLOCK, Words
from corrnoise.noise.generator.key import Key

Reals = npt.NDArray[np.float64]

INDICES = 8  # in one block
LEVEL_BITS = 64
LIBRARY = 2.0**-44
ERROR = 2.0**-37
# A pair with u below 2^-29, or at least 1 - 2^-29, is not approximated but left undecided.
OPEN_BITS = 29
HALF_TURN = math.pi * 2.0**-LEVEL_BITS

_OPEN = np.uint64(1 << (LEVEL_BITS - OPEN_BITS))


def purpose(level: int) -> str:
    """The purpose of a level's subkey, which is used for nothing else."""
    return f"exact noise {level}"


def approximate(words: Words, out: Reals) -> None:
    """The normals of whole blocks within ``ERROR``, or NaN where level 0 has too few bits.

    Sine and cosine of φ = 2πθ come from t = tan φ/2: cos φ = (1 - t²)/(1 + t²) and
    sin φ = 2t/(1 + t²). So one function is needed, and its relative error is an absolute error of
    both.

    Args:
        words: the keystream of level 0, 16 words for each block.
        out: shape (8, blocks): row j has the normals with i mod 8 = j.
    """
    bits = np.ascontiguousarray(words.astype("<u4", copy=False).view("<u8").reshape(-1, 8).T)
    radius = bits[:4].astype(np.float64)
    np.multiply(radius, 2.0**-LEVEL_BITS, out=radius)
    shifted = bits[:4] + _OPEN  # modulo 2^64: both ends of [0, 1) move to 0
    if shifted.min() < 2 * _OPEN:
        radius[shifted < 2 * _OPEN] = np.nan
    np.log(radius, out=radius)
    np.multiply(radius, -2.0, out=radius)
    np.sqrt(radius, out=radius)
    cos, sin = out[:4], out[4:]
    np.copyto(sin, bits[4:].view("<i8"), casting="same_kind")
    np.multiply(sin, HALF_TURN, out=sin)
    np.tan(sin, out=sin)
    np.multiply(sin, sin, out=cos)
    np.divide(radius, 1.0 + cos, out=radius)
    np.subtract(1.0, cos, out=cos)
    np.multiply(cos, radius, out=cos)
    np.multiply(sin, 2.0, out=sin)
    np.multiply(sin, radius, out=sin)


def sum_error(weights: Sequence[float]) -> float:
    """An upper bound on the error of Σ w·z for approximated normals, added up in float64.

    It is Σ|w|·(ERROR + (p + 1)·2^-50) for p terms: every product and sum is rounded by a relative
    2^-53, and an approximated normal is below 6.36 in absolute value.
    """
    total = math.fsum(map(abs, weights)) * (1.0 + 2.0**-50)
    return total * (ERROR + (len(weights) + 1) * 2.0**-50) * (1.0 + 2.0**-50)


def digits(
    key: Key, *, stream: int, rounds: int, step: int, index: int, levels: int
) -> tuple[int, int]:
    """⌊2^(64·levels)·u⌋ and ⌊2^(64·levels)·θ⌋ of one index."""
    u = theta = 0
    block = np.empty(WORDS_PER_BLOCK, dtype=np.uint32)
    q = index % 4
    for level in range(levels):
        keystream.fill(
            block,
            key.subkey(purpose(level)),
            stream=stream,
            step=step,
            block=index // INDICES,
            rounds=rounds,
        )
        word = [int(value) for value in block]
        u = u << LEVEL_BITS | word[2 * q + 1] << 32 | word[2 * q]
        theta = theta << LEVEL_BITS | word[2 * q + 9] << 32 | word[2 * q + 8]
    return u, theta


def enclosed(u: int, theta: int, *, index: int, levels: int) -> tuple[Decimal, Decimal] | None:
    """A number and a radius: the normal of an index lies within the radius of the number.

    Args:
        u: the digits of u, from ``digits``.
        theta: the digits of θ, from ``digits``.
        index: the index of the normal.
        levels: the number of levels that the digits have.

    Returns:
        ``None`` if all digits of u are 0, as the normal then has no bound yet.
    """
    if u == 0:
        return None
    bits = LEVEL_BITS * levels
    with decimal.localcontext(_context(bits)):
        size = Decimal(2) ** bits
        rounding = Decimal("1e-18") / size  # bounds the rounding of all operations below
        far = (-2 * (u / size).ln()).sqrt()
        near = (-2 * ((u + 1) / size).ln()).sqrt()  # u + 1 ≤ size, so the root is real
        radius, spread = (far + near) / 2, abs(far - near) / 2
        turn = 2 * _pi(bits)
        angle = turn * ((2 * theta + 1) / (2 * size) - Decimal("0.5"))  # θ - 1/2: the sign changes
        value = -_taylor(angle, first=0 if index % INDICES < 4 else 1)
        error = spread + (far + spread) * (turn / size) + rounding
        return radius * value, error


def _context(bits: int) -> decimal.Context:
    """A decimal context with 1.5 times the digits of the bits, and 30 more.

    Near u = 1 the root loses half of the digits of the logarithm.
    """
    return decimal.Context(
        prec=math.ceil(1.5 * bits * math.log10(2.0)) + 30,
        rounding=decimal.ROUND_HALF_EVEN,
        Emin=decimal.MIN_EMIN,
        Emax=decimal.MAX_EMAX,
        traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow],
    )


def _taylor(x: Decimal, *, first: int) -> Decimal:
    """Cos x (first = 0) or sin x (first = 1) for |x| ≤ π, by their series in the context's digits.

    From the fourth term on, terms alternate in sign and decrease, so the truncation error is below
    the first omitted term.
    """
    least = Decimal(10) ** -decimal.getcontext().prec
    term = x if first else Decimal(1)
    total, n = term, first
    while n < 6 or abs(term) > least:
        term = -term * x * x / ((n + 1) * (n + 2))
        total += term
        n += 2
    return total


@lru_cache(maxsize=8)
def _pi(bits: int) -> Decimal:
    """π by Machin's formula, 16·arctan(1/5) - 4·arctan(1/239), in integers."""
    precision = _context(bits).prec
    unit = 10 ** (precision + 10)

    def arctan_of_inverse(n: int) -> int:
        total = term = unit // n
        k = 1
        while term:
            term //= n * n
            k += 2
            total += (-term if k % 4 == 3 else term) // k
        return total

    found = 16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)
    with decimal.localcontext(_context(bits)):
        return Decimal(found) / unit
