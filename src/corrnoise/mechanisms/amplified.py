"""Band-Inv-MF with its coefficients optimised for the noise that balls-in-bins needs.

``mechanisms.band_inv_mf`` minimises sensitivity times ‖B‖, which is the error of fixed batches.
Under amplification the error is σ(C)·‖B‖ with the σ that the accountant requires, which favours a C
that decays faster. This error is minimised from several starts, in a few rounds. Each round uses
fresh draws around the C of the round before (``accounting.amplified_noise``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from corrnoise import _checks as checks
from corrnoise.accounting.amplified_noise import AmplifiedNoise
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms.amplification import AmplifiedError
from corrnoise.mechanisms.banded_inverse import band_inv_mf, repriced
from corrnoise.mechanisms.fractional import best_amplified, best_bifr
from corrnoise.mechanisms.registry import Candidate, Family, Question
from corrnoise.mechanisms.square_root import MOST_BANDS, bisr
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

_ROUNDS = 4
# For a start, the search for γ ends at a bracket of this many thousandths.
_ROUGHLY = 40
# A round with a smaller relative gain is the last one: estimates have an error of about this size.
_ENOUGH = 2e-3
# The least relative gain over all starts for which a result of the search is taken.
_CLEARLY = 1e-3
# With more bands than this, the optimum with fewer bands is one of the starts.
_FEW_BANDS = 16


def amplified_band_inv_mf(
    workload: Workload,
    participation: Participation,
    *,
    num_bands: int,
    epsilon: float,
    delta: float,
    seed: int = 0,
    descents: int = 2,
) -> ToeplitzMechanism:
    """The p-banded Toeplitz C⁻¹ with the least error under balls-in-bins, estimated from draws.

    The coefficients are chosen by estimates, so they are not certified to be the best; by an
    estimate from fresh draws they are no worse than any start. The privacy of the result does not
    depend on the estimates: ``calibrate`` certifies its noise.

    The search descends from the best of its starts. These are BISR, γ-BIFR without and with
    amplification, and Band-Inv-MF for fixed batches (with more than 16 bands, instead, the result
    for fewer bands).

    Args:
        workload: A.
        participation: n, b, k, with every bin used in every round.
        num_bands: p in [1, n], the bands of C⁻¹.
        epsilon: ε of the run.
        delta: δ of the run.
        seed: the seed of the draws.
        descents: the number of starts that the search descends from, the best ones first.

    >>> import corrnoise as cn
    >>> part, budget = cn.Participation(40, 20, 2), {"epsilon": 1, "delta": 1e-5}
    >>> A = cn.workloads.prefix_sum(40)
    >>> found = cn.mechanisms.amplified_band_inv_mf(A, part, num_bands=4, **budget)
    >>> before = cn.mechanisms.band_inv_mf(A, part, num_bands=4)
    >>> errors = [cn.calibrate(m, part, sampling="balls-in-bins", **budget).error
    ...           for m in (before, found)]
    >>> round(errors[0] / errors[1], 1)
    1.2
    """
    error = AmplifiedError.checked(workload, participation, epsilon, delta, seed)
    checks.integer("descents", descents, 1)
    # Closed forms with the same coefficients count as one start.
    starts = {m.noising_coef.tobytes(): m for m in _starts(workload, num_bands, error)}
    ranked = sorted((m for m in starts.values() if error(m) < math.inf), key=error)
    found = [each for start in ranked[:descents] for each in _descents(start, error)]
    start = error.best(starts.values())
    best = error.best([*found, start])
    # A descent also fits its own draws, which a start does not.
    chosen = best if error.fresh(best) < (1.0 - _CLEARLY) * error.fresh(start) else start
    return replace(chosen, name="band_inv_mf", optimization=None)


def _starts(
    workload: Workload, num_bands: int, error: AmplifiedError
) -> Iterator[ToeplitzMechanism]:
    """The starts: closed forms, and the optimum for fixed batches or for fewer bands."""
    part = error.participation
    yield bisr(workload, num_bands=num_bands)
    fixed, largest = best_bifr(workload, part, num_bands)
    yield fixed
    yield best_amplified(workload, num_bands, error, largest, width=_ROUGHLY)
    if num_bands <= _FEW_BANDS:
        yield band_inv_mf(workload, part, num_bands=num_bands)
        return
    small = amplified_band_inv_mf(
        workload,
        part,
        num_bands=max(_FEW_BANDS, num_bands // 4),
        epsilon=error.epsilon,
        delta=error.delta,
        seed=error.seed,
        descents=1,
    )
    (coef,) = small.noising.numerator
    wide = np.concatenate([coef, np.zeros(num_bands - coef.size)])
    yield ToeplitzMechanism("band_inv_mf", workload, Rational((wide,), ()))


def _descents(best: ToeplitzMechanism, error: AmplifiedError) -> Iterator[ToeplitzMechanism]:
    """The results of a few descents; each begins at the one before it, with fresh draws."""
    for number in range(_ROUNDS):
        noise = AmplifiedNoise(
            best.strategy_coef,
            error.participation,
            epsilon=error.epsilon,
            delta=error.delta,
            noise_multiplier=error(best) / best.decoder_rms,
            seed=error.seed + number,
        )
        found = repriced(best, error.participation, noise)
        yield found
        # The draws of ``error`` chose the best start and favour it, so others decide.
        if error.judge(found) > (1.0 - _ENOUGH) * error.judge(best):
            return
        best = found


# The numbers of bands that a planner tries; and those that it optimises under amplification, each
# with the largest n·b for which that takes seconds.
_BANDS = (2, 4, 16, MOST_BANDS)
_AMPLIFIED_BANDS = {4: 10**6, 16: 2 * 10**5}
# Up to this n·b both are tried, from two starts each; beyond it the larger one, from one start.
_SMALL = 2 * 10**4


def _sizes(question: Question) -> list[int]:
    """Sizes for a planner: amplification by bins needs C ≥ 0, which wide bands seldom have."""
    n, b = question.participation.num_steps, question.participation.min_sep
    most = n if question.amplification == "none" else max(2, b // 4)
    return [p for p in _BANDS if p <= min(most, n)]


def _amplified(question: Question) -> Iterator[Candidate]:
    """Candidates optimised for the noise that the budget needs under amplification by bins."""
    if question.amplification != "bins":
        return
    part, asked = question.participation, question.num_bands
    n, b = part.num_steps, part.min_sep
    affordable = [p for p, most in _AMPLIFIED_BANDS.items() if p <= n and n * b <= most]
    factory = amplified_band_inv_mf
    if n * b > _SMALL:
        affordable = affordable[-1:]
        factory = functools.partial(factory, descents=1)
    for size in affordable if asked is None else [asked]:
        yield Candidate.amplified(question, factory, size)


BAND_INV_MF = Family(
    name="band_inv_mf",
    label="Band-Inv-MF",
    factory=band_inv_mf,
    size="num_bands",
    usual=lambda participation: min(4, participation.num_steps),
    sizes=_sizes,
    extra=_amplified,
)
