"""The plan with the least expected error that a dataset, a budget and a memory allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from corrnoise import checks, workloads
from corrnoise.accounting import (
    SAMPLINGS,
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
from corrnoise.noise.stream import check_rounds
from corrnoise.participation import Participation
from corrnoise.planning.candidates import MOST_BANDS, Candidate, candidates
from corrnoise.planning.result import Alternative, Plan
from corrnoise.planning.yardstick import least_error

# Of the candidates that an estimate ranks, this many are certified if they are this close.
_FINALISTS, _CLOSE = 3, 1.01
# Errors this close are equal, and the cheaper mechanism is taken.
_EQUAL = 1.001
# A certificate in units of an estimate, for the progress bar.
_CERTIFICATE = 20


@dataclass(frozen=True)
class _Priced:
    """A candidate, built and priced."""

    alternative: Alternative
    mechanism: Mechanism | DenseMechanism | None = None
    calibration: Calibration | None = None

    @property
    def error(self) -> float:
        return math.inf if self.alternative.error is None else self.alternative.error

    @property
    def available(self) -> bool:
        return not self.alternative.reason

    def calibrated(self, found: Calibration) -> _Priced:
        alternative = replace(
            self.alternative,
            noise_multiplier=found.noise_multiplier,
            error=found.rmse(),
            kind=found.kind,
        )
        return replace(self, alternative=alternative, calibration=found)


def plan(
    *,
    num_examples: int,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    epsilon: float,
    delta: float,
    momentum: float = 0.0,
    decay: float = 1.0,
    sampling: Sampling = "balls-in-bins",
    mechanisms: Sequence[str] | None = None,
    num_bands: int | None = None,
    num_parameters: int | None = None,
    memory: float | None = 0,
    rounds: int = 20,
    failure_probability: float = 1e-9,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Plan:
    """The mechanism with the least expected error σ·‖B‖_F/√n at the noise that the budget asks for.

    Amplification by sampling counts: each candidate is priced for ``sampling``. An epoch has
    b = ⌈num_examples/batch_size⌉ steps; an example takes part at most once in each. With
    balls-in-bins every candidate is ranked by an estimate and the best three are certified; the
    promise of the plan itself is always exact, a proven bound or certified. Mechanisms are priced
    with the float32 coefficients that run. Errors within 0.1 % are equal, and the cheaper is taken.

    Args:
        num_examples: size of the dataset.
        batch_size: expected examples in a batch.
        epochs: passes over the data; or
        steps: their number, which need not be whole epochs.
        epsilon: ε.
        delta: δ.
        momentum: β of the optimizer, m ← β·m + x̂.
        decay: α, the factor that the weights keep in one step; 1 is no decay.
        sampling: "balls-in-bins", "fixed", "poisson" or "cyclic-poisson", as in ``calibrate``.
        mechanisms: names of families to choose from; all by default.
        num_bands: p of the banded families; several by default.
        num_parameters: of the model, to tell how many bytes the noise keeps.
        memory: the model-sized float32 vectors that the noise may keep between steps. With 0, the
            default, it keeps none: DP-SGD, BISR and Band-Inv-MF, whose past is made again. BSR,
            Band-MF and BLT need a state; what it would gain is among the alternatives. ``None`` is
            no limit.
        rounds: of ChaCha: 20, or the faster 12 and 8.
        failure_probability: of the certificate, for balls-in-bins.
        samples: draws for the certificate; chosen from b by default.
        seed: of these draws.
        progress: True for a bar on the terminal, or a function of (done, total).

    >>> import corrnoise as cn
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=4, epsilon=4, delta=1e-6,
    ...                sampling="fixed")
    >>> plan.mechanism, round(plan.error, 3), round(plan.efficiency, 2), plan.calibration.kind
    (band_inv_mf(prefix_sum(40), num_bands=32), 5.274, 0.93, 'bound')
    >>> cn.Plan.from_json(plan.to_json()) == plan
    True
    """
    checks.choice("sampling", sampling, SAMPLINGS)
    participation = _participation(num_examples, batch_size, epochs, steps, sampling)
    workload = workloads.sgd(participation.num_steps, momentum=momentum, decay=decay)
    epsilon = checks.number("epsilon", epsilon, 0.0, open_low=True)
    delta = checks.probability("delta", delta)
    if memory is not None:
        memory = checks.number("memory", memory, 0.0)
    if num_parameters is not None:
        checks.integer("num_parameters", num_parameters, 1)
    rounds = check_rounds(rounds)
    draws = Draws.checked(failure_probability, samples, seed, progress)
    setting = _Setting(
        participation, epsilon, delta, sampling, memory, rounds, num_bands is not None, draws
    )
    tried = list(
        candidates(
            workload,
            participation,
            sampling,
            memory=memory,
            families=mechanisms,
            num_bands=num_bands,
        )
    )
    certified = sampling == "balls-in-bins"
    bar = _Bar(draws.progress, len(tried) + (_FINALISTS * _CERTIFICATE if certified else 0))
    priced: list[_Priced] = []
    for candidate in tried:
        priced.append(setting.price(candidate))
        bar.advance(1)
    if certified:
        priced = _certify(priced, setting, bar)
    bar.finish()
    chosen = _choose(priced, sampling)
    assert chosen.calibration is not None
    assert chosen.alternative.scheme is not None
    return Plan(
        num_examples=num_examples,
        batch_size=batch_size,
        calibration=chosen.calibration,
        lower_bound=least_error(
            workload, participation, epsilon=epsilon, delta=delta, sampling=sampling
        ),
        alternatives=tuple(p.alternative for p in sorted(priced, key=lambda p: p.error)),
        num_parameters=num_parameters,
        memory=chosen.alternative.scheme.num_vectors if memory is None else memory,
        rounds=rounds,
    )


def _participation(
    num_examples: int, batch_size: int, epochs: int | None, steps: int | None, sampling: Sampling
) -> Participation:
    total = checks.integer("num_examples", num_examples, 1)
    size = checks.integer("batch_size", batch_size, 1, total, "at most num_examples")
    b = -(-total // size)
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"exactly one of epochs and steps must be given, got epochs={epochs!r} and "
            f"steps={steps!r}; an epoch has {b} steps"
        )
    n = (
        checks.integer("steps", steps, 1)
        if epochs is None
        else checks.integer("epochs", epochs, 1) * b
    )
    if n < b and sampling != "fixed":
        raise ValueError(
            f"steps must be at least one epoch, {b}, with sampling={sampling!r}, got {n}; take "
            "more steps, larger batches or sampling='fixed'"
        )
    return Participation(n, min(b, n), -(-n // b))


@dataclass(frozen=True)
class _Setting:
    """What every candidate is priced for."""

    participation: Participation
    epsilon: float
    delta: float
    sampling: Sampling
    memory: float | None
    rounds: int
    asked: bool  # whether num_bands was asked for
    draws: Draws

    def price(self, candidate: Candidate) -> _Priced:
        """Build a candidate; exact or bounded noise, or for balls-in-bins an estimate of it."""
        blank = Alternative(
            candidate.label, candidate.name, candidate.num_bands, None, None, None, None, None
        )
        try:
            spec = Filter.of(candidate.build())
            mechanism = spec.realized
            refused = valid_samplings(mechanism, self.participation)[self.sampling]
        except OverflowError as overflow:
            return _Priced(replace(blank, reason=str(overflow)))
        if refused:
            return _Priced(replace(blank, reason=refused))
        # No scheme keeps more vectors than there are steps.
        memory = spec.num_steps if self.memory is None else self.memory
        scheme = _scheme.choose(spec, memory, self.rounds)
        cost = _scheme.relative_cost(scheme, spec, self.rounds)
        alternative = replace(blank, scheme=scheme, step_cost=cost, reason=self._excess(scheme))
        if self.sampling != "balls-in-bins":
            return _Priced(alternative, mechanism).calibrated(self.calibrate(mechanism))
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
        return _Priced(alternative, mechanism)

    def calibrate(
        self, mechanism: Mechanism | DenseMechanism, progress: Progress | None = None
    ) -> Calibration:
        """The noise that the promise rests on."""
        return calibrate(
            mechanism,
            self.participation,
            epsilon=self.epsilon,
            delta=self.delta,
            sampling=self.sampling,
            failure_probability=self.draws.failure_probability,
            samples=self.draws.samples,
            seed=self.draws.seed,
            progress=progress,
        )

    def _excess(self, scheme: Scheme) -> str:
        """Why a scheme is beyond what the plan may use."""
        if self.memory is not None and scheme.num_vectors > self.memory:
            return f"keeps {scheme.num_vectors} vectors, and memory is {self.memory:g}"
        if not self.asked and scheme.draws_per_step > MOST_BANDS:
            return f"makes {scheme.draws_per_step:g} draws a step; ask for it by num_bands"
        return ""


def _certify(priced: list[_Priced], setting: _Setting, bar: _Bar) -> list[_Priced]:
    """The same candidates, the best of the available ones with a certificate."""
    ranked = sorted((p for p in priced if p.available), key=lambda p: p.error)[:_FINALISTS]
    finalists = [p for p in ranked if p.error <= _CLOSE * ranked[0].error]
    result = [p for p in priced if p not in finalists]
    for finalist in finalists:
        assert finalist.mechanism is not None
        found = setting.calibrate(finalist.mechanism, bar.part(_CERTIFICATE))
        result.append(finalist.calibrated(found))
        bar.advance(_CERTIFICATE)
    return result


def _choose(priced: list[_Priced], sampling: Sampling) -> _Priced:
    """The cheapest of those with the least error, to 0.1 %."""
    ready = [p for p in priced if p.available and p.calibration is not None]
    if not ready:
        reasons = "; ".join(f"{p.alternative.label}: {p.alternative.reason}" for p in priced)
        raise ValueError(
            f"mechanisms must contain one that can be used with sampling={sampling!r}, got none "
            f"({reasons}); name others, allow more memory or change the sampling"
        )
    least = min(p.error for p in ready)
    equal = [p for p in ready if p.error <= _EQUAL * least]
    return min(equal, key=lambda p: (p.alternative.step_cost, p.error))


class _Bar:
    """One progress bar for estimates and certificates together."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def advance(self, units: int) -> None:
        self.done += units
        self._show(self.done)

    def part(self, units: int) -> Progress:
        """Progress within the next ``units``, which never goes back."""
        return lambda done, total: self._show(self.done + units * done // (total + 1))

    def finish(self) -> None:
        self._show(self.total)

    def _show(self, done: int) -> None:
        if self.progress is not None:
            self.progress(min(done, self.total), self.total)
