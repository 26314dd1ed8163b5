"""Band-Inv-MF with its coefficients optimised for the noise that balls-in-bins needs.

``mechanisms.band_inv_mf`` minimises sensitivity times ‖B‖, which is the error of fixed batches.
Amplification favours a C that forgets sooner: what counts is σ(C)·‖B‖ with the σ that the
accountant asks for. That is minimised here from several starts, a few times over, each time with
fresh draws around the C of the time before (``accounting.amplified_noise``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from corrnoise import checks, mechanisms
from corrnoise.accounting import estimate_noise, valid_samplings
from corrnoise.accounting.amplified_noise import AmplifiedNoise
from corrnoise.accounting.validity import require
from corrnoise.mechanisms import Mechanism
from corrnoise.mechanisms.banded_inverse import repriced
from corrnoise.participation import Participation
from corrnoise.rational import Rational
from corrnoise.workloads import Workload

_ROUNDS = 4
# A round that gains less is the last one.
_ENOUGH = 1e-3
# With more bands than this, the optimum with fewer is a start.
_FEW_BANDS = 4


def amplified_band_inv_mf(
    workload: Workload,
    participation: Participation,
    num_bands: int,
    *,
    epsilon: float,
    delta: float,
    seed: int = 0,
) -> Mechanism:
    """The p-banded Toeplitz C⁻¹ with the least error under balls-in-bins, as far as draws can tell.

    By their estimate it is never worse than BISR, one of its starts. The noise that it needs in the
    end is for ``calibrate`` to certify.

    Args:
        workload: A.
        participation: n, b, k, with every bin used in every round.
        num_bands: p in [1, n].
        epsilon: ε of the run.
        delta: its δ.
        seed: of the draws.

    >>> import corrnoise as cn
    >>> part, budget = cn.Participation(80, 40, 2), {"epsilon": 1, "delta": 1e-5}
    >>> A = cn.workloads.prefix_sum(80)
    >>> found = cn.amplified_band_inv_mf(A, part, 4, **budget)
    >>> before = cn.mechanisms.band_inv_mf(A, part, 4)
    >>> [round(cn.calibrate(m, part, sampling="balls-in-bins", **budget).rmse(), 1)
    ...  for m in (before, found)]
    [7.6, 6.1]
    """
    participation.check_steps(workload.num_steps, "workload")
    epsilon = checks.number("epsilon", epsilon, 0.0, open_low=True)
    run = _Run(participation, epsilon, checks.probability("delta", delta), seed)
    starts = [run.valued(start) for start in run.starts(workload, num_bands)]
    found = [run.improved(start) for start in starts if start.error < math.inf]
    if not found:
        require(starts[0].mechanism, participation, "balls-in-bins")  # says why
    return min(found or starts, key=lambda valued: valued.error).mechanism


@dataclass(frozen=True)
class _Valued:
    mechanism: Mechanism
    error: float


@dataclass(frozen=True)
class _Run:
    participation: Participation
    epsilon: float
    delta: float
    seed: int

    def starts(self, workload: Workload, num_bands: int) -> Iterator[Mechanism]:
        """Where to begin: the closed form, and an optimum for fixed batches or with fewer bands."""
        yield mechanisms.bisr(workload, num_bands)
        if num_bands <= _FEW_BANDS:
            yield mechanisms.band_inv_mf(workload, self.participation, num_bands)
        else:
            small = amplified_band_inv_mf(
                workload,
                self.participation,
                max(_FEW_BANDS, num_bands // 4),
                epsilon=self.epsilon,
                delta=self.delta,
                seed=self.seed,
            )
            (coef,) = small.noising.numerator
            wide = np.concatenate([coef, np.zeros(num_bands - coef.size)])
            yield Mechanism("band_inv_mf", workload, Rational((wide,), ()))

    def valued(self, mechanism: Mechanism) -> _Valued:
        """With its error; infinite where balls-in-bins has no analysis for it."""
        try:
            if valid_samplings(mechanism, self.participation)["balls-in-bins"]:
                return _Valued(mechanism, math.inf)
            noise = estimate_noise(
                mechanism,
                self.participation,
                epsilon=self.epsilon,
                delta=self.delta,
                seed=self.seed,
            )
            return _Valued(mechanism, noise * mechanism.decoder_rms)
        except OverflowError:
            return _Valued(mechanism, math.inf)

    def improved(self, best: _Valued) -> _Valued:
        """As good as a few descents make it."""
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
