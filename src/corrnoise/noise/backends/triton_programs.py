# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
# ruff: noqa: RUF005
"""The kernels that ``triton_backend`` launches; one program is one tile of one tensor."""

from __future__ import annotations

import triton
import triton.language as tl

from corrnoise.noise.backends.triton_kernel import (
    TAIL,
    add16,
    axpy,
    chacha_block,
    fractions,
    load16,
    load_key,
    locate,
    normals,
    plus16,
    refined,
    smallest,
    store16,
    uniforms,
    zeros16,
)

# Values that change from call to call, and the key: the code is not specialised for any of them.
OPEN = [*(f"k{i}" for i in range(8)), "step", "stream_id", "count", "scale"]


@triton.jit
def block_words(key, counter, word13, step, stream_id, ROUNDS: tl.constexpr):
    """The 16 words of each lane at a step."""
    tail = counter, word13, step.to(tl.uint32, bitcast=True), stream_id.to(tl.uint32, bitcast=True)
    return chacha_block(key, tail, ROUNDS)


@triton.jit
def draw(
    weight, key, counter, word13, step, stream_id, least,
    ROUNDS: tl.constexpr, FAST: tl.constexpr, REFINED: tl.constexpr,
):  # fmt: skip
    """The 16 normals of each lane at a step, times a weight, and the least radius word so far.

    The second block is computed first, since 8 numbers of it are kept, and 16 of the other.
    """
    if REFINED:
        high_bit = tl.full((), 0x80000000, tl.uint32)
        second = block_words(key, counter, word13 | high_bit, step, stream_id, ROUNDS)
        v = fractions(second)
    words = block_words(key, counter, word13, step, stream_id, ROUNDS)
    f = uniforms(words)
    if REFINED:
        f = refined(f, v)
    return normals(f, words, weight, FAST), smallest(words, least)


@triton.jit
def none_yet(BLOCK: tl.constexpr):
    """The least radius word before the first draw."""
    return tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)


@triton.jit
def in_tail(least):
    """Whether a draw of the program has a pair in the tail; all draws are then made again.

    One draw of a program in 16,000 has one, and a second block in every draw would cost twice the
    time. The test at the end of a program costs one minimum for each radius word, and no exchange
    between threads inside the loop.
    """
    return tl.min(least, axis=0) < TAIL


@triton.jit(do_not_specialize=OPEN)
def add_weighted(
    table, owners, weights, count, scale, step, stream_id, k0, k1, k2, k3, k4, k5, k6, k7,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradient += scale·Σ_t weights[t]·z[step + t] for t < count: one read, one write."""
    row, start, low, high, counter, word13 = locate(table, owners, BLOCK, FAR)
    key = load_key(k0, k1, k2, k3, k4, k5, k6, k7)
    noise, least = weighted_sum(
        weights, count, scale, key, counter, word13, step, stream_id, BLOCK, ROUNDS, FAST, False
    )
    if in_tail(least):
        noise, least = weighted_sum(
            weights, count, scale, key, counter, word13, step, stream_id, BLOCK, ROUNDS, FAST, True
        )
    add16(tl.load(row).to(tl.pointer_type(DTYPE)) + start, noise, low, high, BLOCK)


@triton.jit
def weighted_sum(
    weights, count, scale, key, counter, word13, step, stream_id,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr, REFINED: tl.constexpr,
):  # fmt: skip
    """The sum of ``add_weighted``, and the least radius word."""
    noise, least = zeros16(BLOCK), none_yet(BLOCK)
    for _ in range(count):
        weight = tl.load(weights) * scale
        z, least = draw(weight, key, counter, word13, step, stream_id, least, ROUNDS, FAST, REFINED)
        noise = plus16(z, noise)
        weights, step = weights + 1, step + 1
    return noise, least


@triton.jit(do_not_specialize=[*OPEN, "use", "stride"])
def add_lookahead(
    table, owners, weights, count, scale, use, state, stride,
    step, stream_id, k0, k1, k2, k3, k4, k5, k6, k7,
    ROWS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Rows Σ_t weights[t, r]·z[step + t], r < ROWS: row ``use`` is added, rows 1, … are stored."""
    row, start, low, high, counter, word13 = locate(table, owners, BLOCK, FAR)
    key = load_key(k0, k1, k2, k3, k4, k5, k6, k7)
    sums, least = weighted_rows(
        weights, count, key, counter, word13, step, stream_id, ROWS, BLOCK, ROUNDS, FAST, False
    )
    if in_tail(least):
        sums, least = weighted_rows(
            weights, count, key, counter, word13, step, stream_id, ROWS, BLOCK, ROUNDS, FAST, True
        )
    here = tl.load(row + 4) + start
    noise = zeros16(BLOCK)
    for r in tl.static_range(ROWS):
        if r > 0:
            store16(state + (r - 1) * stride.to(tl.int64) + here, sums[r], low, high, BLOCK, False)
        noise = axpy(tl.where(use == r, scale, 0.0), sums[r], noise)
    add16(tl.load(row).to(tl.pointer_type(DTYPE)) + start, noise, low, high, BLOCK)


@triton.jit
def weighted_rows(
    weights, count, key, counter, word13, step, stream_id,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr, REFINED: tl.constexpr,
):  # fmt: skip
    """The rows of ``add_lookahead``, and the least radius word."""
    sums, least = (), none_yet(BLOCK)
    for _r in tl.static_range(ROWS):
        sums = sums + (zeros16(BLOCK),)
    for t in range(count):
        z, least = draw(
            1.0, key, counter, word13, step + t, stream_id, least, ROUNDS, FAST, REFINED
        )
        new = ()
        for r in tl.static_range(ROWS):
            new = new + (axpy(tl.load(weights + t * ROWS + r), z, sums[r]),)
        sums = new
    return sums, least


@triton.jit(do_not_specialize=["scale"])
def add_stored(table, owners, vector, scale, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Gradient += scale·vector."""
    row, start, low, high, _, _ = locate(table, owners, BLOCK, False)
    noise = load16(vector + tl.load(row + 4) + start, low, high, BLOCK, False)
    noise = axpy(scale, noise, zeros16(BLOCK))
    add16(tl.load(row).to(tl.pointer_type(DTYPE)) + start, noise, low, high, BLOCK)


@triton.jit(do_not_specialize=[*OPEN, "stride"])
def add_filtered(
    table, owners, coefs, shapes, weights, count, scale, state, stride,
    step, stream_id, k0, k1, k2, k3, k4, k5, k6, k7,
    SECTIONS: tl.constexpr, RECURSIVE: tl.constexpr, WRITE: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, FAR: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Run z[step] through the ``algebra.sections``, advance the state, and add the output.

    ``shapes`` has (s, slot, first state vector, first coefficient) of each section, with
    slot = step mod s; its coefficients are gain, direct, s of feedback, s of output. ``weights``
    has one for each of ``count`` z before the past of the first section, which are regenerated, and
    then a 0 for z[step] itself. Unless RECURSIVE, all feedback is 0.
    """
    row, start, low, high, counter, word13 = locate(table, owners, BLOCK, FAR)
    key = load_key(k0, k1, k2, k3, k4, k5, k6, k7)
    oldest = step - tl.load(shapes) - count
    x, before, least = newest_and_older(
        weights, count, oldest, key, counter, word13, step, stream_id, BLOCK, ROUNDS, FAST, False
    )
    if in_tail(least):
        x, before, least = newest_and_older(
            weights, count, oldest, key, counter, word13, step, stream_id, BLOCK, ROUNDS, FAST, True
        )
    here = state + tl.load(row + 4) + start
    pointer = tl.load(row).to(tl.pointer_type(DTYPE)) + start
    if (low == 0) & (high == 16 * BLOCK):
        run_sections(
            pointer, here, x, before, coefs, shapes, scale, stride, low, high,
            SECTIONS, RECURSIVE, WRITE, BLOCK, True,
        )  # fmt: skip
    else:
        run_sections(
            pointer, here, x, before, coefs, shapes, scale, stride, low, high,
            SECTIONS, RECURSIVE, WRITE, BLOCK, False,
        )  # fmt: skip


@triton.jit
def newest_and_older(
    weights, count, oldest, key, counter, word13, step, stream_id,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr, REFINED: tl.constexpr,
):  # fmt: skip
    """z[step], the weighted sum of the older z of ``add_filtered``, and the least radius word."""
    x, before, least = zeros16(BLOCK), zeros16(BLOCK), none_yet(BLOCK)
    for t in range(count + 1):
        at = tl.where(t == count, step, oldest + t)
        x, least = draw(1.0, key, counter, word13, at, stream_id, least, ROUNDS, FAST, REFINED)
        before = axpy(tl.load(weights + t), x, before)
    return x, before, least


@triton.jit
def run_sections(
    pointer, here, x, before, coefs, shapes, scale, stride, low, high,
    SECTIONS: tl.constexpr, RECURSIVE: tl.constexpr, WRITE: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Run the sections of ``add_filtered``; the first section's output is added to ``before``."""
    for k in tl.static_range(SECTIONS):
        s, slot = tl.load(shapes + 4 * k), tl.load(shapes + 4 * k + 1)
        past = here + tl.load(shapes + 4 * k + 2).to(tl.int64) * stride
        coef = coefs + tl.load(shapes + 4 * k + 3)
        w, y = zeros16(BLOCK), before if k == 0 else zeros16(BLOCK)
        for t in range(s):
            at = slot + t
            at = tl.where(at >= s, at - s, at)
            v = load16(past + at.to(tl.int64) * stride, low, high, BLOCK, WHOLE)
            if RECURSIVE:
                w = axpy(tl.load(coef + 2 + t), v, w)
            y = axpy(tl.load(coef + 2 + s + t), v, y)
        w = axpy(tl.load(coef), x, w)
        x = axpy(tl.load(coef + 1), x, y)
        if s > 0:
            store16(past + slot.to(tl.int64) * stride, w, low, high, BLOCK, WHOLE)
    if WRITE:
        sums = axpy(scale, x, load16(pointer, low, high, BLOCK, WHOLE))
        store16(pointer, sums, low, high, BLOCK, WHOLE)


@triton.jit(do_not_specialize=OPEN)
def write_words(
    table, owners, step, stream_id, k0, k1, k2, k3, k4, k5, k6, k7,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Write the words themselves to int32 tensors, for tests against the specification."""
    row, start, low, high, counter, word13 = locate(table, owners, BLOCK, True)
    key = load_key(k0, k1, k2, k3, k4, k5, k6, k7)
    words = block_words(key, counter, word13, step, stream_id, ROUNDS)
    pointer = tl.load(row).to(tl.pointer_type(tl.uint32)) + start
    store16(pointer, words, low, high, BLOCK, False)
