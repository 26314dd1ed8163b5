r"""A lower bound on ε from the outputs of a run with canaries.

A canary is an example whose gradient is one direction of its own, clipped to norm 1 (in units of
the clip norm). In that direction a run releases a vector x of n numbers. If the canary is out,
x = σC⁻¹z, with covariance Σ = σ²C⁻¹C⁻ᵀ; if it is in, x = π + σC⁻¹z, where π has a one at every step
that takes the canary. For one π the logarithm of the likelihood ratio is πᵀΣ⁻¹x - πᵀΣ⁻¹π/2, and a
sampling averages the ratio over the π that it may draw (``Sampling.log_ratio``). By the lemma of
Neyman and Pearson no guess is better than a threshold on this ratio, so for a correct engine it is
the best statistic.

A faulty engine may release something else. So the canaries are divided at random:

* A tenth of them is used to *fit* what the engine does: the covariance of x for canaries that are
  out, and the mean of x for those that are in, for each batch of the first epoch.
* A fifth of them is used to *choose* a statistic, a guess and a threshold. The statistics are the
  likelihood ratio of the claimed engine, that of the fitted engine, and the largest entry of Cx,
  which finds truncated noise. The last two are taken only if they promise a clearly larger bound.
* The others are counted, once. The fit and the choice do not depend on them.

The confidence of the bound holds for every engine whose outputs in different directions are
independent, as those of a correct engine are. So a bound above the claim refutes, at this
confidence, that the engine is correct.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise.auditing.audit import Audit
from corrnoise.auditing.bounds import Counts, epsilon_lower_bound, lower_bounds
from corrnoise.samplings import Calibration

Array = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]
Score = Callable[[npt.NDArray[np.int64]], Array]

_FIT, _CHOOSE = 0.1, 0.2
# How many thresholds are tried for each statistic and guess.
_THRESHOLDS = 400
# A further statistic is taken only if it promises a bound that is larger by this.
_MARGIN = 0.1
# A fitted mean replaces the expected one if it differs by this many standard errors.
_DEVIATION = 5.0
# A fit needs at least this many canaries for each step.
_CANARIES_PER_STEP = 10
# The least variance of a fit, relative to the largest; it matters for noise that repeats itself.
_LEAST_VARIANCE = 1e-6


@dataclass(frozen=True)
class Canaries:
    """The outputs of a run with m canaries over n steps.

    Attributes:
        outputs: the released value of each step in the direction of each canary, n × m, in units
            of the clip norm and before any division.
        taken: whether the step's batch has the canary, n × m, be the canary in or out.
        present: whether the canary is in, length m, from independent fair coins.
    """

    outputs: npt.NDArray[np.float32]
    taken: Truths
    present: Truths

    def __post_init__(self) -> None:
        shape = self.outputs.shape
        if self.taken.shape != shape or self.present.shape != shape[1:]:
            raise ValueError(
                f"outputs and taken must be n × m and present m, got {shape}, {self.taken.shape} "
                f"and {self.present.shape}"
            )


def judge(
    calibration: Calibration,
    canaries: Canaries,
    *,
    claim: float | None = None,
    delta: float | None = None,
    confidence: float = 0.999,
    seed: int = 0,
) -> Audit:
    """A lower bound on the ε of an engine, from the outputs of canaries, beside the claim.

    The bound is at most the engine's true ε with probability at least ``confidence``, if outputs in
    different directions are independent. ``PrivacyEngine.audit`` runs the canaries and calls this.

    Args:
        calibration: the claim: mechanism, noise, sampling, ε and δ.
        canaries: the outputs of the run.
        claim: the ε claimed at ``delta``; the calibration's own by default.
        delta: δ of claim and bound; the calibration's by default.
        confidence: the probability that the bound is at most the engine's ε.
        seed: the seed of the division of the canaries into three parts.

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(10))
    >>> c = cn.calibrate(m, cn.Participation(10, 10, 1), epsilon=1, delta=0.01)
    >>> random = np.random.default_rng(0)  # simulates an engine that is correct
    >>> present, taken = random.random(20_000) < 0.5, np.zeros((10, 20_000), bool)
    >>> taken[0] = True
    >>> noise = c.noise_multiplier * random.standard_normal(taken.shape)
    >>> found = judge(c, Canaries(noise + taken * present, taken, present))
    >>> round(found.lower_bound, 1), found.claim, found.violated
    (0.6, 1.0, False)
    """
    confidence = checks.probability("confidence", confidence)
    delta = calibration.delta if delta is None else checks.probability("delta", delta)
    m = canaries.outputs.shape[1]
    order = np.random.default_rng(seed).permutation(m)
    fit, choose, count = np.split(order, [int(_FIT * m), int((_FIT + _CHOOSE) * m)])
    present = canaries.present
    best: tuple[float, str, Score, Literal["in", "out"], float] | None = None
    size = int(np.count_nonzero(present[count])), int(np.count_nonzero(~present[count]))
    for name, score in _statistics(calibration, canaries, fit):
        values = score(choose)
        for guess in ("in", "out"):
            found, threshold = _threshold(values, present[choose], guess, size, delta, confidence)
            if best is None or found > best[0] + (_MARGIN if best[1] != name else 0.0):
                best = (found, name, score, guess, threshold)
    assert best is not None
    _, name, score, guess, threshold = best
    counts = _counts(score(count), present[count], guess, threshold)
    return Audit(
        claim=calibration.epsilon if claim is None else claim,
        lower_bound=epsilon_lower_bound(counts, delta, confidence),
        delta=delta,
        confidence=confidence,
        num_canaries=m,
        statistic=name,
        guess=guess,
        counts=counts,
        mechanism=repr(calibration.mechanism),
        sampling=calibration.sampling.name,
        num_steps=calibration.participation.num_steps,
        noise_multiplier=calibration.noise_multiplier,
    )


def _statistics(
    calibration: Calibration, canaries: Canaries, fit: npt.NDArray[np.int64]
) -> list[tuple[str, Score]]:
    """The statistics by name, each a function of the indices of canaries."""
    c = calibration
    n, sigma = c.participation.num_steps, c.noise_multiplier
    # C/σ whitens the noise
    white = np.linalg.inv(c.mechanism.noising_matrix(n)) / sigma

    def ratio(precision: Array, means: Array | None) -> Score:
        def score(chosen: npt.NDArray[np.int64]) -> Array:
            parts = np.array_split(chosen, 1 + len(chosen) // 20_000)
            return np.concatenate(
                [
                    c.sampling.log_ratio(
                        c.mechanism,
                        c.participation,
                        precision,
                        canaries.outputs[:, part].astype(np.float64),
                        canaries.taken[:, part],
                        means,
                    )
                    for part in parts
                ]
            )

        return score

    def largest(chosen: npt.NDArray[np.int64]) -> Array:
        return np.max(white @ canaries.outputs[:, chosen], axis=0)

    found: list[tuple[str, Score]] = [
        ("the likelihood ratio as claimed", ratio(white.T @ white, None)),
        ("the largest step", largest),
    ]
    out = fit[~canaries.present[fit]]
    if len(out) >= _CANARIES_PER_STEP * n:
        x = canaries.outputs[:, out].astype(np.float64)
        values, vectors = np.linalg.eigh(x @ x.T / len(out))
        values = np.maximum(values, _LEAST_VARIANCE * values[-1])
        precision = (vectors / values) @ vectors.T
        spread = np.sqrt(np.mean(x * x, axis=1))
        means = _means(c.participation.min_sep, canaries, fit[canaries.present[fit]], spread)
        found.append(("the likelihood ratio as fitted", ratio(precision, means)))
    return found


def _means(
    num_bins: int, canaries: Canaries, chosen: npt.NDArray[np.int64], spread: Array
) -> Array:
    """The mean outputs of canaries that are in, by the batch of the first epoch that has them.

    Entries have the expected values 0 and 1, unless the outputs clearly differ from them.
    """
    n = len(spread)
    steps = np.arange(n)
    means = (steps[None, :] % num_bins == np.arange(num_bins)[:, None]).astype(np.float64)
    first = first_taken(canaries.taken[:, chosen], num_bins)
    for j in range(num_bins):
        own = chosen[first == j]
        if len(own) < _CANARIES_PER_STEP:
            continue
        found = np.mean(canaries.outputs[:, own], axis=1)
        far = np.abs(found - means[j]) > _DEVIATION * spread / np.sqrt(len(own))
        means[j, far] = found[far]
    return means


def first_taken(taken: Truths, num_bins: int) -> npt.NDArray[np.int64]:
    """For each canary, the step of the first epoch whose batch has it; -1 if none has it."""
    head = taken[:num_bins]
    return np.where(head.any(axis=0), np.argmax(head, axis=0), -1)


def _threshold(
    values: Array,
    present: Truths,
    guess: Literal["in", "out"],
    size: tuple[int, int],
    delta: float,
    confidence: float,
) -> tuple[float, float]:
    """The largest expected bound for the number of canaries to be counted, and its threshold."""
    signed, right = (values, present) if guess == "in" else (-values, ~present)
    trials, others = size if guess == "in" else size[::-1]
    quantiles = 1.0 - np.geomspace(1.0 / len(values), 0.999, _THRESHOLDS)
    candidates = np.unique(np.quantile(signed, quantiles))
    hits = _above(signed[right], candidates) / max(np.count_nonzero(right), 1)
    # One more alarm, since no alarms among these canaries may have been luck.
    alarms = (_above(signed[~right], candidates) + 1) / (np.count_nonzero(~right) + 1)
    found = lower_bounds(
        np.floor(hits * trials).astype(np.int64),
        trials,
        np.ceil(alarms * others).astype(np.int64),
        others,
        delta,
        confidence,
    )
    best = int(np.argmax(found))
    return float(found[best]), float(candidates[best])


def _above(values: Array, thresholds: Array) -> npt.NDArray[np.int64]:
    return len(values) - np.searchsorted(np.sort(values), thresholds, side="right")


def _counts(
    values: Array, present: Truths, guess: Literal["in", "out"], threshold: float
) -> Counts:
    signed, right = (values, present) if guess == "in" else (-values, ~present)
    guessed = signed > threshold
    return Counts(
        hits=int(np.count_nonzero(guessed & right)),
        trials=int(np.count_nonzero(right)),
        alarms=int(np.count_nonzero(guessed & ~right)),
        others=int(np.count_nonzero(~right)),
    )
