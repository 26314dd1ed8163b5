r"""A lower bound on ε from counts of right and wrong guesses.

A guess says "in" for the outputs in a set S. A mechanism that is (ε, δ)-DP has, for every S and in
both directions,

    P(S) ≤ e^ε Q(S) + δ,        hence    ε ≥ log((P(S) - δ)/Q(S)),

with P the law of the outputs with the example and Q without it. S must be chosen without looking at
the outputs that are counted. Then the guesses for canaries that are in, and those for canaries that
are out, are independent trials, as noise and batches of different canaries are independent.

Clopper and Pearson's method gives a lower bound of P(S) and an upper bound of Q(S), each with half
of the failure probability. If trials have different probabilities, these are bounds of their means:
Hoeffding (1956) showed that, more than one away from the mean, a sum of independent trials has no
heavier tails than a binomial with the same mean. The inequality above holds for means too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Counts:
    """How often a guess was made, among canaries where it is right and where it is wrong.

    Attributes:
        hits: how often it was made where it is right.
        trials: the number of canaries where it is right.
        alarms: how often it was made where it is wrong.
        others: the number of canaries where it is wrong.
    """

    hits: int
    trials: int
    alarms: int
    others: int


def epsilon_lower_bound(counts: Counts, delta: float, confidence: float) -> float:
    """A lower bound on ε at this δ, wrong with probability at most 1 - ``confidence``.

    It is log((p - δ)/q), at least 0, with Clopper and Pearson's lower bound p of hits/trials and
    upper bound q of alarms/others. It assumes independent trials, and guesses that were chosen
    without looking at these counts (see the module's docstring).

    >>> round(epsilon_lower_bound(Counts(900, 1000, 50, 1000), 1e-2, 0.95), 3)
    2.588
    """
    found = lower_bounds(
        np.array([counts.hits]),
        counts.trials,
        np.array([counts.alarms]),
        counts.others,
        delta,
        confidence,
    )
    return float(found[0])


def lower_bounds(
    hits: Ints, trials: int, alarms: Ints, others: int, delta: float, confidence: float
) -> Array:
    """``epsilon_lower_bound`` for many counts at once."""
    from scipy.stats import beta

    if trials == 0 or others == 0:
        return np.zeros(len(hits))
    half = (1.0 - confidence) / 2.0
    likely = np.where(hits > 0, beta.ppf(half, np.maximum(hits, 1), trials - hits + 1), 0.0)
    false = np.where(
        alarms < others, beta.ppf(1.0 - half, alarms + 1, np.maximum(others - alarms, 1)), 1.0
    )
    above = np.maximum(likely - delta, 0.0)
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(above / false), 0.0)
