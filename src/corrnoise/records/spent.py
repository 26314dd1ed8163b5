"""The ε that the released steps of a run have spent."""

from __future__ import annotations

from collections.abc import Callable

from corrnoise import _checks as checks
from corrnoise.planning import Plan


class Spent:
    """ε as a function of the number of steps and δ for one run; results are cached.

    For the whole run at the plan's δ it is the plan's ε. Every other ε is exact or a proven bound
    with no random draws, as a certificate would take too long.

    Args:
        plan: the plan of the run.
    """

    def __init__(self, plan: Plan) -> None:
        whole = plan.calibration
        self._whole = whole
        self._known: dict[tuple[int, float], float] = {(plan.num_steps, whole.delta): whole.epsilon}
        self._curve: Callable[[int, float], float] | None = None

    def epsilon(self, steps_taken: int, delta: float) -> float:
        """ε of the first steps, from the plan's own analysis; exact, bound or certified.

        Args:
            steps_taken: the number of released steps.
            delta: δ.
        """
        whole = self._whole
        if not steps_taken or whole.noise_multiplier == 0.0:
            return whole.spent(steps_taken)
        delta = checks.probability("delta", delta)
        known = self._known
        if (steps_taken, delta) not in known:
            if self._curve is None:
                self._curve = whole.sampling.curve(
                    whole.mechanism, whole.participation, whole.noise_multiplier
                )
            # An ε for more steps or a smaller δ holds here too.
            least = [x for (n, d), x in known.items() if n >= steps_taken and d <= delta]
            known[steps_taken, delta] = min([self._curve(steps_taken, delta), *least])
        return known[steps_taken, delta]
