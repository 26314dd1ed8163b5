"""An estimate of the error of a mechanism under balls-in-bins, from few draws, for searches."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from corrnoise import _checks as checks
from corrnoise.accounting import Draws, bins, certificates
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

# The failure probability of the certificate that the noise is estimated for.
_FAILURE_PROBABILITY = 1e-9
# The draws of an estimate; its standard error is about half a percent.
_DRAWS = 4_000
# Mechanisms within this factor of the best estimate are estimated again, with this many times the
# draws.
_CLOSE, _MORE = 1.02, 4
# Added to the seed, for draws that no search uses, and for draws that decide when a search ends.
_FRESH, _JUDGE = 101, 102


@dataclass(frozen=True)
class AmplifiedError:
    """σ·‖B‖_F/√n at the σ that a certificate of balls-in-bins is likely to need: an estimate.

    It ranks mechanisms and certifies nothing. It is wrong by a fraction of a percent with many
    bins, and by a few percent with few bins.

    Attributes:
        participation: n, b, k, with every bin used in every round.
        epsilon: ε of the run.
        delta: δ of the run.
        seed: the seed of the draws.
        samples: the number of draws.
    """

    participation: Participation
    epsilon: float
    delta: float
    seed: int
    samples: int = _DRAWS
    _known: dict[bytes, float] = field(
        default_factory=dict[bytes, float], compare=False, repr=False
    )
    # The noise of the last estimate over the longest mean; it is the guess for the next estimate.
    _last: list[float] = field(default_factory=list[float], compare=False, repr=False)

    @staticmethod
    def checked(
        workload: Workload, participation: Participation, epsilon: float, delta: float, seed: int
    ) -> AmplifiedError:
        """Validate the arguments of a search, or raise a ``ValueError``."""
        participation.check_steps(workload.num_steps, "workload")
        reason = bins.objection(0.0, participation)
        if reason:
            raise ValueError(f"participation must be valid for balls-in-bins, but {reason}")
        return AmplifiedError(
            participation,
            checks.number("epsilon", epsilon, 0.0, open_low=True),
            checks.probability("delta", delta),
            checks.integer("seed", seed, 0),
        )

    def __call__(self, mechanism: ToeplitzMechanism) -> float:
        """The estimated error; infinite if C has negative entries, which have no analysis."""
        try:
            key = mechanism.noising_coef.tobytes()
            if key not in self._known:
                self._known[key] = self._estimate(mechanism)
            return self._known[key]
        except OverflowError:
            return math.inf

    def best(self, mechanisms: Iterable[ToeplitzMechanism]) -> ToeplitzMechanism:
        """The mechanism with the least error, by draws that no search has used.

        A search prefers mechanisms that its own draws favour by chance. So all mechanisms close to
        the least estimate are estimated again from fresh draws, and the best of these is taken.
        """
        tried = list(mechanisms)
        least = min(map(self, tried))
        close = [m for m in tried if self(m) <= _CLOSE * least]
        return min(close or tried, key=self.fresh)

    @functools.cached_property
    def fresh(self) -> AmplifiedError:
        """The same estimate from more draws, which no search uses."""
        return self._other(_FRESH)

    @functools.cached_property
    def judge(self) -> AmplifiedError:
        """The same estimate from more draws, which decide whether a search continues."""
        return self._other(_JUDGE)

    def _other(self, more: int) -> AmplifiedError:
        seed, samples = self.seed + more, _MORE * self.samples
        return replace(self, seed=seed, samples=samples, _known={}, _last=list(self._last))

    def _estimate(self, mechanism: ToeplitzMechanism) -> float:
        if bins.objection(mechanism.least_entry, self.participation):
            return math.inf
        means = mechanism.bins(self.participation.min_sep)
        draws = Draws.checked(_FAILURE_PROBABILITY, None, self.seed, None)
        near = self._last[0] * means.longest if self._last else None
        noise = certificates.estimate_noise(
            means, self.epsilon, self.delta, draws, samples=self.samples, near=near
        )
        self._last[:] = [noise / means.longest]
        return noise * mechanism.decoder_rms
