r"""γ-BIFR: the banded inverse of a fractional power of the workload.

BISR bands the inverse of A^{1/2}. Cut to few bands, it cancels too little of the noise: C decays
too fast, and B grows from step to step. γ-BIFR bands the inverse of A^γ instead,

    C⁻¹ = the first p coefficients of A(x)^{-γ} = (1 - αx)^γ (1 - βx)^γ,

with a γ above 1/2 if the bands are few. γ = 0 is DP-SGD, γ = 1/2 is BISR, and p = 2 is DP-λCGD.
The idea is that of "Beyond Square Roots" (Kalinin, Rehn, Andersson, Honkela and Lampert, 2026,
arXiv 2605.18379), whose abstract calls it a generalization of the last two; the formulas here are
derived from the idea.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise.algebra import toeplitz
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms import searching
from corrnoise.mechanisms.amplification import AmplifiedError
from corrnoise.mechanisms.registry import Candidate, Family, Question
from corrnoise.mechanisms.square_root import MOST_BANDS, bands
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]

_SQUARE_ROOT = 0.5
# The numbers of bands that a planner tries, and those that it tries if the user names this family.
_BANDS, _NAMED_BANDS = (4, 16), (2, 4, 8, 16, MOST_BANDS)
# The numbers of bands whose γ is chosen under amplification, which takes a dozen estimates.
_AMPLIFIED_BANDS = (4, 16)


def bifr(
    workload: Workload,
    participation: Participation | None = None,
    *,
    num_bands: int,
    power: float | Literal["best"] = "best",
) -> ToeplitzMechanism:
    """Banded inverse of a fractional power: the first p diagonals of C⁻¹ = A^{-γ} (γ-BIFR).

    The sensitivity is certified for every γ, and exact if C decreases. For a given γ the
    coefficients take O(p) time for an SGD workload and O(p²) for any other.

    Args:
        workload: A.
        participation: n, b, k; used only for the best γ.
        num_bands: p in [1, n], the bands of C⁻¹.
        power: γ in [0, 1], or "best" for the one with the least certified rmse, to six decimals. It
            takes about 70 evaluations of O(np), and is never worse than BISR.

    >>> import corrnoise as cn
    >>> part = cn.Participation(1024, 256, 4)
    >>> m = cn.mechanisms.bifr(cn.workloads.prefix_sum(1024), part, num_bands=4)
    >>> round(m.rmse(part), 3), m.optimization.message
    (9.265, 'γ = 0.884025')
    >>> cn.mechanisms.bifr(cn.workloads.prefix_sum(1024), num_bands=4, power=0.5).noising_coef[:5]
    array([ 1.    , -0.5   , -0.125 , -0.0625,  0.    ])
    """
    p = bands(num_bands, workload)
    if power != "best":
        gamma = checks.fraction("power", power, 'use "best" or a power in [0, 1]')
        return _member(workload, p, gamma)
    if participation is None:
        raise ValueError(
            'power="best" needs participation=, got None; '
            "pass the participation whose error is to be least, or a power in [0, 1]"
        )
    participation.check_steps(workload.num_steps, "workload")
    return best_bifr(workload, participation, p)[0]


def amplified_bifr(
    workload: Workload,
    participation: Participation,
    *,
    num_bands: int,
    epsilon: float,
    delta: float,
    seed: int = 0,
) -> ToeplitzMechanism:
    """γ-BIFR with the γ that has the least error under balls-in-bins, estimated from draws.

    C⁻¹ has the first p coefficients of A(x)^{-γ}. Amplification favours a smaller γ, which cancels
    less of the noise of earlier steps. By an estimate from fresh draws the result is no worse than
    BISR and ``bifr``. Its privacy does not depend on these estimates: ``calibrate`` certifies the
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
    >>> found = cn.mechanisms.amplified_bifr(A, part, num_bands=4, **budget)
    >>> before = cn.mechanisms.bifr(A, part, num_bands=4)
    >>> bool(before.noising_coef[1] < found.noising_coef[1] < -0.3)
    True
    """
    error = AmplifiedError.checked(workload, participation, epsilon, delta, seed)
    p = bands(num_bands, workload)
    largest = best_bifr(workload, participation, p)[1]
    return best_amplified(workload, p, error, largest)


def inverse_power_coef(workload: Workload, power: float, num_terms: int) -> Array:
    """First ``num_terms`` coefficients of A^{-γ}: a product of binomial series for SGD workloads.

    Any other workload takes O(num_terms²): y = A^{-γ} solves Ay′ = -γA′y, one x^k after the other.
    """
    if workload.decay is not None and workload.momentum is not None:
        first, second = (
            _binomial(power, rate, num_terms) for rate in (workload.decay, workload.momentum)
        )
        return toeplitz.multiply(first, second, num_terms)
    a = workload.series.coef(num_terms)
    coef = np.zeros(num_terms)
    coef[0] = a[0] ** -power
    for k in range(1, num_terms):
        j = np.arange(1, k + 1)
        weights = (j * (1.0 - power) - k) * a[1 : k + 1]
        coef[k] = toeplitz.dot(weights, coef[k - 1 :: -1][:k]) / (k * a[0])
    return coef


def _binomial(power: float, rate: float, num_terms: int) -> Array:
    """The coefficients (-1)^k·binom(γ, k)·rate^k of (1 - rate·x)^γ."""
    k = np.arange(1, num_terms)
    return np.concatenate([[1.0], np.cumprod((k - 1 - power) / k * rate)])


def _member(workload: Workload, num_bands: int, power: float) -> ToeplitzMechanism:
    coef = inverse_power_coef(workload, power, num_bands)
    return ToeplitzMechanism("bifr", workload, Rational.of(numerator=[coef]))


def best_bifr(
    workload: Workload, participation: Participation, num_bands: int
) -> tuple[ToeplitzMechanism, float]:
    """The γ-BIFR with the least certified rmse, and its γ."""
    return searching.least_certified(
        "γ", lambda gamma: _member(workload, num_bands, gamma), _SQUARE_ROOT, participation
    )


def best_amplified(
    workload: Workload,
    num_bands: int,
    error: AmplifiedError,
    largest: float,
    width: int = searching.AMPLIFIED_WIDTH,
) -> ToeplitzMechanism:
    """The γ-BIFR with the least estimated error under amplification.

    ``largest`` is the best γ without amplification. The search for γ ends at a bracket of
    ``width`` thousandths of it.
    """
    return searching.least_amplified(
        lambda gamma: _member(workload, num_bands, gamma), _SQUARE_ROOT, largest, error, width
    )


def _sizes(question: Question) -> list[int]:
    tried = _NAMED_BANDS if question.named else _BANDS
    return [p for p in tried if p <= question.workload.num_steps]


def _amplified(question: Question) -> Iterator[Candidate]:
    """Candidates with the γ that is the best for the budget, if the user names this family.

    Otherwise they are only starts of Band-Inv-MF under amplification.
    """
    if question.amplification != "bins" or not question.named:
        return
    asked, n = question.num_bands, question.workload.num_steps
    for size in [p for p in _AMPLIFIED_BANDS if p <= n] if asked is None else [asked]:
        yield Candidate.amplified(question, amplified_bifr, size)


BIFR = Family(
    name="bifr",
    label="γ-BIFR",
    factory=bifr,
    size="num_bands",
    usual=lambda participation: min(4, participation.num_steps),
    sizes=_sizes,
    extra=_amplified,
)
