"""Balls-in-bins: each example falls into one of b bins, and step i takes bin i mod b."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from corrnoise._rounding import counted
from corrnoise.accounting import Draws, Estimate, bins, certain, certificates, gaussian, roots
from corrnoise.accounting.bins import Bins
from corrnoise.bounds import lower_bound
from corrnoise.mechanisms import Mechanism
from corrnoise.mechanisms.registry import Amplification
from corrnoise.noise import Key
from corrnoise.participation import Participation
from corrnoise.samplings.batches import Batches, random_words
from corrnoise.samplings.calibration import Calibration
from corrnoise.samplings.sampling import Array, Sampling, by_batch, delta_rounded_up
from corrnoise.workloads import Workload

# With at most this many bins, certificates from draws gave less noise than every bound in all cases
# that were compared.
_FEW_BINS = 150
# The relative width of the bracket of a rough search, and its limit relative to private noise.
_ROUGH, _LEAST = 1e-2, 1e-2


@dataclass(frozen=True)
class BallsInBins(Sampling):
    r"""Balls-in-bins, certified by importance sampling (``corrnoise.accounting.balls_in_bins``).

    If a bound with no random draws (``corrnoise.accounting.certain``) is better, it is used.

    The analysis is valid for C ≥ 0 if every bin is used as often as the steps allow. The bins of
    the batches are uniform up to a statistical distance of b/2^64 for each example.

    ``least_error``: with the example the output is P = (1/b) Σ_j N(CU_j, σ²), without it
    Q = N(0, σ²). As P ≥ N(CU_j, σ²)/b, for every set S

        P(S) - e^ε Q(S) ≥ (1/b)·(N(CU_j, σ²)(S) - b·e^ε Q(S)),

    and the best S gives δ ≥ δ_Gauss(ε + log b, ‖CU_j‖/σ)/b. Hence ‖CU_j‖ ≤ μ(ε + log b, bδ)·σ for
    all j, and the error is at least L/μ(ε + log b, bδ), with L as in ``Fixed``. This holds for any
    signs of C; for bδ ≥ 1 there is no bound.
    """

    name: ClassVar[str] = "balls-in-bins"
    sentence: ClassVar[str] = (
        "balls-in-bins: each example in one random bin, the bins visited in turn"
    )
    accountant: ClassVar[str] = "importance sampling of the dominating pair of balls-in-bins"
    secret: ClassVar[bool] = True
    amplification: ClassVar[Amplification] = "bins"
    certified: ClassVar[bool] = True
    slow: ClassVar[bool] = True
    about_least_error: ClassVar[str] = (
        "With balls-in-bins the proof is loose: the best error is likely higher."
    )

    def objection(self, mechanism: Mechanism, participation: Participation) -> str:
        """C must have no negative entry, and every bin must be used in every round."""
        return bins.objection(mechanism.least_entry, participation)

    def takes_part(self, mechanism: Mechanism, participation: Participation) -> str:
        """Each example takes part in the steps of its bin, once in every epoch."""
        first = f"in a random one of the first {counted(participation.min_sep, 'step')} (b)"
        if participation.max_participations == 1:
            return first
        return f"{first} and in every b-th step after it, so {participation.most}"

    def delta(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        epsilon: float,
        num_steps: int,
    ) -> float:
        """A bound with no random draws: tight for DP-SGD, else mostly looser than draws."""
        found = _bins(mechanism, participation, num_steps)
        return certain.delta(found, noise_multiplier, epsilon)

    def epsilon(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        delta: float,
        num_steps: int,
    ) -> float:
        """The inverse of ``delta``."""
        return certain.epsilon(_bins(mechanism, participation, num_steps), noise_multiplier, delta)

    def curve(
        self, mechanism: Mechanism, participation: Participation, noise_multiplier: float
    ) -> Callable[[int, float], float]:
        """Bounds with no random draws; each search begins at the result of the one before it."""
        return certain.Curve(lambda n: _bins(mechanism, participation, n), noise_multiplier)

    def calibrate(
        self,
        mechanism: Mechanism,
        participation: Participation,
        epsilon: float,
        delta: float,
        draws: Draws,
    ) -> Calibration:
        """The least noise that draws certify, or the noise by ``delta`` if that is less."""
        means = mechanism.bins(participation.min_sep)
        sigma, found = certificates.certified_noise(means, epsilon, delta, draws)
        return self._priced(mechanism, participation, means, sigma, epsilon, delta, draws, found)

    def account(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        *,
        epsilon: float | None,
        delta: float | None,
        draws: Draws,
    ) -> Calibration:
        """The ε or the δ that draws certify, or that of ``delta`` if it is less."""
        means, sigma = mechanism.bins(participation.min_sep), noise_multiplier
        if epsilon is None:
            assert delta is not None
            epsilon, found = certificates.certified_epsilon(means, sigma, delta, draws)
        else:
            delta, found = certificates.certified_delta(means, sigma, epsilon, draws)
            delta = delta_rounded_up(delta)
        return self._priced(mechanism, participation, means, sigma, epsilon, delta, draws, found)

    def spent(self, whole: Calibration, steps_taken: int, draws: Draws) -> float:
        """The ε of the first steps, certified by separate draws, or that of ``delta``."""
        means = _bins(whole.mechanism, whole.participation, steps_taken)
        sigma, delta = whole.noise_multiplier, whole.delta
        return certificates.certified_epsilon(means, sigma, delta, draws)[0]

    def estimate(
        self,
        mechanism: Mechanism,
        participation: Participation,
        epsilon: float,
        delta: float,
        draws: Draws,
        effort: int = 1,
    ) -> float:
        """An estimate of the noise that ``calibrate`` finds, from few draws times ``effort``.

        With many bins a bound may need less noise; that noise is then found to within a percent.
        """
        means = mechanism.bins(participation.min_sep)
        found = certificates.estimate_noise(means, epsilon, delta, draws, effort=effort)
        if means.num_bins <= _FEW_BINS or means.orthogonal:
            return found
        bound = certain.at_most(means, found, epsilon, delta)
        if bound is None:
            return found
        limits = _LEAST * found, found
        return roots.least(lambda x: bound(x, epsilon), delta, limits, _ROUGH, found / 1.2)

    def least_error(
        self, workload: Workload, participation: Participation, epsilon: float, delta: float
    ) -> float | None:
        """The error that no factorization can beat; ``None`` where bδ ≥ 1."""
        b = participation.min_sep
        if b * delta >= 1.0:
            return None
        most = gaussian.mu(epsilon + math.log(b), b * delta)
        return lower_bound(workload, participation) / most

    def log_ratio(
        self,
        mechanism: Mechanism,
        participation: Participation,
        precision: Array,
        outputs: Array,
        taken: npt.NDArray[np.bool_],
        means: Array | None = None,
    ) -> Array:
        """The logarithm of the likelihood ratio's mean over the bins, as the bin is secret."""
        ratios = by_batch(participation, precision, outputs, means)
        return np.logaddexp.reduce(ratios, axis=0) - math.log(participation.min_sep)

    def batches(
        self,
        num_examples: int,
        participation: Participation,
        mechanism: Mechanism,
        key: Key,
        *,
        shuffled: bool = False,
    ) -> Batches:
        """One bin for each example, from 64 random bits per example."""
        b = participation.min_sep
        own = random_words(key, num_examples) % np.uint64(b)
        order = np.argsort(own, kind="stable")
        first = np.searchsorted(own[order], np.arange(b + 1, dtype=np.uint64))
        return Batches(
            num_examples,
            participation,
            lambda step: order[first[step % b] : first[step % b + 1]],
        )

    def _priced(
        self,
        mechanism: Mechanism,
        participation: Participation,
        means: Bins,
        sigma: float,
        epsilon: float,
        delta: float,
        draws: Draws,
        found: Estimate | None,
    ) -> Calibration:
        kind: Literal["exact", "bound", "certified"] = "certified" if found else "bound"
        if means.num_bins == 1:
            kind = "exact"
        # Verification of a plan evaluates the plan's own ε and does not search for one.
        search = found is not None and not draws.enough
        return Calibration(
            mechanism,
            participation,
            self,
            sigma,
            epsilon,
            delta,
            kind,
            draws.failure_probability if found else 0.0,
            certain.epsilon(means, sigma, delta) if search else epsilon,
            found,
        )


def _bins(mechanism: Mechanism, participation: Participation, num_steps: int) -> Bins:
    return mechanism.first(num_steps).bins(participation.min_sep)


BALLS_IN_BINS = BallsInBins()
