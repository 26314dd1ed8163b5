# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
# ruff: noqa: D103, RUF005
"""The noise kernels in Triton: every word of a ChaCha block stays in the registers of one thread.

A program computes ``BLOCK`` ChaCha blocks, that is 16·BLOCK indices, one block per lane. The index
map of ``normals`` gives 32 neighbouring indices to 32 neighbouring lanes. So the gradient is read
and written once, in whole cache lines, with no exchange between threads.

Words and normals are passed as tuples of 16 tensors. ``chacha.py`` and ``normals.py`` are the
specification: the words must be equal bit for bit, the normals to a few units of the last place.

Rotations and exclusive ors use the integer pipe, which is the bottleneck: ChaCha20 takes 40 of its
operations per index. An integer is not converted to a float; its bits are read as a tiny float.
Three of the four columns of the first round are the same for all indices and run on the uniform
datapath. The fourth does not depend on the step and is hoisted out of the loop over steps. The
compiler unrolls all rounds of the first pass, as long as a double round is a function of its own,
and no rounds of the rare second pass.

These variants were measured on an H200, for four draws, and rejected
(``benchmarks/noise-h200.md``). Replacing additions, shifts and masks by products relieves the
integer pipe but costs 1 % for one of these kinds of operations and 9 % for all. A loop over the
rounds costs 4 %. One term less in the polynomial saves 0.2 %, and the error is 1.6 times as large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from corrnoise.noise.generator import normals as normals_definition

# A tensor's row in the table has its address, flat offset, size, the tile of program 0 (as if every
# program of the launch had a tile in this tensor), and its first state element.
TABLE_COLUMNS = tl.constexpr(5)
# A pair whose radius word is below this takes 64 more bits of u from a second block.
TAIL = tl.constexpr(normals_definition.TAIL)


@triton.jit
def rotate(x, LEFT: tl.constexpr):
    return (x << LEFT) | (x >> (32 - LEFT))


@triton.jit
def quarter(a, b, c, d):
    """The quarter round."""
    a += b
    d = rotate(d ^ a, 16)
    c += d
    b = rotate(b ^ c, 12)
    a += b
    d = rotate(d ^ a, 8)
    c += d
    b = rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def diagonals(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15):
    x0, x5, x10, x15 = quarter(x0, x5, x10, x15)
    x1, x6, x11, x12 = quarter(x1, x6, x11, x12)
    x2, x7, x8, x13 = quarter(x2, x7, x8, x13)
    x3, x4, x9, x14 = quarter(x3, x4, x9, x14)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def double_round(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15):
    x0, x4, x8, x12 = quarter(x0, x4, x8, x12)
    x1, x5, x9, x13 = quarter(x1, x5, x9, x13)
    x2, x6, x10, x14 = quarter(x2, x6, x10, x14)
    x3, x7, x11, x15 = quarter(x3, x7, x11, x15)
    return diagonals(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)


@triton.jit
def chacha_block(key, tail, ROUNDS: tl.constexpr):
    """The 16 words of each lane's block; ``key`` and ``tail`` are words 4 to 11 and 12 to 15."""
    s0 = tl.full((), 0x61707865, tl.uint32)
    s1 = tl.full((), 0x3320646E, tl.uint32)
    s2 = tl.full((), 0x79622D32, tl.uint32)
    s3 = tl.full((), 0x6B206574, tl.uint32)
    # The first column round uses scalars wherever the counter does not enter.
    x0, x4, x8, x12 = quarter(s0, key[0], key[4], tail[0])
    x1, x5, x9, x13 = quarter(s1, key[1], key[5], tail[1])
    x2, x6, x10, x14 = quarter(s2, key[2], key[6], tail[2])
    x3, x7, x11, x15 = quarter(s3, key[3], key[7], tail[3])
    x = diagonals(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)
    for _ in tl.range(0, ROUNDS // 2 - 1):
        x = double_round(*x)
    return (
        x[0] + s0,
        x[1] + s1,
        x[2] + s2,
        x[3] + s3,
        x[4] + key[0],
        x[5] + key[1],
        x[6] + key[2],
        x[7] + key[3],
        x[8] + key[4],
        x[9] + key[5],
        x[10] + key[6],
        x[11] + key[7],
        x[12] + tail[0],
        x[13] + tail[1],
        x[14] + tail[2],
        x[15] + tail[3],
    )


@triton.jit
def unary(ASM: tl.constexpr, x):
    return tl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def uniform(radius_word, angle_word):
    """Compute f = u of one pair of words, or u - 1 where the top bit of the radius word is set."""
    # Read as a float, an integer below 2^24 is the integer times 2^-149.
    low = (angle_word & 0xFF).to(tl.float32, bitcast=True)
    low = low * 6.490371073168535e32 + 4.547473508864641e-13  # 2^109, 2^-41
    return radius_word.to(tl.int32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10 + low


@triton.jit
def smallest(words, least):
    """The least of ``least`` and the radius words of each lane's block."""
    a = tl.minimum(tl.minimum(words[0], words[1]), tl.minimum(words[2], words[3]))
    b = tl.minimum(tl.minimum(words[4], words[5]), tl.minimum(words[6], words[7]))
    return tl.minimum(least, tl.minimum(a, b))


@triton.jit
def fraction(second, J: tl.constexpr):
    """v/2^40 of pair J, from the words of the second block: 2^-72·E + (2^-104·F + 2^-105)."""
    low = second[J + 8].to(tl.float32) * 4.930380657631324e-32 + 2.465190328815662e-32
    return second[J].to(tl.float32) * 2.1175823681357508e-22 + low


@triton.jit
def refine(f, fraction):
    """Replace f by (N + v)/2^40 in the tail, where f is exactly (N + 1/2)/2^40."""
    tail = (f >= 0.0) & (f < TAIL * 2.0**-32)
    return tl.where(tail, (f - 4.547473508864641e-13) + fraction, f)  # 2^-41


@triton.jit
def normal_pair(f, angle_word, weight, FAST: tl.constexpr):
    """Box-Muller on one pair, in float32, times weight·(-√½).

    FAST uses the special-function unit. The factor saves products: -ln u is easier to compute than
    -2 ln u, and the signed angle θ - π is more accurate than θ. If f is u - 1, -ln(1 + f) is
    computed as f times a polynomial, with a relative error of 2.4e-7, because lg2.approx has an
    absolute error near 1.
    """
    angle = (angle_word >> 8).to(tl.float32, bitcast=True)
    p = f * 1.15861402865116 + 1.0360389862196113
    p = p * f + 0.7545884200503934
    p = p * f - 0.048358057099842304
    p = p * f + 0.27047703435863596
    p = p * f - 0.3320068296692502
    p = p * f + 0.5000321724014637
    p = p * f - 0.9999998738730526
    theta = tl.fma(angle, 2.672571534533493e38, -3.141592502593994)  # θ - π, from 2π·2^125
    if FAST:
        log = unary("lg2.approx.ftz.f32 $0, $1;", f)
        square = tl.where(f < 0.0, f * p, log * -0.6931471805599453)
        radius = unary("sqrt.approx.ftz.f32 $0, $1;", square) * weight
        cos = unary("cos.approx.ftz.f32 $0, $1;", theta)
        sin = unary("sin.approx.ftz.f32 $0, $1;", theta)
    else:
        log = tl.log2(tl.where(f < 0.0, 1.0, f))
        radius = tl.sqrt(tl.where(f < 0.0, f * p, log * -0.6931471805599453)) * weight
        cos = tl.cos(theta)
        sin = tl.sin(theta)
    return radius * cos, radius * sin


@triton.jit
def uniforms(words):
    """Compute f of the 8 pairs of each lane's block."""
    f = ()
    for j in tl.static_range(8):
        f = f + (uniform(words[j], words[j + 8]),)
    return f


@triton.jit
def fractions(second):
    """v/2^40 of the 8 pairs of each lane's block."""
    v = ()
    for j in tl.static_range(8):
        v = v + (fraction(second, j),)
    return v


@triton.jit
def refined(f, v):
    """Refine the 8 pairs of each lane's block."""
    result = ()
    for j in tl.static_range(8):
        result = result + (refine(f[j], v[j]),)
    return result


@triton.jit
def normals(f, words, weight, FAST: tl.constexpr):
    """The 16 normals of each lane's block, times a weight."""
    weight = weight * -1.4142135623730951
    z0, z8 = normal_pair(f[0], words[8], weight, FAST)
    z1, z9 = normal_pair(f[1], words[9], weight, FAST)
    z2, z10 = normal_pair(f[2], words[10], weight, FAST)
    z3, z11 = normal_pair(f[3], words[11], weight, FAST)
    z4, z12 = normal_pair(f[4], words[12], weight, FAST)
    z5, z13 = normal_pair(f[5], words[13], weight, FAST)
    z6, z14 = normal_pair(f[6], words[14], weight, FAST)
    z7, z15 = normal_pair(f[7], words[15], weight, FAST)
    return z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11, z12, z13, z14, z15


@triton.jit
def zeros16(BLOCK: tl.constexpr):
    x = tl.zeros([BLOCK], tl.float32)
    return x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x


@triton.jit
def axpy(c, x, y):
    """c·x + y on tuples of 16."""
    return (
        c * x[0] + y[0],
        c * x[1] + y[1],
        c * x[2] + y[2],
        c * x[3] + y[3],
        c * x[4] + y[4],
        c * x[5] + y[5],
        c * x[6] + y[6],
        c * x[7] + y[7],
        c * x[8] + y[8],
        c * x[9] + y[9],
        c * x[10] + y[10],
        c * x[11] + y[11],
        c * x[12] + y[12],
        c * x[13] + y[13],
        c * x[14] + y[14],
        c * x[15] + y[15],
    )


@triton.jit
def plus16(x, y):
    """The sum of tuples of 16; the compiler fuses it with a product in x."""
    return axpy(1.0, x, y)


@triton.jit
def load_key(k0, k1, k2, k3, k4, k5, k6, k7):
    return (
        k0.to(tl.uint32, bitcast=True),
        k1.to(tl.uint32, bitcast=True),
        k2.to(tl.uint32, bitcast=True),
        k3.to(tl.uint32, bitcast=True),
        k4.to(tl.uint32, bitcast=True),
        k5.to(tl.uint32, bitcast=True),
        k6.to(tl.uint32, bitcast=True),
        k7.to(tl.uint32, bitcast=True),
    )


@triton.jit
def locate(table, owners, BLOCK: tl.constexpr, FAR: tl.constexpr):
    """The program's tile: its tensor's row, first index relative to the tensor, size and blocks.

    ``FAR`` is set if an index may reach 2^36, where the high half of the block number is not 0.
    """
    program = tl.program_id(0)
    row = table + tl.load(owners + program).to(tl.int64) * TABLE_COLUMNS
    first = (tl.load(row + 3) + program) * (16 * BLOCK)
    start = first - tl.load(row + 1)
    block = first // 16
    counter = block.to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
    word13 = (block >> 32).to(tl.uint32) if FAR else tl.full((), 0, tl.uint32)
    return row, start, tl.load(row + 2), counter, word13


@triton.jit
def is_whole(start, size, BLOCK: tl.constexpr):
    """Whether the whole tile lies in the tensor."""
    return (start >= 0) & (start + 16 * BLOCK <= size)


@triton.jit
def edges(start, size, BLOCK: tl.constexpr):
    """The range [low, high) of the tile's positions that lie in the tensor."""
    low = tl.maximum(-start, 0).to(tl.int32)
    high = tl.minimum(size - start, 16 * BLOCK).to(tl.int32)
    return low, high


@triton.jit
def positions(BLOCK: tl.constexpr):
    """The position of word 0 of each lane's block in the tile; word j is 32·j positions later."""
    lane = tl.arange(0, BLOCK)
    return (lane // 32) * 512 + lane % 32


@triton.jit
def load16(pointer, start, size, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Load the values at the positions of a tile, in float32; outside the tensor they are 0."""
    at = positions(BLOCK)
    low, high = edges(start, size, BLOCK)
    values = ()
    for j in tl.static_range(16):
        here = at + 32 * j
        if WHOLE:
            value = tl.load(pointer + here)
        else:
            value = tl.load(pointer + here, mask=(here >= low) & (here < high), other=0.0)
        values = values + (value.to(tl.float32),)
    return values


@triton.jit
def store16(pointer, values, start, size, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    at = positions(BLOCK)
    low, high = edges(start, size, BLOCK)
    for j in tl.static_range(16):
        here = at + 32 * j
        value = values[j].to(pointer.dtype.element_ty)
        if WHOLE:
            tl.store(pointer + here, value)
        else:
            tl.store(pointer + here, value, mask=(here >= low) & (here < high))


@triton.jit
def add16(pointer, noise, start, size, BLOCK: tl.constexpr):
    """Add noise to the gradient; only tiles at the edge of a tensor use masks."""
    if is_whole(start, size, BLOCK):
        sum16 = axpy(1.0, noise, load16(pointer, start, size, BLOCK, True))
        store16(pointer, sum16, start, size, BLOCK, True)
    else:
        part16 = axpy(1.0, noise, load16(pointer, start, size, BLOCK, False))
        store16(pointer, part16, start, size, BLOCK, False)
