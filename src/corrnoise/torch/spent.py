"""What a run has spent: ε of the steps that were released, and the statement about it."""

from __future__ import annotations

from collections.abc import Callable

from corrnoise import _checks as checks
from corrnoise.noise.exact import ExactNoise
from corrnoise.planning import Plan
from corrnoise.records import Statement
from corrnoise.records.statement import STOCK
from corrnoise.torch.setup import Setup
from corrnoise.torch.without_noise import is_private


class Spent:
    """ε by the number of steps and δ: one curve for a run, and what it was asked for.

    The ε of the whole run at the plan's δ is the plan's. Every other one is exact or a proven
    bound, with no random draws, since a certificate takes longer than a user waits.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], float] = {}
        self._curve: Callable[[int, float], float] | None = None

    def epsilon(self, plan: Plan, steps_taken: int, delta: float) -> float:
        """ε of the first steps of a plan, from its own analysis; exact, bound or certified.

        Args:
            plan: of the run.
            steps_taken: how many were released.
            delta: δ.
        """
        whole = plan.calibration
        if not steps_taken or not is_private(whole):
            return whole.spent(steps_taken)
        delta = checks.probability("delta", delta)
        known = self._known
        known.setdefault((plan.num_steps, whole.delta), whole.epsilon)
        if (steps_taken, delta) not in known:
            if self._curve is None:
                self._curve = whole.sampling.curve(
                    whole.mechanism, whole.participation, whole.noise_multiplier
                )
            # More steps and a smaller δ cost no less.
            least = [x for (n, d), x in known.items() if n >= steps_taken and d <= delta]
            known[steps_taken, delta] = min([self._curve(steps_taken, delta), *least])
        return known[steps_taken, delta]


def statement(run: Setup, *, steps_taken: int, epsilon: float, delta: float) -> Statement:
    """The privacy statement of a run.

    Args:
        run: that has begun.
        steps_taken: how many steps were released.
        epsilon: of these steps.
        delta: δ.
    """
    if not is_private(run.plan.calibration):
        raise ValueError(
            "noise_multiplier must be above 0 for a privacy statement, got 0: the run is not "
            "private, ε = ∞; train with noise, or leave the statement out"
        )
    found = Statement.of(
        run.plan,
        clip_norm=run.clip_norm,
        steps_taken=steps_taken,
        epsilon=epsilon,
        delta=delta,
        noise_source=None if run.noise else STOCK,
        key_fingerprint=run.key.fingerprint,
        run_id=run.header["run_id"],
        publishes=run.header["publishes"],
        num_parameters=run.num_parameters if run.noise else None,
        exact_release=isinstance(run.noise, ExactNoise),
    )
    # A part of a certified run is priced by a bound that holds with certainty.
    part = run.plan.calibration.kind == "certified" and epsilon != run.plan.epsilon
    return found.as_bound() if part else found
