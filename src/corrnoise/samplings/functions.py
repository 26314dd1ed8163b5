"""``calibrate`` and ``account``: the noise for a budget, and the ε or δ of a noise."""

from __future__ import annotations

from corrnoise import _checks as checks
from corrnoise._progress import Progress
from corrnoise._rounding import rounded_up
from corrnoise._threads import one_blas_thread
from corrnoise.accounting import Draws
from corrnoise.mechanisms import Mechanism
from corrnoise.participation import Participation
from corrnoise.samplings.calibration import Calibration
from corrnoise.samplings.sampling import Sampling, get, require

# The default of ``calibrate`` and ``account``: its batches need not be secret.
ASSUMED = "fixed"
# The default of a run with a named mechanism, which draws its batches itself and keeps them secret.
DRAWN = "balls-in-bins"
# The default of a planner: the best of all samplings.
BEST = "best"
# The largest μ (sensitivity over noise) that is accepted; its ε is about 5e11.
_MOST_MU = 1e6


def check_noise(
    mechanism: Mechanism, participation: Participation, noise_multiplier: object
) -> float:
    """Return the noise multiplier as a float, or raise if it is too small to compute an ε."""
    sigma = checks.number("noise_multiplier", noise_multiplier, 0.0, open_low=True)
    least = mechanism.sensitivity(participation).value / _MOST_MU
    if sigma < least:
        raise ValueError(
            f"noise_multiplier must be at least {rounded_up(least, 3)} here, got {sigma:g}, whose "
            "ε would be beyond 1e11: it protects nothing, and cannot be priced; use more noise"
        )
    return sigma


@one_blas_thread()
def calibrate(
    mechanism: Mechanism,
    participation: Participation,
    *,
    epsilon: float,
    delta: float,
    sampling: str | Sampling = ASSUMED,
    failure_probability: float = 1e-9,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Calibration:
    """The least noise with which a run is (ε, δ)-DP: the result never exceeds ε or δ.

    ``kind`` of the result says whether its ε is exact, a proven bound or certified. Exact values
    and bounds take milliseconds, certificates seconds.

    Args:
        mechanism: the factorization.
        participation: n, b, k.
        epsilon: ε > 0.
        delta: δ in (0, 1).
        sampling: "fixed" (any order with separation b; exact), "balls-in-bins" (certified by
            draws), "poisson", "cyclic-poisson" or "random-allocation" (bounds with no draws, from
            privacy loss distributions); or a ``Sampling``.
        failure_probability: the largest probability with which a certificate may be wrong.
        samples: the number of draws of a certificate; chosen from b by default.
        seed: the seed of the draws; the same seed gives the same result.
        progress: True for a bar on the terminal, or a function that is called with (draws done,
            total draws) during a certificate.

    >>> import corrnoise as cn
    >>> part = cn.Participation(980, 98, 10)
    >>> m = cn.mechanisms.bisr(cn.workloads.sgd(980, momentum=0.9, decay=0.9999), num_bands=4)
    >>> cn.calibrate(m, part, epsilon=9, delta=1e-5)
    Calibration(noise_multiplier=5.6835, epsilon=9, delta=1e-05, sampling='fixed', exact)
    """
    epsilon = checks.number("epsilon", epsilon, 0.0, open_low=True)
    delta = checks.probability("delta", delta)
    draws = Draws.checked(failure_probability, samples, seed, progress)
    how = get(sampling)
    require(how, mechanism, participation)
    return how.calibrate(mechanism, participation, epsilon, delta, draws)


@one_blas_thread()
def account(
    mechanism: Mechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    delta: float | None = None,
    epsilon: float | None = None,
    sampling: str | Sampling = ASSUMED,
    failure_probability: float = 1e-9,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Calibration:
    """The ε of a run with this noise at a given δ, or its δ at a given ε.

    Exactly one of ``delta`` and ``epsilon`` must be given. The result is exact, a proven bound or
    certified (``kind``), rounded up. It is the inverse of ``calibrate``, whose other arguments it
    has.

    >>> import corrnoise as cn
    >>> part = cn.Participation(980, 98, 10)
    >>> m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(980))
    >>> round(cn.account(m, part, noise_multiplier=1.7227, delta=1e-5).epsilon, 3)
    9.0
    """
    sigma = check_noise(mechanism, participation, noise_multiplier)
    draws = Draws.checked(failure_probability, samples, seed, progress)
    how = get(sampling)
    require(how, mechanism, participation)
    if (delta is None) == (epsilon is None):
        raise ValueError(
            f"exactly one of delta and epsilon must be given, got delta={delta!r} and "
            f"epsilon={epsilon!r}; the other is computed"
        )
    if epsilon is not None:
        epsilon = checks.number("epsilon", epsilon, 0.0)
    else:
        delta = checks.probability("delta", delta)
    return how.account(mechanism, participation, sigma, epsilon=epsilon, delta=delta, draws=draws)
