"""DP-λCGD: each step cancels a fraction λ of the noise of the step before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from corrnoise import _checks as checks
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms import searching
from corrnoise.mechanisms.amplification import AmplifiedError
from corrnoise.mechanisms.registry import Candidate, Family, Question
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

_INDEPENDENT = 0.0


def lambda_cgd(
    workload: Workload,
    participation: Participation | None = None,
    *,
    rate: float | Literal["best"] = "best",
) -> ToeplitzMechanism:
    """Step i adds z_i - λ·z_{i-1}: C⁻¹ = 1 - λx and C[i, j] = λ^{i-j} (DP-λCGD).

    It was proposed by Kalinin, McKenna, Pagh and Lampert (2026, arXiv 2601.22334). Up to scale and
    sign, every C⁻¹ of two bands has this form: ``band_inv_mf`` finds the best λ for p = 2, and
    γ-BIFR with p = 2 has λ = γ(α + β). C decreases, so its sensitivity is exact.

    C is Toeplitz here, and its columns are not divided by their norms.

    Args:
        workload: A.
        participation: n, b, k; used only for the best λ.
        rate: λ in [0, 1], or "best" for the one with the least rmse, to six decimals.

    >>> import corrnoise as cn
    >>> part = cn.Participation(1024, 256, 4)
    >>> m = cn.mechanisms.lambda_cgd(cn.workloads.prefix_sum(1024), part)
    >>> round(m.rmse(part), 3), m.optimization.message, m.sensitivity(part).exact
    (9.617, 'λ = 0.956742', True)
    """
    if rate != "best":
        return _member(workload, checks.fraction("rate", rate, 'use "best" or a rate in [0, 1]'))
    if participation is None:
        raise ValueError(
            'rate="best" needs participation=, got None; '
            "pass the participation whose error is to be least, or a rate in [0, 1]"
        )
    participation.check_steps(workload.num_steps, "workload")
    return _best(workload, participation)[0]


def amplified_lambda_cgd(
    workload: Workload,
    participation: Participation,
    *,
    epsilon: float,
    delta: float,
    seed: int = 0,
) -> ToeplitzMechanism:
    """DP-λCGD with the λ that has the least error under balls-in-bins, estimated from draws.

    C⁻¹ = 1 - λx, and amplification favours a smaller λ. By an estimate from fresh draws the result
    is no worse than DP-SGD and ``lambda_cgd``. Its privacy does not depend on these estimates:
    ``calibrate`` certifies the noise that it needs.

    Args:
        workload: A.
        participation: n, b, k, with every bin used in every round.
        epsilon: ε of the run.
        delta: δ of the run.
        seed: the seed of the draws.

    >>> import corrnoise as cn
    >>> part, budget = cn.Participation(80, 40, 2), {"epsilon": 1, "delta": 1e-5}
    >>> A = cn.workloads.prefix_sum(80)
    >>> found = cn.mechanisms.amplified_lambda_cgd(A, part, **budget)
    >>> before = cn.mechanisms.lambda_cgd(A, part)
    >>> bool(before.noising_coef[1] < found.noising_coef[1] < -0.3)
    True
    """
    error = AmplifiedError.checked(workload, participation, epsilon, delta, seed)
    largest = _best(workload, participation)[1]
    return searching.least_amplified(
        lambda rate: _member(workload, rate), _INDEPENDENT, largest, error
    )


def _member(workload: Workload, rate: float) -> ToeplitzMechanism:
    return ToeplitzMechanism("lambda_cgd", workload, Rational.of(numerator=[[1.0, -rate]]))


def _best(workload: Workload, participation: Participation) -> tuple[ToeplitzMechanism, float]:
    """The DP-λCGD with the least rmse, and its λ."""
    return searching.least_certified(
        "λ", lambda rate: _member(workload, rate), _INDEPENDENT, participation
    )


def _amplified(question: Question) -> Iterator[Candidate]:
    """A candidate with the λ that is the best for the budget, if the user names this family."""
    if question.amplification != "bins" or not question.named:
        return
    yield Candidate.amplified(question, amplified_lambda_cgd)


LAMBDA_CGD = Family(
    name="lambda_cgd",
    label="DP-λCGD",
    factory=lambda_cgd,
    sizes=lambda question: [None],
    extra=_amplified,
)
