"""The numbers of the page: those of a plan and its runs, and a few that are computed here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from corrnoise import mechanisms, samplings
from corrnoise.mechanisms import Mechanism
from corrnoise.planning import Alternative, Plan
from corrnoise.records import Run, Statement
from corrnoise.samplings import Calibration, Sampling

Array = npt.NDArray[np.float64]

# A certificate from few draws is as valid as one from many, only slightly larger.
FEW_DRAWS = 20_000
_POINTS, _CERTIFIED_POINTS = 24, 6


@dataclass(frozen=True)
class StepError:
    """The error that the noise of a mechanism causes in the model, per unit of clip norm.

    Attributes:
        label: the label of the mechanism or its run.
        color: the number of the colour of its curves.
        independent: whether its noise is independent in every step (DP-SGD).
        sampling: the name of its sampling.
        noise_multiplier: σ.
        kind: "exact", "bound", "certified" or "estimate": the kind of number that σ is.
        steps: the root of the expected squared error of each step.
        mean: the root mean square of ``steps``.
        remains: the standard deviation of the first step's noise in the model at each step.
    """

    label: str
    color: int
    independent: bool
    sampling: str
    noise_multiplier: float
    kind: str
    steps: Array
    mean: float
    remains: Array


@dataclass(frozen=True)
class Spending:
    """ε as a function of steps.

    Attributes:
        label: the label of the run or plan.
        color: the number of the colour of its curve.
        steps: numbers of steps, from 0.
        epsilons: the ε that these steps spend.
    """

    label: str
    color: int
    steps: tuple[int, ...]
    epsilons: tuple[float, ...]


@dataclass(frozen=True)
class Evidence:
    """All that the page shows.

    Attributes:
        plan: the plan, or the first run's plan.
        runs: the run that the page is about, and those that it is compared with.
        statement: the statement of the first run, or of the plan.
        errors: the errors of the plan's mechanism, of comparable runs, and of DP-SGD if a better
            DP-SGD is known than theirs.
        spending: ε as a function of steps, for each run or for the plan.
        recorded: whether the runs recorded their spending; otherwise it is computed for the page.
        lower_bound: a lower bound on the mean error; ``None`` if none is known.
    """

    plan: Plan
    runs: tuple[Run, ...]
    statement: Statement
    errors: tuple[StepError, ...]
    spending: tuple[Spending, ...]
    recorded: bool
    lower_bound: float | None

    @staticmethod
    def of(plan: Plan | None, runs: Sequence[Run]) -> Evidence:
        """Collect the numbers; seconds if ε must be certified, as no run recorded it."""
        if plan is None and not runs:
            raise ValueError("plan or runs must be given, got neither; pass a Plan or a Run")
        if plan is not None and runs and runs[0].plan != plan:
            raise ValueError(
                "plan must be the plan of the first run, got another; leave it out, or pass the "
                "run of this plan first"
            )
        subject = runs[0].plan if plan is None else plan
        statement = runs[0].statement if runs else Statement.of(subject)
        spending = tuple(_recorded(color, run) for color, run in enumerate(runs))
        # Every curve has the point at 0 steps; a recorded curve has more.
        recorded = bool(runs) and all(len(spent.steps) > 1 for spent in spending)
        if not recorded:
            spending = (_computed(subject, statement.steps_taken),)
        return Evidence(
            plan=subject,
            runs=tuple(runs),
            statement=statement,
            errors=tuple(_errors(subject, runs)),
            spending=spending,
            recorded=recorded,
            lower_bound=_lower_bound(subject),
        )

    @property
    def calibrations(self) -> tuple[Calibration, ...]:
        """The calibrations of the curves of ``spending``."""
        if self.recorded:
            return tuple(run.plan.calibration for run in self.runs)
        return (self.plan.calibration,)

    @property
    def baseline(self) -> StepError | None:
        """The best DP-SGD at the same budget, with any sampling.

        It is ``None`` if the plan's own mechanism is DP-SGD.
        """
        if self.errors[0].independent:
            return None
        return min((e for e in self.errors[1:] if e.independent), key=_mean, default=None)


def family_label(name: str) -> str:
    """The label of a family; its name if this version does not know the family."""
    return mechanisms.get(name).label if name in mechanisms.names() else name


def alternative_label(alternative: Alternative) -> str:
    """The label of an alternative, with the label of its family."""
    return family_label(alternative.name) + alternative.label.removeprefix(alternative.name)


def dp_sgd(plan: Plan) -> Mechanism:
    """Independent noise for the plan's workload: what every mechanism is compared with."""
    return mechanisms.dp_sgd(plan.mechanism.workload)


def with_batches(label: str, sampling: str, plan: Plan) -> str:
    """A label that names the sampling if it is not the plan's."""
    return label if sampling == plan.sampling.name else f"{label}, {sampling}"


def _mean(error: StepError) -> float:
    return error.mean


def _lower_bound(plan: Plan) -> float | None:
    """The plan's lower bound; it is computed for a plan that was made by hand."""
    if plan.lower_bound is not None:
        return plan.lower_bound
    c = plan.calibration
    return c.sampling.least_error(c.mechanism.workload, c.participation, c.epsilon, c.delta)


def _errors(plan: Plan, runs: Sequence[Run]) -> list[StepError]:
    c = plan.calibration
    found = [_error(runs[0].label if runs else family_label(c.mechanism.name), 0, c)]
    for color, run in enumerate(runs[1:], start=1):
        if _comparable(c, run.plan.calibration):
            found.append(_error(run.label, color, run.plan.calibration))
    if found[0].independent:
        return found
    ran = [e for e in found if e.independent]
    known = _independent(plan, {e.sampling for e in ran}, max(1, len(runs)))
    best = min([*ran, *known], key=_mean)
    return found if any(best is e for e in ran) else [*found, best]


def _comparable(one: Calibration, other: Calibration) -> bool:
    """Whether two errors have the same workload, participation, budget and batch size."""
    return (one.mechanism.workload, one.participation, one.epsilon, one.delta) == (
        other.mechanism.workload,
        other.participation,
        other.epsilon,
        other.delta,
    ) and _rate(one.sampling, one) == _rate(other.sampling, one)


def _rate(sampling: Sampling, calibration: Calibration) -> Fraction:
    return sampling.rate(calibration.participation)


def _independent(plan: Plan, ran: Collection[str], color: int) -> list[StepError]:
    """DP-SGD at the plan's budget, with samplings that no run has, planned or computed here."""
    mechanism = dp_sgd(plan)
    known = {
        a.sampling: (a.noise_multiplier, a.kind)
        for a in reversed(plan.alternatives)  # so that the least error of each sampling is kept
        if a.name == mechanism.name and a.noise_multiplier is not None and a.kind is not None
    }
    for how in _as_secret(plan, mechanism):
        if how.name not in known and how.name not in ran:
            found = _calibrated(plan, mechanism, how)
            known[how.name] = found.noise_multiplier, found.kind
    label = mechanisms.shown(mechanism)
    return [
        _step_error(with_batches(label, name, plan), color, mechanism, name, noise, kind)
        for name, (noise, kind) in known.items()
        if name not in ran
    ]


def _as_secret(plan: Plan, mechanism: Mechanism) -> list[Sampling]:
    """The samplings that DP-SGD may use for the comparison, and whose noise is found quickly.

    If the plan's batches are secret, these are all samplings with secret batches. If they are
    public, it is the plan's own.
    """
    c = plan.calibration
    quick = [
        how
        for how in map(samplings.get, samplings.names())
        if how.secret
        and not how.slow
        and not how.objection(mechanism, c.participation)
        and _rate(how, c) == _rate(c.sampling, c)
    ]
    return quick if c.sampling.secret and quick else [c.sampling]


def _calibrated(plan: Plan, mechanism: Mechanism, sampling: Sampling) -> Calibration:
    c = plan.calibration
    return samplings.calibrate(
        mechanism,
        c.participation,
        epsilon=c.epsilon,
        delta=c.delta,
        sampling=sampling,
        samples=FEW_DRAWS,
    )


def _error(label: str, color: int, c: Calibration) -> StepError:
    return _step_error(label, color, c.mechanism, c.sampling.name, c.noise_multiplier, c.kind)


def _step_error(
    label: str, color: int, mechanism: Mechanism, sampling: str, noise: float, kind: str
) -> StepError:
    return StepError(
        label=label,
        color=color,
        independent=mechanism.independent,
        sampling=sampling,
        noise_multiplier=noise,
        kind=kind,
        steps=noise * mechanism.decoder_norms,
        mean=noise * mechanism.decoder_rms,
        remains=noise * np.abs(mechanism.decoder_column),
    )


def _recorded(color: int, run: Run) -> Spending:
    known = [(record.step, record.epsilon) for record in run.records]
    spent = [(0, 0.0), *((step, epsilon) for step, epsilon in known if epsilon is not None)]
    return Spending(
        run.label, color, tuple(step for step, _ in spent), tuple(value for _, value in spent)
    )


def _computed(plan: Plan, taken: int) -> Spending:
    certified = plan.sampling.certified
    number = _CERTIFIED_POINTS if certified else _POINTS
    steps = sorted({round(taken * i / number) for i in range(number + 1)})
    samples = FEW_DRAWS if certified else None
    spent = tuple(plan.calibration.spent(step, samples=samples) for step in steps)
    return Spending(mechanisms.shown(plan.mechanism), 0, tuple(steps), spent)
