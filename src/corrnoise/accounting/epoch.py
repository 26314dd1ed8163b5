r"""A discrete dominating pair for one epoch of random allocation, with no random draws.

An example falls into one of b bins, and the first r of them are visited (r = b in a whole epoch).
With variance v = 1/σ² and X_j = e^{√v z_j - v/2} for independent standard normals z_j under Q,

    P/Q = S = 1 + (1/b) Σ_{j≤r} (X_j - 1).

**The curves.** The privacy of both directions is a pair of convex functions of s = e^ε,

    H(s) = E_Q[(S - s)_+] = δ_remove(log s),    K(s) = E_Q[(s - S)_+] = s·δ_add(-log s),

with H(s) - K(s) = 1 - s. H is computed for s ≥ 1 and K for s ≤ 1, where no terms cancel
(``lognormal``).

**Connecting the dots.** At the nodes s_m = e^{mh} upper values of H (for s ≥ 1) and of K (for
s ≤ 1) are known. A chord between upper values of a convex function is above it, so any chain of
chords is an upper bound; the lower convex hull of the nodes is the best one. It is the curve of a
discrete law of S: its slopes change by the masses q_m of Q at s_m, and P has masses s_m·q_m there.

Below the first node the chord ends at s = 0: this is mass of Q that P does not have. Beyond the
last node H is constant: this is mass of P that Q does not have. Each is an infinite loss in one
direction. Finally the masses of each direction are scaled so that their curve, computed in floating
point, is not below the upper values.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np

from corrnoise.accounting.convolution import Array
from corrnoise.accounting.lognormal import LARGEST_NORMAL

# The distance of nodes, relative to the standard deviation of log S, and the most nodes.
_SPACING, _MOST_NODES = 1.0 / 64.0, 40_000
# The rounding error of the masses of the hull, relative, after their check.
_CHECKED = 1e-9
# Rounds that process all points of a hull at once, before points are processed one by one.
_HULL_ROUNDS = 10


class Curves(Protocol):
    """The curves H and K of a pair, given by upper values at nodes."""

    def calls(self, h: float) -> Array:
        """Upper values of H at s = 1, e^h, e^{2h}, … until they are negligible."""
        ...

    def puts(self, h: float) -> Array:
        """Upper values of K at s = 1, e^{-h}, e^{-2h}, … until they are negligible."""
        ...


class Losses(NamedTuple):
    """The masses of the privacy losses (first + i)·h and of an infinite loss, in one direction."""

    first: int
    mass: Array
    infinite: float


class Pair(NamedTuple):
    """The losses of removing and of adding an example."""

    remove: Losses
    add: Losses


def spacing(variance: float, num_bins: int, num_steps: int) -> float:
    """A suitable distance h of nodes for ``num_steps`` steps of an epoch."""
    deviation = math.sqrt(math.log1p(math.expm1(variance) * num_steps / num_bins**2))
    largest = math.exp(variance / 2.0 + LARGEST_NORMAL * math.sqrt(variance)) / num_bins
    return max(_SPACING * deviation, math.log1p(largest) / _MOST_NODES)


def pair(curves: Curves, h: float) -> Pair:
    """A discrete pair that dominates the pair with these curves, on nodes of distance h.

    >>> from corrnoise.accounting.lognormal import LognormalSum
    >>> h = spacing(1.0, 5, 5)
    >>> found = pair(LognormalSum(1.0, 5, 5), h).remove  # random allocation of one step in five
    >>> loss = h * np.arange(found.first, found.first + found.mass.size)
    >>> round(float(found.mass @ np.maximum(1.0 - np.exp(1.0 - loss), 0.0)), 5)
    0.01378
    """
    high, low = curves.calls(h), curves.puts(h)[::-1]
    high[0] = low[-1] = min(high[0], low[-1])  # H(1) = K(1)
    calls, puts = high.size - 1, low.size - 1
    loss = h * np.arange(-puts, calls + 1)
    # s - 1 for s ≥ 1, and s for s ≤ 1, with s = 0 in front.
    over, under = np.expm1(loss[puts:]), np.append(0.0, np.exp(loss[: puts + 1]))
    high, low = _hull(over, high), _hull(under, np.append(0.0, low))
    falls, rises = np.diff(high) / np.diff(over), np.diff(low) / np.diff(under)
    # The slopes of H: the slopes of K minus 1, then those of H, then 0 beyond the last node.
    kink = 1.0 + falls[0] - rises[-1]
    masses = np.concatenate([np.diff(rises), [kink], np.diff(falls), [-falls[-1]]])
    q = np.maximum(masses, 0.0)
    only_q, only_p = float(rises[0]), float(high[-1])
    # Compare the curves of these masses, as sums of positive numbers, with the upper values.
    steps = np.append(np.diff(under), np.diff(over))
    above, below = np.cumsum(q[::-1])[::-1], np.cumsum(np.append(only_q, q[:-1]))
    removing = np.append(np.cumsum((above * steps)[::-1])[::-1], 0.0) + only_p
    adding = np.cumsum(below * steps)
    p_scale = _shortfall(np.append(low[:-1] + (1.0 - under[:-1]), high), removing)
    q_scale = _shortfall(np.append(low[1:], high[1:] + over[1:]), adding)
    return Pair(
        Losses(-puts, q * np.exp(loss) * p_scale, only_p * p_scale),
        Losses(-calls, q[::-1] * q_scale, only_q * q_scale),
    )


def _hull(x: Array, y: Array) -> Array:
    """The lower convex hull of points, at every x."""
    # A point that is not below the chord of its neighbours is no corner. A few rounds mostly
    # suffice; but if the last point is far below, each round would remove only one point.
    corners = np.arange(x.size)
    for _ in range(_HULL_ROUNDS):
        steps, rises = np.diff(x[corners]), np.diff(y[corners])
        below = rises[:-1] * steps[1:] < rises[1:] * steps[:-1]
        if np.all(below):
            return np.interp(x, x[corners], y[corners])
        corners = corners[np.concatenate([[True], below, [True]])]
    kept = list[int]()
    xs, ys = x.tolist(), y.tolist()
    for i in corners.tolist():
        while len(kept) > 1:
            first, last = kept[-2], kept[-1]
            left = (ys[last] - ys[first]) * (xs[i] - xs[last])
            if left < (ys[i] - ys[last]) * (xs[last] - xs[first]):
                break
            kept.pop()
        kept.append(i)
    return np.interp(x, x[kept], y[kept])


def _shortfall(wanted: Array, found: Array) -> float:
    """A factor that makes ``found`` at least ``wanted``, with a margin for rounding errors."""
    there = wanted > 0.0
    return max(1.0, float(np.max(wanted[there] / found[there]))) + _CHECKED
