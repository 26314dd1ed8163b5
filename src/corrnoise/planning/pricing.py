"""What the budget costs each candidate: noise, expected error, memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from corrnoise.accounting import (
    Calibration,
    Sampling,
    calibrate,
    estimate_noise,
    valid_samplings,
)
from corrnoise.accounting.certificate import Draws
from corrnoise.accounting.progress import Progress
from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.noise import Scheme
from corrnoise.noise import scheme as _scheme
from corrnoise.noise.filters import Filter
from corrnoise.participation import Participation
from corrnoise.planning.candidates import MOST_BANDS, Candidate
from corrnoise.planning.result import Alternative

# A certificate in units of an estimate, for the progress bar.
CERTIFICATE = 20


@dataclass(frozen=True)
class Priced:
    """A candidate, built and priced."""

    alternative: Alternative
    mechanism: Mechanism | DenseMechanism | None = None
    calibration: Calibration | None = None

    @property
    def error(self) -> float:
        """Expected error; infinite where there is no price."""
        return math.inf if self.alternative.error is None else self.alternative.error

    @property
    def available(self) -> bool:
        """Whether it can be chosen."""
        return not self.alternative.reason

    def calibrated(self, found: Calibration) -> Priced:
        """The same, with proven noise."""
        alternative = replace(
            self.alternative,
            noise_multiplier=found.noise_multiplier,
            error=found.rmse(),
            kind=found.kind,
        )
        return replace(self, alternative=alternative, calibration=found)


@dataclass(frozen=True)
class Setting:
    """What every candidate is priced for."""

    participation: Participation
    epsilon: float
    delta: float
    sampling: Sampling
    memory: float | None
    rounds: int
    asked: bool  # whether num_bands was asked for
    draws: Draws

    def price(self, candidate: Candidate) -> Priced:
        """Build a candidate; exact or bounded noise, or for balls-in-bins an estimate of it."""
        blank = Alternative(
            candidate.label, candidate.name, candidate.num_bands, None, None, None, None, None
        )
        try:
            spec = Filter.of(candidate.build())
            mechanism = spec.realized
            refused = valid_samplings(mechanism, self.participation)[self.sampling]
        except OverflowError as overflow:
            return Priced(replace(blank, reason=str(overflow)))
        if refused:
            return Priced(replace(blank, reason=refused))
        # No scheme keeps more vectors than there are steps.
        memory = spec.num_steps if self.memory is None else self.memory
        scheme = _scheme.choose(spec, memory, self.rounds)
        cost = _scheme.relative_cost(scheme, spec, self.rounds)
        alternative = replace(blank, scheme=scheme, step_cost=cost, reason=self._excess(scheme))
        if self.sampling != "balls-in-bins":
            found = self.calibrate(mechanism, self.draws.failure_probability)
            return Priced(alternative, mechanism).calibrated(found)
        noise = estimate_noise(
            mechanism,
            self.participation,
            epsilon=self.epsilon,
            delta=self.delta,
            failure_probability=self.draws.failure_probability,
            samples=self.draws.samples,
            seed=self.draws.seed,
        )
        error = noise * mechanism.decoder_rms
        alternative = replace(alternative, noise_multiplier=noise, error=error, kind="estimate")
        return Priced(alternative, mechanism)

    def certify(
        self, mechanism: Mechanism | DenseMechanism, finalists: int, bar: Bar
    ) -> Calibration:
        """One of several certificates of which the best will be kept.

        They share the failure probability: that of the one that is kept is their sum.
        """
        whole = self.draws.failure_probability
        found = self.calibrate(mechanism, whole / finalists, bar.part(CERTIFICATE))
        return replace(found, failure_probability=whole) if found.failure_probability else found

    def calibrate(
        self,
        mechanism: Mechanism | DenseMechanism,
        failure_probability: float,
        progress: Progress | None = None,
    ) -> Calibration:
        """The noise that the promise rests on."""
        return calibrate(
            mechanism,
            self.participation,
            epsilon=self.epsilon,
            delta=self.delta,
            sampling=self.sampling,
            failure_probability=failure_probability,
            samples=self.draws.samples,
            seed=self.draws.seed,
            progress=progress,
        )

    def _excess(self, scheme: Scheme) -> str:
        """Why a scheme is beyond what the plan may use."""
        if self.memory is not None and scheme.num_vectors > self.memory:
            return f"needs memory {scheme.num_vectors}, more than {self.memory:g}"
        if not self.asked and scheme.draws_per_step > MOST_BANDS:
            return f"makes {scheme.draws_per_step:g} draws a step; ask for it by num_bands"
        return ""


class Bar:
    """One progress bar for estimates and certificates together."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def advance(self, units: int) -> None:
        """These units are done."""
        self.done += units
        self._show(self.done)

    def part(self, units: int) -> Progress:
        """Progress within the next ``units``, which never goes back."""
        return lambda done, total: self._show(self.done + units * done // (total + 1))

    def finish(self) -> None:
        """All units are done, whether they were needed or not."""
        self._show(self.total)

    def _show(self, done: int) -> None:
        if self.progress is not None:
            self.progress(min(done, self.total), self.total)
