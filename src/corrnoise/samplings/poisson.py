r"""Poisson batches, and cyclic Poisson batches for banded strategies.

*Cyclic Poisson* with a p-banded C: every example belongs to one of p groups, drawn in advance. Step
i takes each example of group i mod p independently with probability q. Then the columns of C for
one example never overlap, and the run is as private as ⌈n/p⌉ steps of DP-SGD with Poisson sampling
at rate q and noise multiplier σ/‖c‖₂ (Choquette-Choo et al., 2023, the analysis of amplified
Band-MF). For an expected batch of N/b examples, q = p/b. *Poisson* is the case p = 1: C = I and
q = 1/b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from corrnoise import _extras
from corrnoise._rounding import counted
from corrnoise.accounting import composed, poisson
from corrnoise.mechanisms import Mechanism
from corrnoise.mechanisms.registry import Amplification
from corrnoise.noise import Key
from corrnoise.participation import Participation
from corrnoise.samplings.batches import Batches, Indices, random_words
from corrnoise.samplings.calibration import Calibration
from corrnoise.samplings.sampling import Array, Sampling, by_step, require


@dataclass(frozen=True)
class CyclicPoisson(Sampling):
    """Cyclic Poisson batches, priced by composing their steps (``corrnoise.accounting.poisson``).

    ε is a proven bound, tight up to the grids of the accountant. The sampling probability of the
    batches is rounded down to a multiple of 2^-64; a smaller probability is never less private. A
    batch takes O(num_examples).
    """

    name: ClassVar[str] = "cyclic-poisson"
    sentence: ClassVar[str] = (
        "cyclic Poisson: each example in one of p groups, the groups visited in turn, each example "
        "of a group with probability p/b"
    )
    accountant: ClassVar[str] = "composition of dominating pairs of Poisson-sampled steps"
    secret: ClassVar[bool] = True
    amplification: ClassVar[Amplification] = "bands"

    def objection(self, mechanism: Mechanism, participation: Participation) -> str:
        """C must be a Toeplitz matrix of at most b bands."""
        b = participation.min_sep
        if not mechanism.toeplitz:
            return "C is not a Toeplitz matrix"
        if mechanism.strategy_bands > b:
            return f"C has {mechanism.strategy_bands} bands, more than min_sep={b}"
        return ""

    def takes_part(self, mechanism: Mechanism, participation: Participation) -> str:
        """Each example may take part in the steps of its group, p apart, by independent draws."""
        b, p = participation.min_sep, mechanism.strategy_bands
        first, most = counted(p, "step"), counted(-(-participation.num_steps // p), "time")
        return (
            f"in every p-th step from a random one of the first {first} (p) on, each time with "
            f"probability {p}/{b} (p/b), so at most {most}"
        )

    def delta(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        epsilon: float,
        num_steps: int,
    ) -> float:
        """An upper bound of δ(ε), tight up to the grids of the accountant."""
        q, sigma, count = _steps(mechanism, participation, noise_multiplier, num_steps)
        return poisson.delta_bound(q, sigma, count, epsilon)

    def _near(
        self, mechanism: Mechanism, participation: Participation, epsilon: float, delta: float
    ) -> float:
        q, sigma, count = _steps(mechanism, participation, 1.0, participation.num_steps)
        return composed.central_limit(q, count, epsilon, delta) / sigma

    def event(self, calibration: Calibration) -> Any:
        """The run as composed Poisson-sampled Gaussian events."""
        library = _extras.load("dp_accounting")
        part = calibration.participation
        q, sigma, count = _steps(
            calibration.mechanism, part, calibration.noise_multiplier, part.num_steps
        )
        step = library.PoissonSampledDpEvent(
            sampling_probability=q, event=library.GaussianDpEvent(sigma)
        )
        return library.SelfComposedDpEvent(step, count)

    def log_ratio(
        self,
        mechanism: Mechanism,
        participation: Participation,
        precision: Array,
        outputs: Array,
        taken: npt.NDArray[np.bool_],
        means: Array | None = None,
    ) -> Array:
        """The mean of the likelihood ratio over the groups, with independent steps in each.

        Columns of C of one group do not overlap, so that their steps are independent given the
        group.
        """
        b, p = participation.min_sep, mechanism.strategy_bands
        q, n = p / b, participation.num_steps
        steps = by_step(precision, outputs)
        if q < 1.0:
            steps = np.logaddexp(math.log1p(-q), math.log(q) + steps)
        groups = np.stack([steps[group:n:p].sum(axis=0) for group in range(p)])
        return np.logaddexp.reduce(groups, axis=0) - math.log(p)

    def batches(
        self,
        num_examples: int,
        participation: Participation,
        mechanism: Mechanism,
        key: Key,
        *,
        shuffled: bool = False,
    ) -> Batches:
        """One group for each example, drawn once, and one draw for each example and step."""
        b, p = participation.min_sep, mechanism.strategy_bands
        require(self, mechanism, participation)
        group = random_words(key, num_examples) % np.uint64(p) if p > 1 else None

        def choose(step: int) -> Indices:
            # The probability p/b is rounded down to a multiple of 2^-64; 1 takes every example.
            words = random_words(key, num_examples, step)
            taken = np.ones(words.size, bool)
            if p < b:
                taken = words < np.uint64((p << 64) // b)
            if group is not None:
                taken &= group == np.uint64(step % p)
            return np.flatnonzero(taken)

        return Batches(num_examples, participation, choose)


@dataclass(frozen=True)
class Poisson(CyclicPoisson):
    """Poisson batches: a step takes each example with probability 1/b; for independent noise."""

    name: ClassVar[str] = "poisson"
    sentence: ClassVar[str] = "Poisson: each example in each step with probability 1/b"
    amplification: ClassVar[Amplification] = "independent"

    def objection(self, mechanism: Mechanism, participation: Participation) -> str:
        """C must be a multiple of the identity."""
        if not mechanism.toeplitz or mechanism.strategy_bands > 1:
            return "C correlates the noise of different steps"
        return ""

    def takes_part(self, mechanism: Mechanism, participation: Participation) -> str:
        """Each example may take part in any step, by independent draws."""
        return f"in each step with probability 1/{participation.min_sep} (1/b), any number of times"


def _steps(
    mechanism: Mechanism, participation: Participation, noise_multiplier: float, num_steps: int
) -> tuple[float, float, int]:
    """The q, σ and number of steps of the equivalent DP-SGD run with Poisson sampling."""
    p, b = mechanism.strategy_bands, participation.min_sep
    return p / b, noise_multiplier / mechanism.column_norm, -(-num_steps // p)


POISSON = Poisson()
CYCLIC_POISSON = CyclicPoisson()
