"""From a budget to noise and back, for every way of sampling that has a valid analysis."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from corrnoise import checks
from corrnoise.accounting import gaussian, poisson, renyi
from corrnoise.accounting.balls_in_bins import Estimate
from corrnoise.accounting.bins import Bins, matrix_bins, toeplitz_bins
from corrnoise.accounting.certificate import SEARCH_TOLERANCE, Draws, Search, bisect
from corrnoise.accounting.progress import Progress
from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.participation import Participation

Array = npt.NDArray[np.float64]
Sampling = Literal["fixed", "balls-in-bins", "poisson", "cyclic-poisson"]

SAMPLINGS: tuple[Sampling, ...] = ("fixed", "balls-in-bins", "poisson", "cyclic-poisson")
# A coefficient this far below 0 is the rounding of an FFT, not a sign.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Calibration:
    """What a run promises: noise, ε and δ, and everything that the promise assumes.

    The unit of privacy is one example; neighbouring datasets differ by adding or removing one.

    Attributes:
        mechanism: the factorization.
        participation: n, b, k.
        sampling: how examples come to steps.
        noise_multiplier: the standard deviation of Z over the clip norm.
        epsilon: ε.
        delta: δ.
        kind: "exact"; "bound" (proven, but perhaps not tight); or "certified" (proven up to
            ``failure_probability`` over the accountant's own random draws).
        failure_probability: 0 unless certified.
        epsilon_without_sampling: for balls-in-bins, an ε that holds at this noise with certainty.
        estimate: for balls-in-bins, the estimate of δ(ε) behind the certificate.
    """

    mechanism: Mechanism | DenseMechanism
    participation: Participation
    sampling: Sampling
    noise_multiplier: float
    epsilon: float
    delta: float
    kind: Literal["exact", "bound", "certified"]
    failure_probability: float = 0.0
    epsilon_without_sampling: float | None = None
    estimate: Estimate | None = None
    unit: str = field(default="example", init=False)
    neighbours: str = field(default="add or remove one example", init=False)

    @property
    def exact(self) -> bool:
        """Whether ε and δ are the exact cost of this noise."""
        return self.kind == "exact"

    @property
    def mu(self) -> float:
        """The μ of Gaussian DP, sensitivity/σ, which composes by adding squares. Fixed batches."""
        if self.sampling != "fixed":
            raise ValueError(
                f"mu is defined for sampling='fixed', got {self.sampling!r}; an amplified run is "
                "not a Gaussian mechanism"
            )
        return self.mechanism.sensitivity(self.participation).value / self.noise_multiplier

    @property
    def rho(self) -> float:
        """The ρ = μ²/2 of zero-concentrated DP. Fixed batches."""
        return gaussian.zcdp_rho(self.mu)

    def event(self) -> Any:
        """The run as a ``dp_accounting`` event, to compose with other releases."""
        if self.sampling == "fixed":
            import dp_accounting

            return dp_accounting.GaussianDpEvent(1.0 / self.mu)
        if self.sampling == "balls-in-bins":
            raise ValueError(
                "sampling='balls-in-bins' has no dp_accounting event; compose its (ε, δ), or use "
                "the event of sampling='fixed' with the same noise, which is weaker but valid"
            )
        return poisson.event(
            cast(Mechanism, self.mechanism), self.participation, self.noise_multiplier
        )

    def rmse(self) -> float:
        """The error of the calibrated run, per unit of clip norm: σ·‖B‖_F/√n."""
        m, participation = self.mechanism, self.participation
        return self.noise_multiplier * m.rmse(participation) / m.sensitivity(participation).value

    def to_dict(self) -> dict[str, Any]:
        """What a reviewer needs, as plain values; the coefficients are the mechanism's own JSON."""
        return {
            "mechanism": repr(self.mechanism),
            **self.participation.to_dict(),
            "sampling": self.sampling,
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "kind": self.kind,
            "failure_probability": self.failure_probability,
            "epsilon_without_sampling": self.epsilon_without_sampling,
            "unit": self.unit,
            "neighbours": self.neighbours,
        }

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        how = self.kind
        if self.kind == "certified":
            how += f" but for probability {self.failure_probability:g}"
        return (
            f"Calibration(noise_multiplier={self.noise_multiplier:.5g}, "
            f"epsilon={self.epsilon:.5g}, delta={self.delta:.3g}, "
            f"sampling={self.sampling!r}, {how})"
        )


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


def account(
    mechanism: Mechanism | DenseMechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    delta: float,
    sampling: Sampling = "fixed",
    failure_probability: float = 1e-9,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Calibration:
    """The ε of a run with this noise at this δ: the inverse of ``calibrate``, same arguments.

    >>> import corrnoise as cn
    >>> part = cn.Participation(980, 98, 10)
    >>> m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(980))
    >>> round(cn.account(m, part, noise_multiplier=1.7227, delta=1e-5).epsilon, 3)
    9.0
    """
    sigma = checks.number("noise_multiplier", noise_multiplier, 0.0, open_low=True)
    delta = checks.probability("delta", delta)
    draws = Draws.checked(failure_probability, samples, seed, progress)
    require(mechanism, participation, sampling)
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


def valid_samplings(
    mechanism: Mechanism | DenseMechanism, participation: Participation
) -> dict[Sampling, str]:
    """For each sampling, why it has no valid analysis for this mechanism; "" where it has one."""
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    dense = isinstance(mechanism, DenseMechanism)
    coef = mechanism.strategy if isinstance(mechanism, DenseMechanism) else mechanism.strategy_coef
    reasons: dict[Sampling, str] = dict.fromkeys(SAMPLINGS, "")
    if float(np.min(coef)) < -_ROUNDING * float(np.max(np.abs(coef))):
        reasons["balls-in-bins"] = f"C has negative entries (down to {float(np.min(coef)):.3g})"
    elif k != -(-n // b):
        reasons["balls-in-bins"] = (
            f"every bin is used {-(-n // b)} times in {n} steps, but max_participations is {k}"
        )
    bands = n if isinstance(mechanism, DenseMechanism) else poisson.strategy_bands(mechanism)
    if dense or bands > 1:
        reasons["poisson"] = "C correlates the noise of different steps"
    if dense or bands > b:
        reasons["cyclic-poisson"] = f"C has {bands} bands, more than min_sep={b}"
    return reasons


def require(
    mechanism: Mechanism | DenseMechanism, participation: Participation, sampling: Sampling
) -> None:
    """Raise unless this sampling has a valid analysis for this mechanism."""
    checks.choice("sampling", sampling, SAMPLINGS)
    reasons = valid_samplings(mechanism, participation)
    if reasons[sampling]:
        valid = ", ".join(name for name, reason in reasons.items() if not reason)
        raise ValueError(
            f"sampling={sampling!r} cannot be priced for {mechanism!r}: {reasons[sampling]}; "
            f"valid here: {valid}"
        )


def _calibrate_bins(
    mechanism: Mechanism | DenseMechanism,
    participation: Participation,
    epsilon: float,
    delta: float,
    draws: Draws,
) -> Calibration:
    bins = _bins(mechanism, participation.min_sep)
    most = bins.longest / gaussian.mu(epsilon, delta) * (1.0 + _ROUNDING)
    search = Search(bins, delta, draws)
    low = most
    while search.promising(low, epsilon) and low > 1e-3 * most:
        low *= 0.8
    start = bisect(lambda x: search.promising(x, epsilon), low, most, SEARCH_TOLERANCE)
    sigma, found = search.confirm(start, most, lambda sigma: (sigma, epsilon))
    return _certified(mechanism, participation, bins, sigma, epsilon, delta, draws, found)


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
    plain = gaussian.epsilon(delta, bins.longest / sigma)
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
