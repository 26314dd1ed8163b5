"""Correlated noise with exactly rounded releases, which do not depend on the machine's arithmetic.

The release of step t is the multiple of a public grid γ nearest to the real number

    G + scale·(C⁻¹z)[t],        z the real normals of ``generator.reals``,

as if that had been computed with all of its infinitely many bits. So the release is a function of
the output of the continuous mechanism that the accountants analyse, and has its privacy. Nearly all
entries are computed in float64 with an error bound. An entry whose error interval contains a
boundary between two multiples is computed again in arbitrary precision.
``docs/proofs/floating-point.md`` has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from corrnoise import _checks as checks
from corrnoise._threads import processors
from corrnoise.mechanisms import Mechanism
from corrnoise.noise import state as _state
from corrnoise.noise.backends.cpu import Layout
from corrnoise.noise.backends.targets import check_layout, check_scale, check_wide_targets
from corrnoise.noise.filtering.filters import Filter
from corrnoise.noise.generator import keystream, reals
from corrnoise.noise.generator.key import Key
from corrnoise.noise.generator.reals import INDICES, Reals
from corrnoise.noise.generator.stream import LARGEST_WORD, NoiseStream, tiles

GRID_BITS = 8  # γ is the largest power of two that is at most 2^-8 of the scale

_TILE = 1 << 14  # indices at once: the arrays of a thread stay in cache
_SHARE = 1 << 18  # the fewest indices for a thread
_SMALLEST_SCALE = 2.0**-100
_MOST_LEVELS = 1 << 10  # an entry needs more with probability 2^-60000


@dataclass(frozen=True)
class Release:
    """The noise of one step and the grid that its entries are rounded to.

    Attributes:
        step: t.
        weights: the weights of z_{t - p + 1}, …, z_t: row t of C⁻¹.
        scale: the standard deviation of z.
    """

    step: int
    weights: tuple[float, ...]
    scale: float

    @property
    def grid(self) -> float:
        """The grid γ, a power of two."""
        return math.ldexp(1.0, math.frexp(self.scale)[1] - 1 - GRID_BITS)

    @property
    def ratio(self) -> float:
        """The scale over γ, exact, in [2^8, 2^9)."""
        return self.scale / self.grid

    @property
    def oldest(self) -> int:
        """The step of the first weight."""
        return self.step - len(self.weights) + 1

    @property
    def room(self) -> float:
        """The largest distance to a multiple of γ at which float64 decides an entry, in units of γ.

        It is half a unit minus the error bound of the noise. The caller must account for the
        rounding of the entry itself, a relative 2^-52.
        """
        return 0.5 - self.ratio * reals.sum_error(self.weights) * (1.0 + 2.0**-40) - 2.0**-50


class ExactNoise:
    r"""The release of gradients with the noise (C⁻¹z)[step], rounded exactly to a public grid.

    It replaces ``CorrelatedNoise`` for a C⁻¹ of p bands. Nothing is stored between steps: the p
    normals of an entry are regenerated.

    Guarantees: every release is the multiple of γ nearest to the real number
    G + scale·(C⁻¹z)[step], if the library functions of NumPy or torch are as accurate as
    ``generator.reals`` assumes. So every bit is the same on every device, for every tiling and
    after every restart.

    Args:
        mechanism: a mechanism with a banded C⁻¹ and float32 coefficients.
        key: the secret; from the operating system if not given.
        stream: an id below 2^32.
        rounds: the number of ChaCha rounds.
        threads: the number of threads for gradients in main memory; all processors by default.

    >>> import corrnoise as cn
    >>> mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=4).in_float32()
    >>> noise = ExactNoise(mechanism, Key.from_bytes(bytes(range(32))))
    >>> grads = [np.zeros(3)]
    >>> noise.add_(grads, step=7, scale=1.0)
    >>> grads[0] * 256
    array([-114.,  365.,  -83.])
    """

    def __init__(
        self,
        mechanism: Mechanism,
        key: Key | None = None,
        stream: int = 0,
        rounds: int = 20,
        *,
        threads: int | None = None,
    ) -> None:
        if mechanism.recursive:
            raise ValueError(
                f"mechanism must have a banded C⁻¹ for an exact release, got {mechanism!r}, whose "
                "noise is a recursion; use dp_sgd, bisr, bifr, band_inv_mf or lambda_cgd"
            )
        checks.integer("num_steps", mechanism.num_steps, 1, LARGEST_WORD, "steps are 32-bit")
        key = Key.generate() if key is None else key
        self._stream = NoiseStream(key, stream, rounds, purpose=reals.purpose(0))
        self._words: dict[str, Any] = {}  # the keystream on each torch device in use
        self._filter = Filter.of(mechanism)
        last = mechanism.num_steps - 1
        if not np.array_equal(self._filter.weights(last), mechanism.noising_row(last)):
            raise ValueError(
                f"mechanism must have coefficients in float32, got {mechanism!r} with others; "
                "calibrate and run mechanism.in_float32()"
            )
        threads = processors() if threads is None else threads
        self._threads = checks.integer("threads", threads, 1)

    @property
    def num_steps(self) -> int:
        """The number of steps that the mechanism is built for."""
        return self._filter.num_steps

    @property
    def key(self) -> Key:
        """The secret key, to be saved separately from checkpoints."""
        return self._stream.key

    def add_(self, grads: Any, step: int, scale: float, offsets: list[int] | None = None) -> None:
        """Replace every G by the multiple of γ nearest to G + scale·(C⁻¹z)[step], in place.

        Args:
            grads: contiguous float64 tensors on one CPU or CUDA device, or float64 arrays.
            step: in [0, num_steps).
            scale: the standard deviation of z: noise multiplier times clip norm.
            offsets: where each tensor begins in the flat parameter vector.
        """
        release = self.release(step, scale)
        arrays, device = check_wide_targets(grads)
        layout = check_layout([int(math.prod(each.shape)) for each in grads], offsets)
        if device.startswith("cuda"):
            self.round_tensors(arrays, layout, release)
        else:
            self._round(arrays, layout, release)

    def round_tensors(self, tensors: Sequence[Any], layout: Layout, release: Release) -> None:
        """Round flat tensors with torch on their device, without argument validation."""
        from corrnoise.noise.backends import torch_exact

        device = tensors[0].device
        if str(device) not in self._words:
            self._words[str(device)] = torch_exact.Words(self._stream, device)
        torch_exact.round_(
            tensors,
            layout,
            release,
            self._words[str(device)],
            lambda value, index: self.nearest(value, index, release),
        )

    def release(self, step: int, scale: float) -> Release:
        """The noise of a step and its grid."""
        n = self.num_steps
        step = checks.integer("step", step, 0, n - 1, f"the mechanism is planned for {n} steps")
        scale = check_scale(scale)
        if scale < _SMALLEST_SCALE:
            raise ValueError(
                f"scale must be at least 2^-100 for an exact release, got {scale:g}; raise the "
                "noise multiplier or the clip norm"
            )
        return Release(step, tuple(float(w) for w in self._filter.weights(step)), scale)

    def nearest(self, value: float, index: int, release: Release) -> int:
        """The release of one entry in units of γ, computed in arbitrary precision.

        Args:
            value: G of the entry.
            index: its index in the flat parameter vector.
            release: the noise of the step.
        """
        if not math.isfinite(value):
            raise ValueError("grads must be finite, got NaN or infinity: nothing is to be released")
        unit = Fraction(release.grid)
        levels = 2
        while levels <= _MOST_LEVELS:
            found = self._enclosed(index, release, levels)
            if found is not None:
                middle, radius = (Fraction(part) * Fraction(release.scale) for part in found)
                low = (Fraction(value) + middle - radius) / unit + Fraction(1, 2)
                high = (Fraction(value) + middle + radius) / unit + Fraction(1, 2)
                if math.floor(low) == math.floor(high):
                    return math.floor(low)
            levels *= 2
        raise ArithmeticError("no number of bits decides this entry, which has probability 0")

    def seek(self, step: int) -> None:
        """Do nothing: no state is stored, so every step may be the next one."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the key: values that identify this noise."""
        return {**self._identity(), "next_step": None, "layout": [], "state": None}

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Check that the state belongs to this noise.

        Raises:
            ValueError: it belongs to another key, stream, mechanism or number of rounds.
        """
        _state.check_identity(data, self._identity())

    def __repr__(self) -> str:
        return (
            f"ExactNoise({self._filter.mechanism!r}, key={self.key.fingerprint}, "
            f"stream={self._stream.stream}, rounds={self._stream.rounds})"
        )

    def _identity(self) -> dict[str, Any]:
        return {**_state.identity(self._stream, self._filter), "exact": True}

    def _enclosed(
        self, index: int, release: Release, levels: int
    ) -> tuple[Fraction, Fraction] | None:
        """Σ w·z of an index: a number and the radius of the error around it, as exact fractions."""
        middle = radius = Fraction(0)
        for t, weight in enumerate(release.weights):
            u, theta = reals.digits(
                self.key,
                stream=self._stream.stream,
                rounds=self._stream.rounds,
                step=release.oldest + t,
                index=index,
                levels=levels,
            )
            found = reals.enclosed(u, theta, index=index, levels=levels)
            if found is None:
                return None
            middle += Fraction(weight) * Fraction(found[0])
            radius += abs(Fraction(weight)) * Fraction(found[1])
        return middle, radius

    def _round(self, arrays: Sequence[Reals], layout: Layout, release: Release) -> None:
        items = [
            (k, low, high)
            for k, (offset, size) in enumerate(layout)
            for low, high in tiles(offset, offset + size, _TILE)
        ]

        def work(item: tuple[int, int, int]) -> None:
            k, low, high = item
            self._tile(arrays[k][low - layout[k][0] : high - layout[k][0]], low, release)

        total = sum(size for _, size in layout)
        threads = min(self._threads, max(1, total // _SHARE))
        if threads == 1:
            for item in items:
                work(item)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, items))

    def _tile(self, values: Reals, low: int, release: Release) -> None:
        """Round the entries from index ``low`` on, in place."""
        first = low - low % INDICES
        blocks = -(-(low + values.size - first) // INDICES)
        words = np.empty(16 * blocks, dtype=np.uint32)
        total, z = np.zeros((INDICES, blocks)), np.empty((INDICES, blocks))
        with np.errstate(invalid="ignore"):  # NaN marks undecided entries
            for t, weight in enumerate(release.weights):
                keystream.fill(
                    words,
                    self._stream.secret,
                    stream=self._stream.stream,
                    step=release.oldest + t,
                    block=first // INDICES,
                    rounds=self._stream.rounds,
                )
                reals.approximate(words, z)
                np.multiply(z, weight, out=z)
                np.add(total, z, out=total)
            noise = total.T.reshape(-1)[low - first : low - first + values.size]
            noise *= release.ratio
            noise += values / release.grid
            rounded = np.rint(noise)
            far = np.abs(noise - rounded) + np.abs(noise) * 2.0**-52
            undecided = np.flatnonzero(~(far < release.room))
        for place in undecided.tolist():
            rounded[place] = self.nearest(float(values[place]), low + place, release)
        np.multiply(rounded, release.grid, out=values)
