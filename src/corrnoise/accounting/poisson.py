r"""Poisson and cyclic Poisson sampling, priced by Google's ``dp_accounting`` (its PLD accountant).

*Cyclic Poisson* with a p-banded C: every example belongs to one of p groups, drawn in advance;
step i takes each example of group i mod p independently with probability q. Then one example's
columns of C never overlap, and the run is as private as ⌈n/p⌉ steps of DP-SGD with Poisson sampling
at rate q and noise multiplier σ/‖c‖₂ (Choquette-Choo et al., 2023, the analysis of amplified
Band-MF). An expected batch of N/b examples means q = p/b. *Poisson* is p = 1: C = I and q = 1/b.

The PLD accountant rounds losses up: what it says is an upper bound, with no sampling.
"""

from __future__ import annotations

from typing import Any

from corrnoise.mechanisms import Mechanism
from corrnoise.participation import Participation

# Coarser than the library's default, and faster for it. Its rounding stays pessimistic, and
# connecting the dots keeps the loss small.
_INTERVAL = 1e-3


def strategy_bands(mechanism: Mechanism) -> int:
    """The number of bands of C: n where C⁻¹ is the banded one."""
    noising = mechanism.noising
    return mechanism.num_steps if noising.numerator_terms > 1 else noising.denominator_terms


def event(
    mechanism: Mechanism,
    participation: Participation,
    sigma: float,
    steps_taken: int | None = None,
) -> Any:
    """The run, or its first steps, as a ``dp_accounting`` event, to compose with others."""
    import dp_accounting

    p, b = strategy_bands(mechanism), participation.min_sep
    norm = float((mechanism.strategy_coef[:p] ** 2).sum()) ** 0.5
    step = dp_accounting.PoissonSampledDpEvent(
        sampling_probability=p / b, event=dp_accounting.GaussianDpEvent(sigma / norm)
    )
    steps = participation.num_steps if steps_taken is None else steps_taken
    return dp_accounting.SelfComposedDpEvent(step, -(-steps // p))


def delta(
    mechanism: Mechanism, participation: Participation, sigma: float, epsilon: float
) -> float:
    """An upper bound of δ(ε)."""
    return float(_account(event(mechanism, participation, sigma)).get_delta(epsilon))


def epsilon(
    mechanism: Mechanism,
    participation: Participation,
    sigma: float,
    delta: float,
    steps_taken: int | None = None,
) -> float:
    """An upper bound of ε(δ), of the run or of its first steps."""
    happened = event(mechanism, participation, sigma, steps_taken)
    return float(_account(happened).get_epsilon(delta))


def _account(happened: Any) -> Any:
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(value_discretization_interval=_INTERVAL).compose(happened)
