"""Instructions of CUDA devices for the kernel: ChaCha's two steps, and normals by few of them.

The integer pipe is the bottleneck of the kernel, as in ``noise.backends.triton_kernel``: it has
half the rate of the floating-point pipes, and exclusive ors and rotations of ChaCha20 take 40 of
its operations per index. So nothing else uses it where another pipe does as well. Sums in ChaCha
are products with a 1 that the compiler does not know, which run on a floating-point pipe. The
quarter of the circle in which θ lies is found, and turned back to, in float32. The
logarithm is an instruction with a documented error of at most 2^-22 of itself, which the root
halves; sine and cosine are polynomials, since those instructions have an absolute error of 2^-21.

Each function is one element of a kernel with one result, the only form that Pallas has. What two of
them compute in the same way, the compiler computes once. Few functions also keep the compilation
short, whose time grows faster than their number.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu

from corrnoise.jax.chacha import Steps
from corrnoise.jax.normals import LOG, refine

Array = Any

# sin(πx/2)/x and cos(πx/2) in x² for |x| ≤ 1/2, fitted to errors of 5e-9 and 4e-10.
_SIN = (-0.0045560323633253574, 0.0796605572104454, -0.6459611058235168, 1.570796251296997)
_COS = (
    0.0008933406788855791, -0.020855208858847618, 0.25366851687431335, -1.2337005138397217, 1.0,
)  # fmt: skip
_LOG2 = tuple(coef / math.log(2.0) for coef in LOG)  # -log2(1 + f)/f for f in [-1/2, 0)
_ROUND = 1.5 * 2.0**23  # added and subtracted, it rounds to whole numbers


def _number(x: float) -> str:
    """A float32 constant of PTX."""
    return f"0f{np.float32(x).view(np.uint32):08X}"


def _horner(coefs: tuple[float, ...], x: str, out: str) -> list[str]:
    """Lines for a polynomial in a register."""
    lines = [f"fma.rn.f32 {out}, {x}, {_number(coefs[0])}, {_number(coefs[1])}"]
    return lines + [f"fma.rn.f32 {out}, {out}, {x}, {_number(coef)}" for coef in coefs[2:]]


def _text(lines: list[str]) -> str:
    return "{ .reg .pred p; .reg .b32 a, b, c, d, e; " + " ".join(f"{x};" for x in lines) + " }"


# Read as a float, an integer m below 2^24 is m·2^-149: a = θ - π in quarters of a turn, exactly;
# b = the nearest whole number of them, a = the rest, c = r·(the cosine of b), b = r·(its sine).
_TURN = [
    "shr.u32 a, $1, 8",
    f"fma.rn.f32 a, a, {_number(2.0**127)}, {_number(2.0**-23 - 2.0)}",
    f"add.rn.f32 b, a, {_number(_ROUND)}",
    f"sub.rn.f32 b, b, {_number(_ROUND)}",
    "sub.rn.f32 a, a, b",
    "abs.f32 c, b",
    "neg.f32 c, c",
    "fma.rn.f32 c, c, $2, $2",
    "add.rn.f32 d, c, $2",
    "mul.rn.f32 b, b, d",
]
# e = the sine and d = the cosine of the rest.
_WAVES = [
    "mul.rn.f32 d, a, a",
    *_horner(_SIN, "d", "e"),
    "mul.rn.f32 e, e, a",
    *_horner(_COS, "d", "a"),
    "mov.b32 d, a",
]

ADD = "mad.lo.u32 $0, $1, $3, $2;"
TURN = "{{ .reg .b32 a; xor.b32 a, $1, $2; shf.l.wrap.b32 $0, a, a, {}; }}"
UNIFORM = _text([
    "cvt.rn.f32.u8 a, $2",  # by the unit of the special functions, which has time
    f"fma.rn.f32 a, a, {_number(2.0**-40)}, {_number(2.0**-41)}",
    "cvt.rn.f32.s32 b, $1",
    f"fma.rn.f32 $0, b, {_number(2.0**-32)}, a",
])  # fmt: skip
# √(-log2 u), times a weight.
RADIUS = _text([
    *_horner(_LOG2, "$1", "a"),
    "mul.rn.f32 a, a, $1",
    "lg2.approx.ftz.f32 b, $1",
    f"setp.lt.f32 p, $1, {_number(0.0)}",
    "selp.f32 a, a, b, p",
    "abs.f32 a, a",
    "rsqrt.approx.ftz.f32 b, a",
    "mul.rn.f32 c, a, b",  # the root, off by 2^-22 of itself, which one step of Newton's mends
    "neg.f32 d, c",
    "fma.rn.f32 d, d, c, a",
    f"mul.rn.f32 b, b, {_number(0.5)}",
    "fma.rn.f32 a, d, b, c",
    "mul.rn.f32 $0, a, $2",
])  # fmt: skip
_COSINE = ["neg.f32 b, b", "fma.rn.f32 b, b, e, $3", "fma.rn.f32 $0, c, d, b"]
ADD_COS = _text(_TURN + _WAVES + _COSINE)
ADD_SIN = _text([*_TURN, *_WAVES, "fma.rn.f32 b, b, d, $3", "fma.rn.f32 $0, c, e, b"])
# The normals are these times weight·UNIT: -ln u is -log2 u·ln 2, and θ - π is the opposite of θ.
UNIT = -math.sqrt(2.0 * math.log(2.0))


def steps(one: Array) -> Steps:
    """The steps of ChaCha; ``one`` is 1 in every element, and the compiler must not know it."""
    return Steps(
        lambda a, b: apply(ADD, "rrrr", a, b, one),
        lambda a, b, left: apply(TURN.format(left), "rrr", a, b),
    )


def add_normals(
    sums: list[Array], words: list[Array], weight: Array, found: list[Array] | None
) -> list[Array]:
    """Add normals to sums: the first normals of all pairs, then the second ones.

    Args:
        sums: what they are added to.
        words: R of all pairs, then A.
        weight: of the normals.
        found: the ``normals.fraction`` of each pair, where a pair may be in the tail.
    """
    half = len(words) // 2
    first, other = list[Array](), list[Array]()
    for k in range(half):
        radius_word, angle_word = words[k], words[k + half]
        f = apply(UNIFORM, "frr", radius_word, angle_word)
        if found is not None:
            f = refine(f, radius_word, found[k])
        radius = apply(RADIUS, "fff", f, weight * np.float32(UNIT))
        first.append(apply(ADD_COS, "frff", angle_word, radius, sums[k]))
        other.append(apply(ADD_SIN, "frff", angle_word, radius, sums[k + half]))
    return first + other


def apply(text: str, kinds: str, *args: Array) -> Array:
    """Run instructions on every element; integer results are int32, as Pallas has them.

    Args:
        text: in PTX; $0 is the result, $1, … are the arguments.
        kinds: one letter for the result and one for each argument: f for float32, r for integers.
        args: scalars are repeated.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(arg) for arg in args))
    dtype = jnp.float32 if kinds[0] == "f" else jnp.int32
    [result] = plgpu.elementwise_inline_asm(
        text,
        args=[jnp.broadcast_to(arg, shape) for arg in args],
        constraints="=" + ",".join(kinds),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, dtype)],
    )
    return result
