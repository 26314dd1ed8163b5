"""How often one example takes part in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise._rounding import counted


@dataclass(frozen=True)
class Participation:
    """b-min-separated participation: at most k of n steps use an example, any two at least b apart.

    These are assumptions on the batches: a sensitivity or an ε for a participation holds for
    training that keeps to it.

    Attributes:
        num_steps: n, the number of training steps.
        min_sep: b, the least distance between two steps that one example takes part in.
        max_participations: k, the most steps that one example takes part in.

    >>> Participation(num_steps=980, min_sep=98, max_participations=10).pattern
    array([  0,  98, 196, 294, 392, 490, 588, 686, 784, 882])
    """

    num_steps: int
    min_sep: int
    max_participations: int

    def __post_init__(self) -> None:
        n = checks.steps("num_steps", self.num_steps)
        b = checks.integer("min_sep", self.min_sep, 1, n, "with one participation use min_sep=1")
        fits = -(-n // b)
        k = checks.integer(
            "max_participations",
            self.max_participations,
            1,
            fits,
            f"num_steps={n} has room for {fits} participations {b} steps apart",
        )
        for name, value in (("num_steps", n), ("min_sep", b), ("max_participations", k)):
            object.__setattr__(self, name, value)

    @property
    def words(self) -> str:
        """How often one example takes part, in words.

        >>> Participation(980, 98, 10).words, Participation(5, 5, 1).words
        ('at most 10 times (k), at least 98 steps (b) apart', 'at most once (k)')
        """
        if self.max_participations == 1:
            return "at most once (k)"
        return f"{self.most}, at least {counted(self.min_sep, 'step')} (b) apart"

    @property
    def most(self) -> str:
        """The most steps that one example takes part in, in words."""
        return f"at most {counted(self.max_participations, 'time')} (k)"

    @property
    def pattern(self) -> npt.NDArray[np.int64]:
        """The earliest pattern 0, b, 2b, …, (k-1)b, which is the worst one for most mechanisms."""
        return np.arange(self.max_participations, dtype=np.int64) * self.min_sep

    def check_steps(self, num_steps: int, owner: str) -> None:
        """Raise unless this participation has the ``num_steps`` of a workload or mechanism."""
        if self.num_steps != num_steps:
            raise ValueError(
                f"participation.num_steps must be the {owner}'s {num_steps}, got "
                f"{self.num_steps}; build both for the same number of steps"
            )

    def to_dict(self) -> dict[str, int]:
        """A plain dictionary, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, int]) -> Participation:
        """The inverse of ``to_dict``; raises a ``ValueError`` that names what is wrong."""
        names = ("num_steps", "min_sep", "max_participations")
        return Participation(**checks.fields("participation", data, names))
