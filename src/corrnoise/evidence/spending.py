"""Verification of every ε in the statement and the records of a run.

After its last step a run states the plan's ε. Before, it states a bound with no random draws if a
certificate would take seconds. A search for such a bound ends within a percent of the least one;
its result depends on the searches before it, so a resumed run may state another valid bound. So
verification does not search for ε. It computes δ at the stated ε, for the stated number of steps.
If that is at most the plan's δ, the stated ε is proven.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from corrnoise import _checks as checks
from corrnoise.evidence.findings import ROUNDING
from corrnoise.records import Run
from corrnoise.samplings import Calibration


@dataclass(frozen=True)
class Claim:
    """An ε that a run states.

    Attributes:
        place: the field of the run that states it.
        steps: the number of steps that it is stated for.
        epsilon: ε.
        drawn: whether a certificate by random draws may prove it.
        exact: whether it is stated as the exact cost, so that a larger value is wrong too.
    """

    place: str
    steps: int
    epsilon: float
    drawn: bool = True
    exact: bool = False


def problem(run: Run) -> str:
    """A message about the first ε of a run that cannot be proven; "" if all are proven.

    An ε below the one computed here is refused, and one above that of the whole run too. An ε
    between them is accepted, unless the statement calls it exact: a run that continues from an
    older checkpoint records the ε of all steps that it released, not only of the steps before the
    checkpoint.

    Raises:
        ValueError: a number of steps is not in [0, num_steps].
    """
    whole = run.plan.calibration
    with np.errstate(all="ignore"):
        found = (_problem(whole, claim) for claim in _claims(run))
        return next((words for words in found if words), "")


def states_bound(run: Run) -> bool:
    """Whether the statement is for a part of a certified run and states a bound with no draws."""
    whole, stated = run.plan.calibration, run.statement
    part = whole.kind == "certified" and stated.epsilon < whole.epsilon * (1.0 - ROUNDING)
    return part and stated.kind == "bound"


def _claims(run: Run) -> list[Claim]:
    stated = run.statement
    drawn, exact = not states_bound(run), stated.kind == "exact"
    claims = [Claim("statement", stated.steps_taken, stated.epsilon, drawn, exact)]
    for i, record in enumerate(run.records):
        if record.epsilon is not None:
            claims.append(Claim(f"records[{i}]", record.step, record.epsilon))
    return claims


def _problem(whole: Calibration, claim: Claim) -> str:
    n = whole.participation.num_steps
    taken = checks.integer(f"steps of {claim.place}", claim.steps, 0, n)
    most = _least(whole, claim) if claim.exact else whole.epsilon
    where = f"ε of {claim.place} after {taken} steps"
    if not 0.0 <= claim.epsilon <= most * (1.0 + ROUNDING):
        return f"{where} must be in [0, {most!r}], got {claim.epsilon!r}"
    if _reaches(claim, most) or taken == 0 or (taken < n and _bounded(whole, claim)):
        return ""
    least = _least(whole, claim)
    if _reaches(claim, least):
        return ""
    return f"{where} must be at least {least!r}, got {claim.epsilon!r}"


def _reaches(claim: Claim, epsilon: float) -> bool:
    return claim.epsilon >= epsilon * (1.0 - ROUNDING)


def _bounded(whole: Calibration, claim: Claim) -> bool:
    """Whether the bound of δ at the stated ε is at most the plan's δ."""
    delta = whole.sampling.delta(
        whole.mechanism, whole.participation, whole.noise_multiplier, claim.epsilon, claim.steps
    )
    return delta <= whole.delta * (1.0 + ROUNDING)


def _least(whole: Calibration, claim: Claim) -> float:
    """The ε that is computed for these steps: a bound, or a certificate if that is allowed."""
    if claim.drawn:
        return whole.spent(claim.steps)
    bound = whole.sampling.epsilon(
        whole.mechanism, whole.participation, whole.noise_multiplier, whole.delta, claim.steps
    )
    return min(bound, whole.epsilon)
