"""Verification of plans: δ is computed again from the noise, and compared with the statement.

A plan that was read from a file is a claim. ``verify`` computes δ(ε) from mechanism, participation,
sampling and noise multiplier, and refuses a plan that states less:

* *Exact values and bounds* are computed again by the sampling, with no random draws.
* *Certificates* are repeated: the plan records the seed, the number of draws and the part of the
  failure probability that its certificate had. The same draws give the same upper bound of δ up to
  rounding, and it must be at most δ.

A record cannot show how many seeds its author tried: for someone who tries m seeds and keeps the
best one, the failure probability is m times that of the certificate.
"""

from __future__ import annotations

import math
import weakref

import numpy as np

from corrnoise import _progress
from corrnoise._progress import Progress
from corrnoise._threads import one_blas_thread
from corrnoise.accounting import Draws, Estimate, gaussian
from corrnoise.accounting.draws import NO_ATTEMPT
from corrnoise.planning.plans import Plan
from corrnoise.samplings import Calibration, require

# The relative difference that rounding may make between two computations of the same number.
_ROUNDING = 1e-9
# The relative excess of δ beyond which ε is a bound, and not the exact cost.
_EXACT = 1e-6
_AGAIN = "make a new plan with corrnoise.plan, or price this noise with corrnoise.account"
# The failure probability, number of draws and seed of a computation without draws.
_UNRECORDED = (1e-9, 1_000, 0)
# A cache of the verified plans of this process, by identity.
_VERIFIED: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


@one_blas_thread()
def verify(plan: Plan, progress: Progress | bool | None = None) -> None:
    """Raise unless the plan guarantees what it states; see ``Plan.verified``."""
    if _VERIFIED.get(id(plan)) is plan:
        return
    stated = plan.calibration
    require(stated.sampling, stated.mechanism, stated.participation)
    with np.errstate(all="ignore"):
        try:
            _check_first_step(stated)
            _check_failure_probability(plan)
            found = _priced_again(stated, _progress.resolve(progress))
            _check_delta(stated, found.delta)
            _check_kind(stated, found)
            _check_certificate(stated, found)
            _check_certain_epsilon(stated)
        except ArithmeticError as problem:
            raise ValueError(
                f"noise_multiplier must be one that can be priced, got "
                f"{stated.noise_multiplier:g}: {problem}; {_AGAIN}"
            ) from None
    trust(plan)


def trust(plan: Plan) -> None:
    """Record that a plan is verified: by ``verify``, or because this process computed its noise."""
    _VERIFIED[id(plan)] = plan


def _check_first_step(stated: Calibration) -> None:
    """Refuse noise that is far too small quickly, before allocating memory for the full check.

    The output of the first step is N(C_00, σ²) if it takes the example and N(0, σ²) otherwise. If
    it takes the example with probability q, then δ(ε) ≥ q·δ_Gauss(ε - log q, C_00/σ), for every
    sampling. Here q is the expected fraction of the dataset in a batch, which some example's
    probability reaches.
    """
    q = float(stated.sampling.rate(stated.participation))
    diagonal = 1.0 / abs(float(stated.mechanism.noising_row(0)[-1]))
    mu = min(diagonal / stated.noise_multiplier, 1e6)
    _check_delta(stated, q * gaussian.delta(stated.epsilon - math.log(q), mu))


def _priced_again(stated: Calibration, progress: Progress | None) -> Calibration:
    """The δ of the stated noise at the stated ε; the stated δ may stand for a smaller one."""
    recorded = stated.estimate
    if recorded is None:
        draws = Draws(*_UNRECORDED, None, NO_ATTEMPT, stated.delta)
    else:
        draws = Draws.repeating(recorded, stated.delta, progress)
    return stated.sampling.account(
        stated.mechanism,
        stated.participation,
        stated.noise_multiplier,
        epsilon=stated.epsilon,
        delta=None,
        draws=draws,
    )


def _check_delta(stated: Calibration, delta: float) -> None:
    if not delta <= stated.delta * (1.0 + _ROUNDING):
        raise ValueError(
            f"epsilon must be what noise_multiplier={stated.noise_multiplier:.6g} gives at delta="
            f"{stated.delta:.6g}, or more, got {stated.epsilon:.6g}, where the noise gives delta="
            f"{delta:.6g}; {_AGAIN}"
        )


def _check_kind(stated: Calibration, found: Calibration) -> None:
    """Refuse a kind that was not shown; an exact ε may be stated as a bound."""
    if stated.kind != found.kind and (stated.kind, found.kind) != ("bound", "exact"):
        raise ValueError(f"kind must be {found.kind!r} here, got {stated.kind!r}; {_AGAIN}")
    loose = found.delta < stated.delta * (1.0 - _EXACT) and stated.epsilon > 0.0
    if stated.kind == "exact" and loose:
        raise ValueError(
            f"kind must be 'bound' here, got 'exact': at epsilon={stated.epsilon:.6g} the noise "
            f"gives delta={found.delta:.6g}, less than {stated.delta:.6g}; {_AGAIN}"
        )


def _check_certificate(stated: Calibration, found: Calibration) -> None:
    """Refuse a recorded estimate that differs from the one that its draws give."""
    recorded, drawn = stated.estimate, found.estimate
    if recorded is not None and drawn is not None and not _same(recorded, drawn):
        raise ValueError(
            f"estimate must be what its seed={recorded.seed} gives, got a bound of delta of "
            f"{recorded.upper:.9g} where these draws give {drawn.upper:.9g}; the plan was changed, "
            f"or made by another version of NumPy or corrnoise: {_AGAIN}"
        )


def _check_failure_probability(plan: Plan) -> None:
    """Refuse a stated failure probability below that of the certificate."""
    stated, recorded = plan.calibration, plan.calibration.estimate
    if recorded is None:
        return
    # A planner keeps the best of several certificates, so their failure probabilities add up.
    rivals = sum(alternative.kind == "certified" for alternative in plan.alternatives)
    least = recorded.whole_failure_probability * max(rivals, 1)
    if stated.failure_probability < least * (1.0 - _ROUNDING):
        raise ValueError(
            f"failure_probability must be at least the certificate's {least:.6g}, got "
            f"{stated.failure_probability:.6g}; {_AGAIN}"
        )


def _check_certain_epsilon(stated: Calibration) -> None:
    """Refuse an ``epsilon_without_sampling`` that is smaller than the noise gives."""
    claimed = stated.epsilon_without_sampling
    if claimed is None or (stated.estimate is None and claimed >= stated.epsilon):
        return
    part = stated.participation
    delta = stated.sampling.delta(
        stated.mechanism, part, stated.noise_multiplier, claimed, part.num_steps
    )
    if not delta <= stated.delta * (1.0 + _ROUNDING):
        rule = "more, to hold at this noise with certainty"
        if stated.estimate is None:
            rule = f"at least {stated.epsilon:.6g} at this noise"
        raise ValueError(
            f"epsilon_without_sampling must be {rule}, got {claimed:.6g}, where the bound of delta "
            f"is {delta:.6g}; {_AGAIN}"
        )


def _same(recorded: Estimate, drawn: Estimate) -> bool:
    """Whether two estimates are the same up to rounding."""
    scale = _ROUNDING * drawn.upper
    return (recorded.direction, recorded.samples) == (drawn.direction, drawn.samples) and all(
        abs(a - b) <= scale
        for a, b in (
            (recorded.mean, drawn.mean),
            (recorded.standard_error, drawn.standard_error),
            (recorded.upper, drawn.upper),
        )
    )
