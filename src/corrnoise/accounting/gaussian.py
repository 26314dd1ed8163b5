r"""The exact privacy of the Gaussian mechanism, which fixed batches (no amplification) have.

Noise of standard deviation σ on a query of sensitivity Δ is characterised by μ = Δ/σ alone. It is
(ε, δ)-DP if and only if (Balle and Wang, 2018)

    δ ≥ δ(ε, μ) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ).

With a = μ/2 - ε/μ and b = -μ/2 - ε/μ we have b² = a² + 2ε: both terms share the factor e^{-a²/2},

    δ(ε, μ) = ½ e^{-a²/2} (erfcx(-a/√2) - erfcx(-b/√2)),

which is accurate for δ down to the smallest float. For a small μ, the difference is computed as the
integral of -erfcx'(x) = 2/√π - 2x·erfcx(x), which avoids cancellation. All functions work on log δ.
The inverses are rounded toward privacy: a returned ε, μ or noise multiplier meets its target.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from corrnoise import _checks as checks

# Every result of a root search is moved toward privacy by this relative amount.
_ROUNDING = 1e-12
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)


def log_delta(epsilon: float, mu: float) -> float:
    """Log δ(ε, μ) of the Gaussian mechanism with μ = sensitivity/σ, exact up to rounding."""
    from scipy.special import erfcx, log_ndtr  # deferred, like all of SciPy, for a quick import

    if mu == 0.0:
        return -math.inf
    a, b = mu / 2.0 - epsilon / mu, -mu / 2.0 - epsilon / mu
    if a > 5.0:  # δ is close to 1, and erfcx would overflow
        first, second = float(log_ndtr(a)), epsilon + float(log_ndtr(b))
        return first + math.log1p(-math.exp(min(second - first, 0.0)))
    x, width = -a / math.sqrt(2.0), mu / math.sqrt(2.0)
    if width < 0.5:
        nodes = x + width * (_NODES + 1.0) / 2.0
        slopes = 2.0 / math.sqrt(math.pi) - 2.0 * nodes * erfcx(nodes)
        difference = width / 2.0 * float(_WEIGHTS @ slopes)
    else:
        difference = float(erfcx(x) - erfcx(x + width))
    if difference <= 0.0:  # so small that e^{-a²/2} underflows
        return -a * a / 2.0
    return -a * a / 2.0 + math.log(difference) - math.log(2.0)


def delta(epsilon: float, mu: float) -> float:
    """The exact δ(ε, μ) of the Gaussian mechanism with μ = sensitivity/σ (Balle and Wang, 2018).

    >>> round(delta(1.0, 1.0), 6)
    0.126937
    """
    epsilon = checks.number("epsilon", epsilon, 0.0)
    mu = checks.number("mu", mu, 0.0)
    return min(1.0, math.exp(log_delta(epsilon, mu)))


def epsilon(delta: float, mu: float) -> float:
    """The least ε with δ(ε, μ) ≤ δ, for μ = sensitivity/σ, rounded up by a relative 1e-12.

    >>> round(epsilon(1e-5, 1.0), 4)
    4.3772
    """
    delta = checks.probability("delta", delta)
    mu = checks.number("mu", mu, 0.0)
    target = math.log(delta)
    if log_delta(0.0, mu) <= target:
        return 0.0
    high = mu * mu / 2.0 + mu * math.sqrt(-2.0 * target)  # the Gaussian tail bound
    found = _root(lambda x: log_delta(x, mu) - target, 0.0, high)
    return _push(lambda x: log_delta(x, mu) <= target, found, up=True)


def mu(epsilon: float, delta: float) -> float:
    """The largest μ = sensitivity/σ that is (ε, δ)-DP, rounded down by a relative 1e-12.

    >>> round(1 / mu(9.0, 1e-5) * math.sqrt(10), 4)  # DP-SGD with ten participations
    1.7226
    """
    epsilon = checks.number("epsilon", epsilon, 0.0, open_low=True)
    delta = checks.probability("delta", delta)
    target = math.log(delta)

    def excess(log_mu: float) -> float:
        return log_delta(epsilon, math.exp(log_mu)) - target

    # Any μ with the tail bound μ²/2 + μ·√(2 log 1/δ) ≤ ε is private; larger ones are tried upward.
    tail = math.sqrt(-2.0 * target)
    low = math.log(2.0 * epsilon / (tail + math.sqrt(tail * tail + 2.0 * epsilon)))
    low = min(low, math.log(delta))
    high = low + 1.0
    while excess(high) < 0.0:
        high += 2.0
    found = math.exp(_root(excess, low, high))
    return _push(lambda x: log_delta(epsilon, x) <= target, found, up=False)


def noise_multiplier(epsilon: float, delta: float, sensitivity: float) -> float:
    """The least σ that is (ε, δ)-DP for a query of this sensitivity: sensitivity/μ(ε, δ).

    It is exact, rounded up by a relative 1e-12. With the sensitivity per unit of clip norm, σ is
    the noise multiplier.

    >>> round(noise_multiplier(9.0, 1e-5, sensitivity=math.sqrt(10)), 4)
    1.7226
    """
    sensitivity = checks.number("sensitivity", sensitivity, 0.0, open_low=True)
    return sensitivity / mu(epsilon, delta) * (1.0 + _ROUNDING)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq

    return float(brentq(function, low, high, xtol=1e-300, rtol=1e-14, maxiter=500))


def _push(private: Callable[[float], bool], value: float, *, up: bool) -> float:
    """Move ``value`` up or down by at least the rounding, until ``private(value)`` is true."""
    step = _ROUNDING
    while step < 1.0:
        moved = value * (1.0 + step if up else 1.0 - step)
        if private(moved):
            return moved
        step *= 4.0
    raise ArithmeticError(f"no private value near {value}")
