"""C⁻¹ as a filter that runs step by step: weights on past z, or a cascade of short recursions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from corrnoise.algebra import sections as _sections
from corrnoise.algebra.rational import Rational
from corrnoise.algebra.sections import Section
from corrnoise.mechanisms import Mechanism


@dataclass(frozen=True, eq=False)
class Filter:
    """How the noise of a step is computed from z: all that a backend needs of a mechanism.

    Attributes:
        mechanism: the mechanism with this C⁻¹.
        num_terms: p if C⁻¹ is banded, so that only past z are needed; ``None`` for a recursion.
        num_past: the model-sized vectors that a recursion keeps; 0 for a banded C⁻¹.
        num_sections: how many recursions run one after the other.
    """

    mechanism: Mechanism
    num_terms: int | None
    num_past: int
    num_sections: int

    @staticmethod
    def of(mechanism: Mechanism) -> Filter:
        """The filter of a mechanism."""
        if not mechanism.largest_noising_entry <= float(np.finfo(np.float32).max):  # or NaN
            raise ValueError(
                "mechanism must have finite coefficients of C⁻¹ in float32, got one that is not; "
                "use fewer steps or other coefficients"
            )
        if not mechanism.recursive:
            return Filter(mechanism, min(mechanism.num_steps, mechanism.noising_bands), 0, 1)
        found = _sections.sections(mechanism.recursion(mechanism.num_steps - 1))
        return Filter(mechanism, None, sum(s.num_past for s in found), len(found))

    @property
    def num_steps(self) -> int:
        """Number of steps, n."""
        return self.mechanism.num_steps

    def weights(self, step: int) -> npt.NDArray[np.float32]:
        """Row ``step`` of C⁻¹ from its first non-zero entry: weights of z_{step-len+1}, …, z_step.

        At most p entries for a banded C⁻¹, step + 1 for any other.
        """
        return np.asarray(self.mechanism.noising_row(step), dtype=np.float32)

    def sections(self, step: int) -> tuple[Section, ...]:
        """The recursions of a step; each runs on the output of the one before it."""
        return _cached(self.mechanism.recursion(step))

    def window(self, num_past: int) -> tuple[Section, ...]:
        """The newest terms of a banded C⁻¹ as a section with past z as its values, for a ring."""
        row = self.mechanism.noising_row(self.num_steps - 1)
        return _cached(Rational((row[::-1][: num_past + 1],), ()))


@lru_cache(maxsize=8)
def _cached(series: Rational) -> tuple[Section, ...]:
    return _sections.sections(series)
