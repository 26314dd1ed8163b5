r"""From counts of right and wrong guesses to a lower bound on ε.

A guess says "in" for the outputs in a set S. A mechanism that is (ε, δ)-DP has, for every S and in
both directions,

    P(S) ≤ e^ε Q(S) + δ,        hence    ε ≥ log((P(S) - δ)/Q(S)),

with P the law of the outputs with the example and Q without it. S must be chosen without looking at
the outputs that are counted. Then the hits of canaries that are in, and those of canaries that are
out, are independent trials, as noise and batches of different canaries are independent. Clopper and
Pearson's bounds hold for P(S) from below and for Q(S) from above, each with half of the failure
probability. Where trials have different probabilities, they bound the means of these: Hoeffding
(1956) showed that, beyond one from its mean, the tails of a sum of independent trials are no
heavier than those of a binomial of the same mean, and the inequality above holds for means too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Counts:
    """How often a guess was made.

    Attributes:
        hits: among canaries where it is right.
        trials: the canaries where it is right.
        alarms: among canaries where it is wrong.
        others: the canaries where it is wrong.
    """

    hits: int
    trials: int
    alarms: int
    others: int


def epsilon_lower_bound(counts: Counts, delta: float, confidence: float) -> float:
    """A value that ε is below with probability at most 1 - ``confidence``, at this δ.

    Never below 0: every mechanism has ε ≥ 0.

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
    """``epsilon_lower_bound`` of many counts at once."""
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
