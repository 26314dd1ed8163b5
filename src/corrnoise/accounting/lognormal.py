r"""The law of a sum of independent lognormals: upper values of two curves, with no random draws.

For Y = X_1 + … + X_r, X_j = e^{√v z_j - v/2} with standard normals z_j, so that the mean is r, and
s = 1 + (y - r)/b, the curves are those of ``epoch``: H(s) = E[(Y - y)_+]/b, K(s) = E[(y - Y)_+]/b.

**The law of the sum.** As in ``allocation``, each X_j is moved to the two neighbouring points of a
linear grid so that its mean is kept, which can only raise H and K. The part beyond the grid is
bounded and added for H, and moved to the end of the grid for K. The law of Y = Σ X_j is a power of
one Fourier transform, tilted by e^{λY}, so that errors are relative. The transform is periodic:

* for H, sums below the window appear above it, which raises H; for sums beyond y₁, the window's
  end, E[Y; Y > y₁] ≤ y₁·E[e^{λY}]·e^{-λy₁} is added, for some λ ≥ 1/y₁;
* for K, sums beyond the window appear below it, which raises K; for sums below y₀, the window's
  beginning, Q(Y < y₀) ≤ E[e^{λY}]·e^{-λy₀} is added, for some λ ≤ 0.

With many variables and far from the mean, rounding errors are large for every λ. There another
bound is used. For any number τ,

    E[(Y - y)_+] ≤ E[(Y - y)_+; all X_j ≤ τ] + r·E[(X_1 + Y' - y)_+; X_1 > τ],

where Y' is the sum of the others. The first term has Chernoff's bound. The second is the mean, over
the law of Y', of a closed form that is convex in Y'; the case that another X_j exceeds τ too is
bounded separately.

A bound on the rounding errors of the transforms is added at each point of the window. No single
grid suits both sums near their mean and sums that are 10¹⁰ times as large. So thresholds are
grouped into bands, each with its own grid, and one transform serves all thresholds of a band.
"""

from __future__ import annotations

import math

import numpy as np

from corrnoise.accounting.convolution import FACTOR, Array, Errors, powers, repeated_sums

# Losses at which δ is below this count as infinite.
_NEGLIGIBLE = 1e-19
# The number of grid points: this times the square root of the number of variables, within these
# limits; and the number far from the mean, where sums are large because one variable is large.
_POINTS, _LEAST_POINTS, _MOST_POINTS, _FAR_POINTS = 1200.0, 1 << 14, 1 << 18, 1 << 15
# Standard deviations of the sum, and of a normal, beyond which the mass is negligible.
_FAR, LARGEST_NORMAL = 14.0, 9.7
# The first band ends at this many standard deviations of the sum; each next one at this multiple.
_FIRST, _RATIO = 3.0, 2.0
# No band begins farther from the mean than this multiple of the sum's largest relevant value.
_MOST_DISTANCE = 1e3
# The fraction of a λ that is used, since sums beyond the window count e^{λ·period} times.
_EASE = 0.7
# Rounding errors are multiplied by E[e^{λY}]·e^{-λy}. At the end of a band that is near the mean,
# its logarithm may exceed the least possible one by this much. The second number is the largest
# product of λ and the last grid point.
_MOST_GROWTH, _MOST_EXPONENT = 6.0, 600.0
# For removing, a single variable is cut off where at most this fraction of H is lost, or at this
# multiple of the largest threshold's distance to the mean.
_PART, _REACH = 1e-4, 30.0
# With at least this many variables, sums far from the mean are also bounded by one large variable,
# above this fraction of the distance to the mean. The sum of the others then has this few points.
_MANY, _JUMP, _FEW = 256, 0.25, 400
# The relative rounding error of the two terms of a difference.
_CANCELLATION = 1e-13
# The relative rounding error of all other arithmetic (no transforms, no tilts) is far below this.
_ARITHMETIC = 1e-6


class LognormalSum:
    """The sum Y of r = ``num_steps`` variables, and its curves H and K for b = ``num_bins``."""

    def __init__(self, variance: float, num_bins: int, num_steps: int) -> None:
        self.variance, self.root = variance, math.sqrt(variance)
        self.b, self.r = num_bins, num_steps
        self.rounding = 1.0 + _ARITHMETIC + FACTOR * num_steps
        self.deviation = math.sqrt(num_steps * math.expm1(variance))
        # Beyond this a single X_j has negligible mass, and so has the sum this far from its mean.
        self.largest = math.exp(variance / 2.0 + LARGEST_NORMAL * self.root)
        self.far = num_steps + _FAR * self.deviation + self.largest
        size = min(max(_POINTS * math.sqrt(num_steps), _LEAST_POINTS), _MOST_POINTS)
        self.points = 1 << math.ceil(math.log2(size))

    def calls(self, h: float) -> Array:
        """Upper values of H at s = 1, e^h, e^{2h}, … until they are negligible."""
        found, distance = np.zeros(0), _FIRST * self.deviation
        while not found.size or (found[-1] > _NEGLIGIBLE and distance < _MOST_DISTANCE * self.far):
            last = math.floor(math.log1p(distance / self.b) / h)
            nodes = np.arange(found.size, max(last, found.size + 1) + 1)
            values = self._call(self.r + self.b * np.expm1(h * nodes))
            # H is decreasing.
            found = np.minimum.accumulate(np.append(found, values))
            distance *= _RATIO
        return found[: _first_below(found)]

    def puts(self, h: float) -> Array:
        """Upper values of K at s = 1, e^{-h}, e^{-2h}, … until they are negligible."""
        found, distance, top = np.zeros(0), _FIRST * self.deviation, float(self.r)
        small = np.zeros(0)
        while not found.size or small[-1] > _NEGLIGIBLE:
            least = max(self.r - distance, top / _RATIO)
            last = math.floor(-math.log((least + (self.b - self.r)) / self.b) / h)
            nodes = np.arange(found.size, max(last, found.size + 1) + 1)
            thresholds = self.b * np.exp(-h * nodes) - (self.b - self.r)
            # K(s)/s falls with s.
            scale = np.exp(h * np.arange(nodes[-1] + 1))
            small = np.minimum.accumulate(np.append(found, self._put(thresholds)) * scale)
            found = small / scale
            distance, top = _RATIO * distance, float(thresholds[-1])
        return found[: _first_below(small)]

    def _call(self, y: Array) -> Array:
        found = self._within(y)
        if self.r >= _MANY and y[0] - self.r > max(_FIRST * self.deviation, 2.0 / _JUMP):
            found = np.minimum(found, self._jump(y))
        return found * (self.rounding / self.b)

    def _within(self, y: Array) -> Array:
        """Upper values of E[(Y - y)_+] from a window of the sum and a largest X_j."""
        low, high, r = float(y[0]), float(y[-1]), self.r
        most = self._enough(high)
        start = max(0.0, r - _FAR * self.deviation)
        end = min(high + _FAR * self.deviation + 2.0 * most, max(self.far, 1.5 * high))
        far = high - r > 1.5 * _RATIO * _FIRST * self.deviation
        points = min(self.points, _FAR_POINTS) if far else self.points
        grid = _Grid(start, end, most, points, self)
        cut = r * (grid.weighted_beyond + (r - 1) * grid.beyond)
        at, law, weight, errors = grid.law(r, grid.eased(r, high, low))
        end = float(at[-1]) + grid.step
        kept = at >= low - grid.step
        worth = grid.step * repeated_sums(law[kept][::-1], weight[kept][::-1], errors)[::-1]
        wrapped = end * grid.chernoff(r, max(grid.tilt(r, end), 1.0 / end), end)
        return np.interp(y, at[kept], worth) + wrapped + cut

    def _enough(self, y: float) -> float:
        """A value of X_j beyond which E[(Y - y)_+] has only a small part, by a rough estimate."""
        from scipy.special import ndtr, ndtri  # deferred, like all of SciPy, for a quick import

        r, distance = self.r, max(y - self.r, _FIRST * self.deviation)
        z = distance / self.deviation
        normal = self.deviation * math.exp(-z * z / 2.0) / (3.0 * (1.0 + z * z))
        strike = np.array([distance + 1.0])
        estimate = max(normal, r * float(self._option(strike, 0.0, 1.0, 1.0)[0]) / 2.0)
        part = max(_PART * estimate / r, 1e-300)
        far = self.root - float(ndtri(min(part, 0.5)))
        most = math.exp(min(self.root * far - self.variance / 2.0, math.log(self.largest)))
        while r * float(ndtr(-far)) > part and most < self.largest:  # the others
            far += 0.5
            most = math.exp(min(self.root * far - self.variance / 2.0, math.log(self.largest)))
        return min(most, 1.0 + _REACH * distance)

    def _jump(self, y: Array) -> Array:
        """Upper values of E[(Y - y)_+] by one large X_j, as in the module's docstring."""
        r, low = self.r, float(y[0])
        jump = (low - r) * _JUMP
        start = max(0.0, r - _FAR * self.deviation)
        grid = _Grid(start, low, jump, _FAR_POINTS, self)
        at, law, _, errors = grid.law(r - 1, 0.0)
        # A coarser grid that preserves means.
        ends = np.linspace(float(at[0]), float(at[-1]), _FEW)
        cell = np.minimum(((at - ends[0]) / (ends[1] - ends[0])).astype(int), _FEW - 2)
        upper = np.clip((at - ends[cell]) / (ends[1] - ends[0]), 0.0, 1.0)
        law += errors.largest
        mass = np.bincount(cell, law * (1.0 - upper), _FEW)
        mass += np.bincount(cell + 1, law * upper, _FEW)
        jump, one, weighted = float(grid.values[-1]), grid.beyond, grid.weighted_beyond
        found = r * (self._option(y[:, None] - ends, jump, one, weighted) @ mass)
        # Add the case of two large variables, and sums beyond the window without a large variable.
        found += r * (r - 1) * (2.0 * weighted * one + r * one**2)
        end = float(at[-1]) + grid.step
        tilt = max(grid.tilt(r, end), 1.0 / end)
        found += r * grid.chernoff(r - 1, tilt, end) * (weighted + end * one)
        # (Y - y)_+ ≤ e^{λ(Y - y)}/(λe), without a large one.
        rest = grid.chernoff(r, tilt, end)
        return found + rest * np.exp(-tilt * (y - end)) / (tilt * math.e)

    def _option(self, strike: Array, jump: float, one: float, weighted: float) -> Array:
        """E[(X - a)_+; X > jump] for every a, by the formula of Black and Scholes."""
        from scipy.special import ndtr

        at = np.maximum(strike, jump)
        z = (np.log(at) + self.variance / 2.0) / self.root
        call = np.maximum(ndtr(self.root - z) - at * ndtr(-z), 0.0)
        call += _CANCELLATION * ndtr(self.root - z)
        return np.where(strike > jump, call, weighted - strike * one)

    def _put(self, y: Array) -> Array:
        found = np.zeros(y.size)
        y = y[y > 0.0]
        if not y.size:
            return found
        high, low = float(y[0]), float(y[-1])
        start = max(0.0, min(self.r - _FAR * self.deviation, low - _FIRST * self.deviation))
        end = min(self.far, start + 4.0 * (high - start))
        grid = _Grid(start, end, min(self.largest, high), self.points, self)
        grid.mass[-1] += grid.beyond
        at, law, weight, errors = grid.law(self.r, grid.eased(self.r, low, high))
        kept = at <= high + grid.step
        at = at[kept]
        worth = grid.step * repeated_sums(law[kept], weight[kept], errors)
        start = float(at[0])
        tilt = min(grid.tilt(self.r, start), 0.0)
        missed = grid.chernoff(self.r, tilt, start) if start else 0.0
        found[: y.size] = np.interp(y, at, worth) + y * missed
        return found * (self.rounding / self.b)


def _first_below(values: Array) -> int:
    """How many values to keep: up to the first negligible one, and at least two."""
    return max(2, int(np.count_nonzero(values > _NEGLIGIBLE)) + 1)


class _Grid:
    """The law of one X_j on a grid, its mean preserved, and the law of the sum in a window."""

    def __init__(
        self, start: float, end: float, most: float, points: int, total: LognormalSum
    ) -> None:
        from scipy.special import ndtr  # deferred, like all of SciPy, for a quick import

        self.points, self.step = points, (end - start) / points
        self.first = math.floor(start / self.step)
        cells = math.ceil(most / self.step)
        edges = np.full(cells + 1, -np.inf)
        logs = np.log(np.arange(1, cells + 1) * self.step)
        edges[1:] = (logs + total.variance / 2.0) / total.root
        masses: list[Array] = []
        for z in (edges, edges - total.root):  # under Q, and weighted by X
            below, above = ndtr(z), ndtr(-z)
            masses.append(np.where(z[1:] < 0.0, np.diff(below), -np.diff(above)))
        inside, weighted = masses
        upper = np.clip(weighted / self.step - np.arange(cells) * inside, 0.0, inside)
        self.mass = np.append(inside - upper, 0.0)
        self.mass[1:] += upper
        self.values = np.arange(cells + 1) * self.step
        self.beyond = float(ndtr(-edges[-1]))
        self.weighted_beyond = float(ndtr(total.root - edges[-1]))

    def eased(self, count: int, far: float, near: float) -> float:
        """A λ for a band: less than ``tilt`` at its end far from the mean."""
        least, tilt = _EASE * self.tilt(count, near), _EASE * self.tilt(count, far)
        most = count * self.log_total(least) - least * near + _MOST_GROWTH
        while count * self.log_total(tilt) - tilt * near > most:
            tilt = least + 0.8 * (tilt - least)
        return tilt

    def tilt(self, count: int, target: float) -> float:
        """The λ at which the tilted sum has approximately the mean ``target``."""
        from scipy.optimize import brentq

        def excess(tilt: float) -> float:
            weights = self.mass * np.exp(tilt * self.values)
            return count * float(weights @ self.values) / float(np.sum(weights)) - target

        at_zero = excess(0.0)
        if at_zero == 0.0:
            return 0.0
        end = math.copysign(_MOST_EXPONENT / float(self.values[-1]), -at_zero)
        if at_zero * excess(end) >= 0.0:
            return end
        return float(brentq(excess, 0.0, end, rtol=1e-3, xtol=1e-3 * abs(end)))

    def log_total(self, tilt: float) -> float:
        """The logarithm of E[e^{λX}]."""
        return math.log(float(self.mass @ np.exp(tilt * self.values)))

    def chernoff(self, count: int, tilt: float, at: float) -> float:
        """E[e^{λY}]·e^{-λ·at}: an upper bound on the mass beyond ``at``."""
        return math.exp(min(count * self.log_total(tilt) - tilt * at, 700.0))

    def law(self, count: int, tilt: float) -> tuple[Array, Array, Array, Errors]:
        """The window of the sum, its tilted masses, the weights that undo it, and the errors."""
        log_total = self.log_total(tilt)
        mass = self.mass * np.exp(tilt * self.values - log_total)
        size = self.points
        while size < mass.size:  # the error bound of a transform is for powers of two
            size *= 2
        transform, errors = powers([(mass, count)], size)
        found = np.roll(np.fft.irfft(transform, size), -(self.first % size))
        at = self.step * np.arange(self.first, self.first + size, dtype=np.float64)
        with np.errstate(over="ignore"):
            weights = np.exp(count * log_total - tilt * at)
        return at, np.maximum(found, 0.0), weights, errors
