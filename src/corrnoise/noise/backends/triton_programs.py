# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false
# ruff: noqa: RUF005
"""The kernels that ``triton_backend`` launches; one program is one tile of one tensor.

Kernels that draw normals work in passes. The first pass computes one block for each draw. If a pair
is in the tail, which happens in one program of 16,000 for each draw, the pass writes nothing and
returns true, and a refined pass computes everything again with second blocks. Computing second
blocks in every draw would double the time.

Both passes are one function. The refined pass is called instead of inlined. It keeps 8 more numbers
for each lane, and its registers and addresses would otherwise slow down the first pass, which needs
only as many as a kernel without a tail. ``benchmarks/noise_registers.py`` counts them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from corrnoise.noise.backends.triton_kernel import (
    TAIL,
    add16,
    axpy,
    chacha_block,
    fractions,
    is_whole,
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

# Values that change between calls, and the key: the compiler must not specialise on them.
OPEN = [*(f"k{i}" for i in range(8)), "step", "stream_id", "count", "scale"]


@triton.jit
def block_words(source, counter, word13, step, ROUNDS: tl.constexpr):
    """The 16 words of each lane at a step; ``source`` is the key and the stream id."""
    tail = counter, word13, step.to(tl.uint32, bitcast=True), source[1]
    return chacha_block(source[0], tail, ROUNDS)


@triton.jit
def draw(
    weight, source, counter, word13, step, least,
    ROUNDS: tl.constexpr, FAST: tl.constexpr, REFINED: tl.constexpr,
):  # fmt: skip
    """The 16 normals of each lane at a step, times a weight, and the least radius word so far.

    The second block is computed first: only 8 numbers of it are kept in registers, but 16 of the
    first block.
    """
    if REFINED:
        high_bit = tl.full((), 0x80000000, tl.uint32)
        v = fractions(block_words(source, counter, word13 | high_bit, step, ROUNDS))
    words = block_words(source, counter, word13, step, ROUNDS)
    f = uniforms(words)
    if REFINED:
        f = refined(f, v)
    return normals(f, words, weight, FAST), smallest(words, least)


@triton.jit
def none_yet(BLOCK: tl.constexpr):
    """The least radius word before the first draw."""
    return tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)


@triton.jit
def in_tail(least, REFINED: tl.constexpr):
    """Whether the first pass of a program met the tail.

    The test costs one minimum for each radius word, and one exchange between threads at the end of
    the pass. Nothing is left to refine after a refined pass.
    """
    return False if REFINED else tl.min(least, axis=0) < TAIL


def called(function):
    """The same function, which the compiler must call and not inline."""
    return triton.jit(noinline=True)(function.fn)


@triton.jit(do_not_specialize=OPEN)
def add_weighted(
    table, owners, weights, count, scale, step, stream_id, k0, k1, k2, k3, k4, k5, k6, k7,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradient += scale·Σ_t weights[t]·z[step + t] for t < count: one read, one write."""
    source = load_key(k0, k1, k2, k3, k4, k5, k6, k7), stream_id.to(tl.uint32, bitcast=True)
    where = table, owners, weights, count, scale, step, source
    if weigh(*where, DTYPE, BLOCK, FAR, ROUNDS, FAST, False):
        weigh_again(*where, DTYPE, BLOCK, FAR, ROUNDS, FAST, True)


@triton.jit
def weigh(
    table, owners, weights, count, scale, step, source,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr, REFINED: tl.constexpr,
):  # fmt: skip
    """One pass of ``add_weighted``; returns whether it met the tail and wrote nothing."""
    row, start, size, counter, word13 = locate(table, owners, BLOCK, FAR)
    # Volatile, as the compiler would otherwise delay this load to the end of the pass.
    pointer = tl.load(row, volatile=True).to(tl.pointer_type(DTYPE)) + start
    noise, least = zeros16(BLOCK), none_yet(BLOCK)
    tl.assume(count > 0)  # without this the compiler sets the sums to 0 twice
    for _ in range(count):
        weight = tl.load(weights) * scale
        z, least = draw(weight, source, counter, word13, step, least, ROUNDS, FAST, REFINED)
        noise = plus16(z, noise)
        weights, step = weights + 1, step + 1
    repeat = in_tail(least, REFINED)
    if not repeat:
        add16(pointer, noise, start, size, BLOCK)
    return repeat


weigh_again = called(weigh)


@triton.jit(do_not_specialize=[*OPEN, "use", "stride"])
def add_lookahead(
    table, owners, weights, count, scale, use, state, stride,
    step, stream_id, k0, k1, k2, k3, k4, k5, k6, k7,
    ROWS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Rows Σ_t weights[t, r]·z[step + t], r < ROWS: row ``use`` is added, rows 1, … are stored."""
    source = load_key(k0, k1, k2, k3, k4, k5, k6, k7), stream_id.to(tl.uint32, bitcast=True)
    where = table, owners, weights, count, scale, use, state, stride, step, source
    if look_ahead(*where, ROWS, DTYPE, BLOCK, FAR, ROUNDS, FAST, False):
        look_ahead_again(*where, ROWS, DTYPE, BLOCK, FAR, ROUNDS, FAST, True)


@triton.jit
def look_ahead(
    table, owners, weights, count, scale, use, state, stride, step, source,
    ROWS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr, REFINED: tl.constexpr,
):  # fmt: skip
    """One pass of ``add_lookahead``; returns whether it met the tail and wrote nothing."""
    row, start, size, counter, word13 = locate(table, owners, BLOCK, FAR)
    sums, least = (), none_yet(BLOCK)
    for _r in tl.static_range(ROWS):
        sums = sums + (zeros16(BLOCK),)
    tl.assume(count > 0)
    for t in range(count):
        z, least = draw(1.0, source, counter, word13, step + t, least, ROUNDS, FAST, REFINED)
        new = ()
        for r in tl.static_range(ROWS):
            new = new + (axpy(tl.load(weights + t * ROWS + r), z, sums[r]),)
        sums = new
    repeat = in_tail(least, REFINED)
    if not repeat:
        here = tl.load(row + 4) + start
        noise = zeros16(BLOCK)
        for r in tl.static_range(ROWS):
            if r > 0:
                vector = state + (r - 1) * stride.to(tl.int64)
                store16(vector + here, sums[r], start, size, BLOCK, False)
            noise = axpy(tl.where(use == r, scale, 0.0), sums[r], noise)
        add16(tl.load(row).to(tl.pointer_type(DTYPE)) + start, noise, start, size, BLOCK)
    return repeat


look_ahead_again = called(look_ahead)


@triton.jit(do_not_specialize=["scale"])
def add_stored(table, owners, vector, scale, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Gradient += scale·vector."""
    row, start, size, _, _ = locate(table, owners, BLOCK, False)
    noise = load16(vector + tl.load(row + 4) + start, start, size, BLOCK, False)
    noise = axpy(scale, noise, zeros16(BLOCK))
    add16(tl.load(row).to(tl.pointer_type(DTYPE)) + start, noise, start, size, BLOCK)


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
    slot = step mod s. A section's coefficients are gain, direct, s of feedback, s of output.
    ``weights`` has a weight for each of the ``count`` z that are older than the past of the first
    section and are regenerated, and then a 0 for z[step]. Unless RECURSIVE, all feedback is 0.
    """
    source = load_key(k0, k1, k2, k3, k4, k5, k6, k7), stream_id.to(tl.uint32, bitcast=True)
    where = table, owners, coefs, shapes, weights, count, scale, state, stride, step, source
    if run_filter(*where, SECTIONS, RECURSIVE, WRITE, DTYPE, BLOCK, FAR, ROUNDS, FAST, False):
        run_filter_again(*where, SECTIONS, RECURSIVE, WRITE, DTYPE, BLOCK, FAR, ROUNDS, FAST, True)


@triton.jit
def run_filter(
    table, owners, coefs, shapes, weights, count, scale, state, stride, step, source,
    SECTIONS: tl.constexpr, RECURSIVE: tl.constexpr, WRITE: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, FAR: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr, REFINED: tl.constexpr,
):  # fmt: skip
    """One pass of ``add_filtered``; returns whether it met the tail and wrote nothing."""
    row, start, size, counter, word13 = locate(table, owners, BLOCK, FAR)
    oldest = step - tl.load(shapes) - count
    x, before, least = zeros16(BLOCK), zeros16(BLOCK), none_yet(BLOCK)
    tl.assume(count >= 0)
    for t in range(count + 1):
        at = tl.where(t == count, step, oldest + t)
        x, least = draw(1.0, source, counter, word13, at, least, ROUNDS, FAST, REFINED)
        before = axpy(tl.load(weights + t), x, before)
    repeat = in_tail(least, REFINED)
    if not repeat:
        here = state + tl.load(row + 4) + start
        pointer = tl.load(row).to(tl.pointer_type(DTYPE)) + start
        if is_whole(start, size, BLOCK):
            run_sections(
                pointer, here, x, before, coefs, shapes, scale, stride, start, size,
                SECTIONS, RECURSIVE, WRITE, BLOCK, True,
            )  # fmt: skip
        else:
            run_sections(
                pointer, here, x, before, coefs, shapes, scale, stride, start, size,
                SECTIONS, RECURSIVE, WRITE, BLOCK, False,
            )  # fmt: skip
    return repeat


run_filter_again = called(run_filter)


@triton.jit
def run_sections(
    pointer, here, x, before, coefs, shapes, scale, stride, start, size,
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
            v = load16(past + at.to(tl.int64) * stride, start, size, BLOCK, WHOLE)
            if RECURSIVE:
                w = axpy(tl.load(coef + 2 + t), v, w)
            y = axpy(tl.load(coef + 2 + s + t), v, y)
        w = axpy(tl.load(coef), x, w)
        x = axpy(tl.load(coef + 1), x, y)
        if s > 0:
            store16(past + slot.to(tl.int64) * stride, w, start, size, BLOCK, WHOLE)
    if WRITE:
        sums = axpy(scale, x, load16(pointer, start, size, BLOCK, WHOLE))
        store16(pointer, sums, start, size, BLOCK, WHOLE)


@triton.jit(do_not_specialize=OPEN)
def write_words(
    table, owners, step, stream_id, k0, k1, k2, k3, k4, k5, k6, k7,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Write the words themselves to int32 tensors, for tests against the specification."""
    row, start, size, counter, word13 = locate(table, owners, BLOCK, True)
    source = load_key(k0, k1, k2, k3, k4, k5, k6, k7), stream_id.to(tl.uint32, bitcast=True)
    words = block_words(source, counter, word13, step, ROUNDS)
    pointer = tl.load(row).to(tl.pointer_type(tl.uint32)) + start
    store16(pointer, words, start, size, BLOCK, False)
