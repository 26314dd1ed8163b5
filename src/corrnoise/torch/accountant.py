"""The interface of Opacus's accountants, with the results of the plan's own analysis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Entry = tuple[float, float, int]  # noise multiplier, sampling rate, steps


class Accountant:
    """The accountant of an engine: ε, the history, and the number of steps.

    It reads what the engine has released and counts nothing itself, so that it cannot disagree
    with the ledger.

    Args:
        epsilon: a function from δ to ε of the steps released so far.
        history: a function that returns noise multiplier, sampling rate and steps, as in Opacus.
    """

    def __init__(
        self, epsilon: Callable[[float], float], history: Callable[[], list[Entry]]
    ) -> None:
        self._epsilon, self._history = epsilon, history

    @property
    def history(self) -> list[Entry]:
        """A copy of the list of (noise multiplier, sampling rate, steps) of what was released."""
        return self._history()

    def __len__(self) -> int:
        """How many steps were released."""
        return sum(steps for _, _, steps in self.history)

    def __bool__(self) -> bool:
        return True

    @classmethod
    def mechanism(cls) -> str:
        """The name in checkpoints, which Opacus's own accountants refuse to load."""
        return "corrnoise"

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """ε of the steps released so far.

        Args:
            delta: δ.
            options: ignored, such as ``alphas`` and ``eps_error``, which tune approximations of
                Opacus's accountants.
        """
        return self._epsilon(delta)

    def get_privacy_spent(self, *, delta: float, **options: Any) -> tuple[float, float]:
        """ε, and 0 in place of the Rényi order that Opacus's accountant returns with it."""
        return self._epsilon(delta), 0.0

    def step(self, **given: Any) -> None:
        """Always raises: a step counts when the engine releases it.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "steps must be taken by the optimizer that make_private returned, got a call of "
            "accountant.step(); the engine counts its own steps: leave the call out"
        )

    def state_dict(self) -> dict[str, Any]:
        """The history and the name, as in Opacus."""
        return {"history": self.history, "mechanism": self.mechanism()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Always raises: the released steps are in the ledger and in checkpoints.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "the state of the accountant must come with its run: use engine.load_checkpoint, or "
            "engine.load_state_dict with the key and the ledger of the run"
        )
