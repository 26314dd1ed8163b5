"""Proposals of importance sampling for balls-in-bins, each with its largest value W."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from corrnoise.accounting.bins import Bins, Indices

Array = npt.NDArray[np.float64]
# Float64 in a certificate; float32 where a search keeps its draws.
Noise = npt.NDArray[np.float64] | npt.NDArray[np.float32]

# How many floats one thread processes at once; they fit into a cache.
_CHUNK = 1 << 15
# Exponents are cut off here; a W this large certifies nothing.
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Tilt:
    """An integrand as a function of (generator, Gaussian inner products), and its largest value."""

    values: Callable[[np.random.Generator, Noise], Array]
    log_largest: float

    @property
    def largest(self) -> float:
        """W, which no value of the integrand exceeds."""
        return float(np.exp(min(self.log_largest, LARGEST_EXPONENT)))


class Shape(Protocol):
    """The settings of a proposal, which a search keeps while σ and ε change."""

    def at(self, bins: Bins, sigma: float, epsilon: float) -> Tilt:
        """The proposal at this noise and ε."""
        ...


def log_worth(order: npt.ArrayLike, epsilon: float) -> Array:
    """The logarithm of the largest T^{1-α}(1 - e^ε/T) over T > e^ε, for an order α > 1.

    It is e^{-(α-1)ε}(α-1)^{α-1}/α^α, the factor from a moment of order α to a bound on δ(ε).
    """
    order = np.asarray(order, dtype=np.float64)
    excess = order - 1.0
    return excess * np.log(excess) - excess * epsilon - order * np.log(order)


def chunks(noise: Noise) -> Iterator[slice]:
    """Slices of the rows, each small enough for a cache."""
    size = max(1, _CHUNK // noise.shape[1])
    for start in range(0, noise.shape[0], size):
        yield slice(start, start + size)


@dataclass(frozen=True)
class Pattern:
    """Bins that are far apart: blocks of equally spaced bins, counted mod b from a first bin.

    Attributes:
        blocks: the number of blocks.
        period: the distance from the beginning of a block to that of the next one.
        points: the number of bins in a block.
        spacing: the distance between neighbouring bins of a block.
    """

    blocks: int
    period: int
    points: int = 1
    spacing: int = 1

    @property
    def size(self) -> int:
        """The number of bins, t."""
        return self.blocks * self.points

    @property
    def bins(self) -> Indices:
        """The bins of the pattern that begins at bin 0."""
        blocks = np.arange(self.blocks) * self.period
        return np.add.outer(blocks, np.arange(self.points) * self.spacing).reshape(-1)

    def sums(self, values: Array) -> Array:
        """For each row of ``values`` and every r, the sum over the pattern that begins at bin r.

        Values are only added, never subtracted, so there is no cancellation.
        """
        inner = _window(values, self.points, self.spacing)
        return _window(inner, self.blocks, self.period)

    def different_sums(self, values: Array) -> Array:
        """``sums`` for all r; for r below the period if that divides b, as the sums then repeat."""
        rows, b = values.shape
        if self.blocks * self.period != b:
            return self.sums(values)
        folded = np.sum(values.reshape(rows, self.blocks, self.period), axis=1)
        return _window(folded, self.points, self.spacing)

    def common(self, by_lag: Array) -> tuple[float, float]:
        """The largest inner products: of two bins in one block, and of two in different blocks."""
        b, width = by_lag.size, (self.points - 1) * self.spacing
        lags = np.maximum(by_lag, 0.0)
        between = lags[self.period - width : b - self.period + width + 1]
        far = float(np.max(between)) if self.blocks > 1 else 0.0
        inside = np.arange(self.spacing, width + 1, self.spacing)
        near = float(np.max(np.maximum(lags[inside], lags[b - inside]), initial=far))
        return near, far


def _window(values: Array, count: int, spacing: int) -> Array:
    """Sums of ``count`` entries ``spacing`` apart, counted mod the length of a row, by doubling."""
    total: Array | None = None
    done, power, size = 0, values, 1
    while True:
        if count & size:
            total = power if total is None else _plus_later(total, power, done * spacing)
            done += size
        if total is not None and done == count:
            return total
        power = _plus_later(power, power, size * spacing)
        size *= 2


def _plus_later(first: Array, second: Array, shift: int) -> Array:
    """Each entry of ``first`` plus the entry of ``second`` ``shift`` places later, mod the row."""
    width = first.shape[1]
    shift %= width
    result = np.empty_like(first)
    np.add(first[:, : width - shift], second[:, shift:], out=result[:, : width - shift])
    np.add(first[:, width - shift :], second[:, :shift], out=result[:, width - shift :])
    return result
