"""The noise that each candidate needs for a budget, with its error, memory and time."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

from corrnoise._once import Once
from corrnoise._progress import Share
from corrnoise._rounding import counted
from corrnoise.accounting import Draws
from corrnoise.mechanisms import Candidate, Family, Mechanism
from corrnoise.mechanisms.square_root import MOST_BANDS
from corrnoise.noise import Scheme
from corrnoise.noise.filtering import scheme as _scheme
from corrnoise.noise.filtering.filters import Filter
from corrnoise.participation import Participation
from corrnoise.planning.plans import Alternative
from corrnoise.samplings import Calibration, Sampling

# The time of a certificate relative to that of an estimate, for the progress bar.
CERTIFICATE = 20
# Close candidates are estimated again with this many times the draws.
_MORE = 4


class Built:
    """A thread-safe cache of built mechanisms."""

    def __init__(self) -> None:
        self._found: Once[Mechanism] = Once()

    def get(self, key: Hashable, candidate: Candidate) -> Mechanism:
        """The cached or newly built mechanism, with the float32 coefficients that are run."""
        return self._found.get(key, lambda: candidate.build().in_float32())


@dataclass(frozen=True)
class Priced:
    """A candidate, built and priced; ``refused`` if the sampling has no analysis for it."""

    alternative: Alternative
    mechanism: Mechanism | None = None
    calibration: Calibration | None = None
    refused: bool = False

    @property
    def error(self) -> float:
        """The expected error; infinite if there is no price."""
        return math.inf if self.alternative.error is None else self.alternative.error

    @property
    def available(self) -> bool:
        """Whether it can be chosen."""
        return not self.alternative.reason

    def calibrated(self, found: Calibration) -> Priced:
        """The same candidate, with proven noise."""
        alternative = replace(
            self.alternative,
            noise_multiplier=found.noise_multiplier,
            error=found.error,
            kind=found.kind,
        )
        return replace(self, alternative=alternative, calibration=found)


@dataclass(frozen=True)
class Pricing:
    """The problem that every candidate is priced for.

    Attributes:
        participation: n, b, k.
        epsilon: ε of the budget.
        delta: δ of the budget.
        sampling: how batches are drawn.
        memory: the model-sized vectors that the noise may keep; ``None`` is no limit.
        rounds: the number of ChaCha rounds.
        asked: whether the user asked for a number of bands.
        draws: the draws for certificates.
    """

    participation: Participation
    epsilon: float
    delta: float
    sampling: Sampling
    memory: float | None
    rounds: int
    asked: bool
    draws: Draws

    def price(self, family: Family, candidate: Candidate, built: Built) -> Priced:
        """Build a candidate and price it, by an estimate if an exact price takes seconds.

        ``built`` caches mechanisms, which all samplings share.
        """
        bands = candidate.size if family.size != "num_buffers" else None
        label = family.title(candidate.size) + candidate.note
        blank = Alternative(label, family.name, bands, self.sampling.name)
        try:
            mechanism = built.get((label, self.participation), candidate)
            spec = Filter.of(mechanism)
            refused = self.sampling.objection(mechanism, self.participation)
        except OverflowError as problem:
            return Priced(replace(blank, reason=str(problem)))
        if refused:
            return Priced(replace(blank, reason=refused), refused=True)
        # No scheme keeps more vectors than there are steps.
        memory = spec.num_steps if self.memory is None else self.memory
        scheme = _scheme.choose(spec, memory, self.rounds)
        cost = _scheme.relative_cost(scheme, spec, self.rounds)
        alternative = replace(blank, scheme=scheme, step_cost=cost, reason=self._excess(scheme))
        try:
            if not self.sampling.slow:
                found = self.calibrate(mechanism, self.draws)
                return Priced(alternative, mechanism).calibrated(found)
            noise = self._estimate(mechanism)
        except ModuleNotFoundError as missing:
            return Priced(replace(blank, reason=str(missing)))
        error = noise * mechanism.decoder_rms
        alternative = replace(alternative, noise_multiplier=noise, error=error, kind="estimate")
        return Priced(alternative, mechanism)

    def again(self, priced: Priced) -> Priced:
        """The candidate, estimated again from more draws and other ones.

        The least of many estimates is probably too small, as its draws favoured it by chance.
        """
        assert priced.mechanism is not None
        noise = self._estimate(priced.mechanism, effort=_MORE)
        error = noise * priced.mechanism.decoder_rms
        alternative = replace(priced.alternative, noise_multiplier=noise, error=error)
        return replace(priced, alternative=alternative)

    def _estimate(self, mechanism: Mechanism, effort: int = 1) -> float:
        return self.sampling.estimate(
            mechanism, self.participation, self.epsilon, self.delta, self.draws, effort
        )

    def certify(self, mechanism: Mechanism, finalists: int, share: Share) -> Calibration:
        """One of at most ``finalists`` certificates, of which the planner keeps the best.

        They share the failure probability: each uses a part of it and states the sum.
        """
        whole, progress = self.draws.failure_probability, share.part(CERTIFICATE)
        draws = replace(self.draws, failure_probability=whole / finalists, progress=progress)
        found = self.calibrate(mechanism, draws)
        return replace(found, failure_probability=whole) if found.failure_probability else found

    def calibrate(self, mechanism: Mechanism, draws: Draws) -> Calibration:
        """The price of a mechanism, exact, proven or certified."""
        return self.sampling.calibrate(
            mechanism, self.participation, self.epsilon, self.delta, draws
        )

    def _excess(self, scheme: Scheme) -> str:
        """Why a scheme is beyond the limits of the plan; "" if it is within them."""
        if self.memory is not None and scheme.num_vectors > self.memory:
            needed = counted(scheme.num_vectors, "vector")
            return f"needs {needed} of memory, the plan allows {self.memory:g}"
        if not self.asked and scheme.draws_per_step > MOST_BANDS:
            return f"makes {scheme.draws_per_step:g} draws a step; ask for it by num_bands"
        return ""
