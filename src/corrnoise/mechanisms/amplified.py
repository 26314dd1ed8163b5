"""Band-Inv-MF with its coefficients optimised for the noise that balls-in-bins needs.

``mechanisms.band_inv_mf`` minimises sensitivity times ‖B‖, which is the error of fixed batches.
Amplification favours a C that decays faster: the error is σ(C)·‖B‖ with the σ that the accountant
requires. It is minimised here from several starts, in a few rounds, each with fresh draws around
the C of the round before (``accounting.amplified_noise``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from corrnoise import _checks as checks
from corrnoise.accounting import Draws, bins, certificates
from corrnoise.accounting.amplified_noise import AmplifiedNoise
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms.banded_inverse import band_inv_mf, repriced
from corrnoise.mechanisms.registry import Candidate, Family, Question, Size
from corrnoise.mechanisms.square_root import MOST_BANDS, bands, bisr
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

_ROUNDS = 4
# A round with a smaller relative gain is the last one.
_ENOUGH = 1e-3
# The failure probability of the certificate that the noise is estimated for.
_FAILURE_PROBABILITY = 1e-9
# With more bands than this, the optimum with fewer bands is one of the starts.
_FEW_BANDS = 4


def amplified_band_inv_mf(
    workload: Workload,
    participation: Participation,
    *,
    num_bands: int,
    epsilon: float,
    delta: float,
    seed: int = 0,
) -> ToeplitzMechanism:
    """The p-banded Toeplitz C⁻¹ with the least error under balls-in-bins, estimated from draws.

    By this estimate it is never worse than BISR, one of its starts. ``calibrate`` certifies the
    noise that it needs.

    Args:
        workload: A.
        participation: n, b, k, with every bin used in every round.
        num_bands: p in [1, n], the bands of C⁻¹.
        epsilon: ε of the run.
        delta: δ of the run.
        seed: the seed of the draws.

    >>> import corrnoise as cn
    >>> part, budget = cn.Participation(80, 40, 2), {"epsilon": 1, "delta": 1e-5}
    >>> A = cn.workloads.prefix_sum(80)
    >>> found = cn.mechanisms.amplified_band_inv_mf(A, part, num_bands=4, **budget)
    >>> before = cn.mechanisms.band_inv_mf(A, part, num_bands=4)
    >>> [round(cn.calibrate(m, part, sampling="balls-in-bins", **budget).error, 1)
    ...  for m in (before, found)]
    [7.6, 6.1]
    """
    participation.check_steps(workload.num_steps, "workload")
    epsilon = checks.number("epsilon", epsilon, 0.0, open_low=True)
    descent = _Descent(participation, epsilon, checks.probability("delta", delta), seed)
    starts = [descent.valued(start) for start in descent.starts(workload, num_bands)]
    found = [descent.improved(start) for start in starts if start.error < math.inf]
    if not found:
        reason = bins.objection(starts[0].mechanism.least_entry, participation)
        if reason:
            raise ValueError(f"participation must be valid for balls-in-bins, but {reason}")
    return min(found or starts, key=lambda valued: valued.error).mechanism


@dataclass(frozen=True)
class _Valued:
    mechanism: ToeplitzMechanism
    error: float


@dataclass(frozen=True)
class _Descent:
    participation: Participation
    epsilon: float
    delta: float
    seed: int

    def starts(self, workload: Workload, num_bands: int) -> Iterator[ToeplitzMechanism]:
        """The starts: the closed form, and an optimum for fixed batches or with fewer bands."""
        yield bisr(workload, num_bands=num_bands)
        if num_bands <= _FEW_BANDS:
            yield band_inv_mf(workload, self.participation, num_bands=num_bands)
        else:
            small = amplified_band_inv_mf(
                workload,
                self.participation,
                num_bands=max(_FEW_BANDS, num_bands // 4),
                epsilon=self.epsilon,
                delta=self.delta,
                seed=self.seed,
            )
            (coef,) = small.noising.numerator
            wide = np.concatenate([coef, np.zeros(num_bands - coef.size)])
            yield ToeplitzMechanism("band_inv_mf", workload, Rational((wide,), ()))

    def valued(self, mechanism: ToeplitzMechanism) -> _Valued:
        """The mechanism with its error, which is infinite where balls-in-bins has no analysis."""
        try:
            if bins.objection(mechanism.least_entry, self.participation):
                return _Valued(mechanism, math.inf)
            noise = certificates.estimate_noise(
                mechanism.bins(self.participation.min_sep),
                self.epsilon,
                self.delta,
                Draws.checked(_FAILURE_PROBABILITY, None, self.seed, None),
            )
            return _Valued(mechanism, noise * mechanism.decoder_rms)
        except OverflowError:
            return _Valued(mechanism, math.inf)

    def improved(self, best: _Valued) -> _Valued:
        """The best mechanism that a few descents find."""
        for number in range(_ROUNDS):
            noise = AmplifiedNoise(
                best.mechanism.strategy_coef,
                self.participation,
                epsilon=self.epsilon,
                delta=self.delta,
                noise_multiplier=best.error / best.mechanism.decoder_rms,
                seed=self.seed + number,
            )
            found = self.valued(repriced(best.mechanism, self.participation, noise))
            gain = 1.0 - found.error / best.error
            best = found if gain > 0.0 else best
            if gain < _ENOUGH:
                break
        return best


# Numbers of bands that a planner tries; and those optimised under amplification, with the n·b up to
# which each takes seconds.
_BANDS = (2, 4, 16, MOST_BANDS)
_AMPLIFIED_BANDS = {4: 10**6, 16: 2 * 10**5}


def _band_inv_mf(workload: Workload, participation: Participation, size: Size) -> ToeplitzMechanism:
    return band_inv_mf(workload, participation, num_bands=bands(size, workload))


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
    for size in affordable if asked is None else [asked]:
        yield Candidate(
            size,
            lambda size=size: amplified_band_inv_mf(
                question.workload,
                part,
                num_bands=size,
                epsilon=question.epsilon,
                delta=question.delta,
            ),
            ", amplified",
        )


BAND_INV_MF = Family(
    name="band_inv_mf",
    label="Band-Inv-MF",
    factory=_band_inv_mf,
    size="num_bands",
    usual=lambda participation: min(4, participation.num_steps),
    sizes=_sizes,
    extra=_amplified,
)
