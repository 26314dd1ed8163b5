"""The numbers behind the page: what a plan and its runs say, and the little that is priced anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from corrnoise import mechanisms
from corrnoise.accounting import Calibration, calibrate, epsilon_of
from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.noise.filters import Filter
from corrnoise.planning import Alternative, Plan, least_error
from corrnoise.run import Run
from corrnoise.statement import Statement

Array = npt.NDArray[np.float64]

NAMES = {
    "dp_sgd": "DP-SGD",
    "bsr": "BSR",
    "bisr": "BISR",
    "band_mf": "Band-MF",
    "band_inv_mf": "Band-Inv-MF",
    "blt": "BLT",
    "dense": "Dense",
}
# A certificate is as valid with few draws, only a little larger.
_FEW_DRAWS = 20_000
_POINTS, _CERTIFIED_POINTS = 24, 6


@dataclass(frozen=True)
class StepError:
    """What the noise of a mechanism leaves in the model, per unit of clip norm.

    Attributes:
        label: of the mechanism or its run.
        color: of its curves on the page.
        name: the family.
        noise_multiplier: σ.
        kind: "exact", "bound", "certified" or "estimate": what σ is.
        steps: root of the expected squared error of each step.
        mean: root of their mean square.
        remains: standard deviation that the first step's noise has in the model at each step.
    """

    label: str
    color: int
    name: str
    noise_multiplier: float
    kind: str
    steps: Array
    mean: float
    remains: Array


@dataclass(frozen=True)
class Spending:
    """ε against steps.

    Attributes:
        label: of the run or plan.
        color: of its curve.
        steps: numbers of steps, from 0.
        epsilons: what they spend.
    """

    label: str
    color: int
    steps: tuple[int, ...]
    epsilons: tuple[float, ...]


@dataclass(frozen=True)
class Evidence:
    """All that the page shows.

    Attributes:
        plan: the plan, or the first run's.
        runs: the run that the page is about, and those that it is compared with.
        statement: of the first run, or of the plan.
        errors: of the plan's mechanism, of comparable runs, and of DP-SGD.
        spending: ε against steps, one for each run or one for the plan.
        recorded: whether runs recorded their spending; else it was computed for the page.
        lower_bound: of the mean error; ``None`` where none is known.
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
        """Gather it; a few seconds for balls-in-bins where no run recorded its ε."""
        if plan is None and not runs:
            raise ValueError("plan or runs must be given, got neither; pass a Plan or a Run")
        if plan is not None and runs and runs[0].plan != plan:
            raise ValueError(
                "plan must be the plan of the first run, got another; leave it out or pass the "
                "run that kept it first"
            )
        subject = runs[0].plan if plan is None else plan
        recorded = bool(runs) and all(run.records for run in runs)
        c = subject.calibration
        return Evidence(
            plan=subject,
            runs=tuple(runs),
            statement=runs[0].statement if runs else Statement.of(subject),
            errors=tuple(_errors(subject, runs)),
            spending=tuple(map(_recorded, range(len(runs)), runs))
            if recorded
            else (
                _computed(
                    subject, runs[0].statement.steps_taken if runs else c.participation.num_steps
                ),
            ),
            recorded=recorded,
            lower_bound=least_error(
                c.mechanism.workload,
                c.participation,
                epsilon=c.epsilon,
                delta=c.delta,
                sampling=c.sampling,
            )
            if subject.lower_bound is None
            else subject.lower_bound,
        )

    @property
    def baseline(self) -> StepError | None:
        """DP-SGD at the same budget; ``None`` where the plan is that itself."""
        found = (e for e in self.errors[1:] if e.name == "dp_sgd")
        return None if self.errors[0].name == "dp_sgd" else next(found, None)

    @property
    def chosen(self) -> Alternative | None:
        """The plan's own mechanism among its alternatives."""
        for a in self.plan.alternatives:
            same = (a.name, a.error) == (self.plan.mechanism.name, self.plan.error)
            if same and not a.reason:
                return a
        return None


def mechanism_name(mechanism: Mechanism | DenseMechanism) -> str:
    """Family and size, as one says it."""
    name = NAMES.get(mechanism.name, mechanism.name)
    if isinstance(mechanism, DenseMechanism) or mechanism.name == "dp_sgd":
        return name
    if mechanism.name == "blt":
        return f"{name} d={Filter.of(mechanism).num_past}"
    return f"{name} p={mechanism.num_bands}"


def alternative_name(alternative: Alternative) -> str:
    """The label of an alternative, with the family as one says it."""
    return alternative.label.replace(
        alternative.name, NAMES.get(alternative.name, alternative.name), 1
    )


def _errors(plan: Plan, runs: Sequence[Run]) -> list[StepError]:
    c = plan.calibration
    label = runs[0].label if runs else mechanism_name(c.mechanism)
    found = [_error(label, 0, c.mechanism, c.noise_multiplier, c.kind)]
    for color, run in enumerate(runs[1:], start=1):
        other = run.plan.calibration
        if _comparable(c, other):
            found.append(
                _error(run.label, color, other.mechanism, other.noise_multiplier, other.kind)
            )
    if not any(e.name == "dp_sgd" for e in found):
        found.append(_independent(plan, max(1, len(runs))))
    return found


def _comparable(one: Calibration, other: Calibration) -> bool:
    """Whether two errors are of the same task at the same budget."""
    return (one.mechanism.workload, one.participation, one.epsilon, one.delta) == (
        other.mechanism.workload,
        other.participation,
        other.epsilon,
        other.delta,
    ) and one.sampling == other.sampling


def _independent(plan: Plan, color: int) -> StepError:
    """DP-SGD at the plan's budget: as the plan priced it, or priced here."""
    c = plan.calibration
    mechanism = mechanisms.dp_sgd(c.mechanism.workload)
    for a in plan.alternatives:
        if a.name == "dp_sgd" and a.noise_multiplier is not None and a.kind is not None:
            return _error("DP-SGD", color, mechanism, a.noise_multiplier, a.kind)
    found = calibrate(
        mechanism,
        c.participation,
        epsilon=c.epsilon,
        delta=c.delta,
        sampling=c.sampling,
        samples=_FEW_DRAWS,
    )
    return _error("DP-SGD", color, mechanism, found.noise_multiplier, found.kind)


def _error(
    label: str, color: int, mechanism: Mechanism | DenseMechanism, noise: float, kind: str
) -> StepError:
    if isinstance(mechanism, DenseMechanism):
        column = mechanism.decoder[:, 0]
    else:
        column = mechanism.decoder_coef
    return StepError(
        label,
        color,
        mechanism.name,
        noise,
        kind,
        noise * mechanism.decoder_norms,
        noise * mechanism.decoder_rms,
        noise * np.abs(column),
    )


def _recorded(color: int, run: Run) -> Spending:
    known = [(record.step, record.epsilon) for record in run.records]
    spent = [(0, 0.0), *((step, epsilon) for step, epsilon in known if epsilon is not None)]
    return Spending(
        run.label, color, tuple(step for step, _ in spent), tuple(value for _, value in spent)
    )


def _computed(plan: Plan, taken: int) -> Spending:
    certified = plan.sampling == "balls-in-bins"
    number = _CERTIFIED_POINTS if certified else _POINTS
    steps = sorted({round(taken * i / number) for i in range(number + 1)})
    spent = [epsilon_of(plan, s, samples=_FEW_DRAWS if certified else None) for s in steps]
    return Spending(mechanism_name(plan.mechanism), 0, tuple(steps), tuple(spent))
