"""What a run has spent: ε of the steps that were released, and the statement about it."""

from __future__ import annotations

from corrnoise.planning import Plan
from corrnoise.records import Statement
from corrnoise.samplings import account
from corrnoise.torch.setup import Setup


class Spent:
    """ε by the number of steps and δ, kept: for balls-in-bins a certificate takes seconds."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], float] = {}

    def epsilon(self, plan: Plan, steps_taken: int, delta: float) -> float:
        """ε of the first steps of a plan, from its own analysis; exact, bound or certified.

        Args:
            plan: of the run.
            steps_taken: how many were released.
            delta: δ.
        """
        if (steps_taken, delta) not in self._known:
            whole = plan.calibration
            if delta != whole.delta:
                whole = account(
                    whole.mechanism,
                    whole.participation,
                    noise_multiplier=whole.noise_multiplier,
                    delta=delta,
                    sampling=whole.sampling,
                    failure_probability=whole.failure_probability or 1e-9,
                )
            self._known[steps_taken, delta] = whole.spent(steps_taken)
        return self._known[steps_taken, delta]


def statement(run: Setup, *, steps_taken: int, epsilon: float, delta: float) -> Statement:
    """The privacy statement of a run.

    Args:
        run: that has begun.
        steps_taken: how many steps were released.
        epsilon: of these steps.
        delta: δ.
    """
    source = f"ChaCha{run.plan.rounds} keystream, Box-Muller"
    return Statement.of(
        run.plan,
        clip_norm=run.clip_norm,
        steps_taken=steps_taken,
        epsilon=epsilon,
        delta=delta,
        noise_source=source if run.noise else "torch.normal, not cryptographic",
        key_fingerprint=run.key.fingerprint,
        run_id=run.header["run_id"],
        publishes=run.header["publishes"],
        num_parameters=run.num_parameters if run.noise else None,
    )
