"""From a budget to noise and back, for every way of sampling that has a valid analysis."""

from __future__ import annotations

import sys
from typing import Any, Literal, cast

import numpy as np

from corrnoise import checks
from corrnoise.accounting import gaussian, poisson, renyi
from corrnoise.accounting.balls_in_bins import Estimate
from corrnoise.accounting.bins import Bins, matrix_bins, toeplitz_bins
from corrnoise.accounting.certificate import SEARCH_TOLERANCE, Draws, Search, bisect
from corrnoise.accounting.guarantee import Calibration, Sampling
from corrnoise.accounting.progress import Progress
from corrnoise.accounting.validity import require
from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.participation import Participation

# Relative, toward privacy: more than the arithmetic can lose.
_ROUNDING = 1e-12
# With these, ``estimate_noise`` is off by a fraction of a percent.
_ESTIMATE_DRAWS, _ESTIMATE_TOLERANCE = 2_000, 5e-4


def calibrate(
    mechanism: Mechanism | DenseMechanism,
    participation: Participation,
    *,
    epsilon: float,
    delta: float,
    sampling: Sampling = "fixed",
    failure_probability: float = 1e-9,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Calibration:
    """The least noise with which a run is (ε, δ)-DP, never on the wrong side of the target.

    Args:
        mechanism: the factorization.
        participation: n, b, k.
        epsilon: ε > 0.
        delta: δ in (0, 1).
        sampling: "fixed" (any order with separation b; exact), "balls-in-bins" (certified by
            sampling), "poisson" or "cyclic-poisson" (bounds by a PLD accountant).
        failure_probability: for balls-in-bins, how likely the certificate may be wrong.
        samples: draws for the certificate; chosen from b by default.
        seed: of the draws; the same seed gives the same result.
        progress: True for a bar on the terminal, or a function that is called with (draws done,
            draws in all) during the certificate.

    >>> import corrnoise as cn
    >>> part = cn.Participation(980, 98, 10)
    >>> m = cn.mechanisms.bisr(cn.workloads.sgd(980, momentum=0.9, decay=0.9999), num_bands=4)
    >>> cn.calibrate(m, part, epsilon=9, delta=1e-5)
    Calibration(noise_multiplier=5.6834, epsilon=9, delta=1e-05, sampling='fixed', exact)
    """
    epsilon = checks.number("epsilon", epsilon, 0.0, open_low=True)
    delta = checks.probability("delta", delta)
    draws = Draws.checked(failure_probability, samples, seed, progress)
    require(mechanism, participation, sampling)
    if sampling == "balls-in-bins":
        return _calibrate_bins(mechanism, participation, epsilon, delta, draws)
    if sampling == "fixed":
        found = mechanism.sensitivity(participation)
        noise = gaussian.noise_multiplier(epsilon, delta, found.value)
        kind: Literal["exact", "bound"] = "exact" if found.exact else "bound"
        return Calibration(mechanism, participation, sampling, noise, epsilon, delta, kind)
    toeplitz = cast(Mechanism, mechanism)
    most = gaussian.noise_multiplier(epsilon, delta, mechanism.sensitivity(participation).value)

    def excess(noise: float) -> float:
        return poisson.delta(toeplitz, participation, noise, epsilon) - delta

    high = most
    while excess(high) > 0.0:
        high *= 2.0
    low = high
    while excess(low) <= 0.0 and low > 1e-3 * high:
        low /= 2.0
    noise = bisect(lambda x: excess(x) <= 0.0, low, high, 1e-5)
    return Calibration(mechanism, participation, sampling, noise, epsilon, delta, "bound")


def estimate_noise(
    mechanism: Mechanism | DenseMechanism,
    participation: Participation,
    *,
    epsilon: float,
    delta: float,
    failure_probability: float = 1e-9,
    samples: int | None = None,
    seed: int = 0,
) -> float:
    """About the noise that ``calibrate`` finds for balls-in-bins, from few draws.

    To rank mechanisms with, at a tenth of the time; it certifies nothing. The arguments are those
    of ``calibrate``.
    """
    require(mechanism, participation, "balls-in-bins")
    draws = Draws.checked(failure_probability, samples, seed, None)
    search = Search(_bins(mechanism, participation.min_sep), delta, draws, _ESTIMATE_DRAWS)
    return _promising_noise(search, epsilon, _ESTIMATE_TOLERANCE)[0]


def account(
    mechanism: Mechanism | DenseMechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    delta: float | None = None,
    epsilon: float | None = None,
    sampling: Sampling = "fixed",
    failure_probability: float = 1e-9,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Calibration:
    """The ε of a run with this noise at this δ, or the δ at this ε: one of them is given.

    The inverse of ``calibrate``, with the same arguments.

    >>> import corrnoise as cn
    >>> part = cn.Participation(980, 98, 10)
    >>> m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(980))
    >>> round(cn.account(m, part, noise_multiplier=1.7227, delta=1e-5).epsilon, 3)
    9.0
    """
    sigma = checks.number("noise_multiplier", noise_multiplier, 0.0, open_low=True)
    draws = Draws.checked(failure_probability, samples, seed, progress)
    require(mechanism, participation, sampling)
    if (delta is None) == (epsilon is None):
        raise ValueError(
            f"exactly one of delta and epsilon must be given, got delta={delta!r} and "
            f"epsilon={epsilon!r}; the other is found"
        )
    if epsilon is not None:
        epsilon = checks.number("epsilon", epsilon, 0.0)
        return _account_delta(mechanism, participation, sampling, sigma, epsilon, draws)
    delta = checks.probability("delta", delta)
    if sampling == "balls-in-bins":
        bins = _bins(mechanism, participation.min_sep)
        return _account_bins(mechanism, participation, bins, sigma, delta, draws)
    if sampling == "fixed":
        found = mechanism.sensitivity(participation)
        epsilon = gaussian.epsilon(delta, found.value / sigma)
        kind: Literal["exact", "bound"] = "exact" if found.exact else "bound"
        return Calibration(mechanism, participation, sampling, sigma, epsilon, delta, kind)
    epsilon = poisson.epsilon(cast(Mechanism, mechanism), participation, sigma, delta)
    return Calibration(mechanism, participation, sampling, sigma, epsilon, delta, "bound")


def _account_delta(
    mechanism: Mechanism | DenseMechanism,
    participation: Participation,
    sampling: Sampling,
    sigma: float,
    epsilon: float,
    draws: Draws,
) -> Calibration:
    if sampling == "balls-in-bins":
        bins = _bins(mechanism, participation.min_sep)
        most = _rounded_up(gaussian.delta(epsilon, bins.longest / sigma))
        delta, found = Search(bins, 0.0, draws).least_delta(sigma, epsilon, most)
        delta = _rounded_up(delta)
        return _certified(mechanism, participation, bins, sigma, epsilon, delta, draws, found)
    kind: Literal["exact", "bound"] = "bound"
    if sampling == "fixed":
        sens = mechanism.sensitivity(participation)
        delta = gaussian.delta(epsilon, sens.value / sigma)
        kind = "exact" if sens.exact and delta > sys.float_info.min else "bound"
    else:
        delta = poisson.delta(cast(Mechanism, mechanism), participation, sigma, epsilon)
    delta = _rounded_up(delta)
    return Calibration(mechanism, participation, sampling, sigma, epsilon, delta, kind)


def _rounded_up(delta: float) -> float:
    """Up by what arithmetic may lose, and never 0: no Gaussian noise attains that."""
    return min(max(delta * (1.0 + _ROUNDING), sys.float_info.min), 1.0)


def epsilon_of(
    plan: Any,
    steps_taken: int,
    *,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> float:
    """The ε spent by the first steps of a calibrated run, never more than the whole run's.

    It is exact, a bound or certified as the whole run's own ε is (``Calibration.kind``); where
    certified, from draws of its own, with the same failure probability once more. Valid for a
    number of steps that was not chosen by looking at what the run released; a run that stops for
    such a reason quotes the whole ε.

    Args:
        plan: a ``Calibration``, or anything that has one as ``.calibration``.
        steps_taken: in [0, num_steps].
        samples: as in ``account``, for balls-in-bins.
        seed: likewise.
        progress: likewise.
    """
    whole: Calibration = getattr(plan, "calibration", plan)
    n, b = whole.participation.num_steps, whole.participation.min_sep
    taken = checks.integer("steps_taken", steps_taken, 0, n, "a plan ends with its last step")
    if taken in (0, n):
        return whole.epsilon if taken else 0.0
    mechanism = whole.mechanism.first(taken)
    failure = whole.failure_probability or 1e-9
    if whole.sampling == "balls-in-bins":
        draws = Draws.checked(failure, samples, seed, progress)
        part = Participation(taken, min(b, taken), -(-taken // b))
        bins = _bins(mechanism, b)
        spent = _account_bins(
            mechanism, part, bins, whole.noise_multiplier, whole.delta, draws
        ).epsilon
    elif whole.sampling == "fixed":
        k = min(whole.participation.max_participations, -(-taken // b))
        part = Participation(taken, min(b, taken), k)
        sens = mechanism.sensitivity(part).value
        spent = gaussian.epsilon(whole.delta, sens / whole.noise_multiplier)
    else:
        spent = poisson.epsilon(
            cast(Mechanism, whole.mechanism),
            whole.participation,
            whole.noise_multiplier,
            whole.delta,
            steps_taken=taken,
        )
    return min(spent, whole.epsilon)


def _calibrate_bins(
    mechanism: Mechanism | DenseMechanism,
    participation: Participation,
    epsilon: float,
    delta: float,
    draws: Draws,
) -> Calibration:
    bins = _bins(mechanism, participation.min_sep)
    search = Search(bins, delta, draws)
    start, most = _promising_noise(search, epsilon, SEARCH_TOLERANCE)
    sigma, found = search.confirm(start, most, lambda sigma: (sigma, epsilon))
    return _certified(mechanism, participation, bins, sigma, epsilon, delta, draws, found)


def _promising_noise(search: Search, epsilon: float, tolerance: float) -> tuple[float, float]:
    """Noise that a few draws call private, and the noise that is private with no sampling."""
    most = search.bins.longest / gaussian.mu(epsilon, search.delta) * (1.0 + _ROUNDING)
    low = most
    while search.promising(low, epsilon) and low > 1e-3 * most:
        low *= 0.8
    return bisect(lambda x: search.promising(x, epsilon), low, most, tolerance), most


def _account_bins(
    mechanism: Mechanism | DenseMechanism,
    participation: Participation,
    bins: Bins,
    sigma: float,
    delta: float,
    draws: Draws,
) -> Calibration:
    most = gaussian.epsilon(delta, bins.longest / sigma)
    search = Search(bins, delta, draws)
    start = bisect(lambda x: search.promising(sigma, x), 0.0, most, SEARCH_TOLERANCE)
    epsilon, found = search.confirm(start, most, lambda epsilon: (sigma, epsilon))
    return _certified(mechanism, participation, bins, sigma, epsilon, delta, draws, found)


def _certified(
    mechanism: Mechanism | DenseMechanism,
    participation: Participation,
    bins: Bins,
    sigma: float,
    epsilon: float,
    delta: float,
    draws: Draws,
    found: Estimate | None,
) -> Calibration:
    plain = gaussian.epsilon(delta, bins.longest / sigma) if delta < 1.0 else 0.0
    surely = bisect(lambda x: renyi.delta_bound(bins, sigma, x) <= delta, 0.0, plain, 1e-4)
    kind: Literal["exact", "bound", "certified"] = "certified" if found else "bound"
    if bins.num_bins == 1:
        kind = "exact"
    return Calibration(
        mechanism,
        participation,
        "balls-in-bins",
        sigma,
        epsilon,
        delta,
        kind,
        draws.failure_probability if found else 0.0,
        surely,
        found,
    )


def _bins(mechanism: Mechanism | DenseMechanism, num_bins: int) -> Bins:
    if isinstance(mechanism, DenseMechanism):
        return matrix_bins(np.maximum(mechanism.strategy, 0.0), num_bins)
    return toeplitz_bins(np.maximum(mechanism.strategy_coef, 0.0), num_bins)
