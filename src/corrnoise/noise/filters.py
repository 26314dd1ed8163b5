r"""C⁻¹ as a filter that runs step by step: weights on past z, or a cascade of short recursions.

A section n(x)/d(x) with s past values w keeps

    w_i = x_i/d_0 - Σ_{t=1..s} (d_t/d_0)·w_{i-t}
    y_i = (n_0/d_0)·x_i + Σ_{t=1..s} (n_t - n_0·d_t/d_0)·w_{i-t},

which is w = x/d(x), y = n(x)·w with the leading term taken out: n_t - n_0·d_t/d_0 is formed once,
in float64, and not at each step between large numbers, as poles and zeros near 1 need. A banded C
is one section with n = 1, a BLT one section with one past value for each pole and zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.rational import Rational

Array = npt.NDArray[np.float64]
AnyMechanism = Mechanism | DenseMechanism


@dataclass(frozen=True, eq=False)
class Section:
    """One recursion w_i = gain·x_i + Σ feedback[t]·w, y_i = direct·x_i + Σ output[t]·w.

    Attributes:
        gain: 1/d_0.
        direct: n_0/d_0.
        feedback: what w_{i-s}, …, w_{i-1} (oldest first) add to w_i, float32.
        output: what they add to y_i, likewise.
        recursive: whether any feedback is not 0.
        passes: whether y = w, so that it is computed once.
    """

    gain: float
    direct: float
    feedback: npt.NDArray[np.float32]
    output: npt.NDArray[np.float32]
    recursive: bool
    passes: bool

    @property
    def num_past(self) -> int:
        """Number of past values, s."""
        return self.feedback.size


@dataclass(frozen=True, eq=False)
class Filter:
    """How the noise of a step is made from z: everything a backend needs to know of a mechanism.

    Attributes:
        num_steps: n.
        num_terms: p where C⁻¹ is banded and the past of z is enough; ``None`` for a recursion.
        num_past: the model-sized vectors that a recursion keeps; 0 for a banded C⁻¹.
    """

    mechanism: AnyMechanism
    num_steps: int
    num_terms: int | None
    num_past: int

    @staticmethod
    def of(mechanism: AnyMechanism) -> Filter:
        """The filter of a mechanism, Toeplitz or dense."""
        n = mechanism.num_steps
        if isinstance(mechanism, DenseMechanism):
            _check_finite(mechanism.noising)
            return Filter(mechanism, n, None, _num_bands(mechanism.strategy) - 1)
        _check_finite(mechanism.noising_coef)
        if mechanism.noising.denominator_terms == 1:
            return Filter(mechanism, n, min(n, mechanism.noising.numerator_terms), 0)
        past = sum(section.num_past for section in _sections(mechanism.noising))
        return Filter(mechanism, n, None, past)

    @property
    def num_sections(self) -> int:
        """How many recursions run one after the other."""
        if self.num_terms or isinstance(self.mechanism, DenseMechanism):
            return 1
        return len(self._constant_sections)

    def to_bytes(self) -> bytes:
        """Every coefficient, to tell one mechanism from another."""
        if isinstance(self.mechanism, DenseMechanism):
            return b"dense" + self.mechanism.strategy.tobytes()
        series = self.mechanism.noising
        parts = [f.tobytes() for f in series.numerator] + [b"/"]
        return b"|".join(parts + [f.tobytes() for f in series.denominator])

    @cached_property
    def _constant_sections(self) -> tuple[Section, ...]:
        assert isinstance(self.mechanism, Mechanism)
        return _sections(self.mechanism.noising)

    def weights(self, step: int) -> npt.NDArray[np.float32]:
        """Row ``step`` of C⁻¹ from its first non-zero entry on: what z_{step-len+1}, …, z_step get.

        At most p entries for a banded C⁻¹, step + 1 for any other.
        """
        if isinstance(self.mechanism, DenseMechanism):
            row = self.mechanism.noising[step, : step + 1]
        else:
            row = self.mechanism.noising_coef[: min(step + 1, self.num_terms or step + 1)][::-1]
        return np.asarray(row, dtype=np.float32)

    def sections(self, step: int) -> tuple[Section, ...]:
        """The recursions of a step, to be run one after the other."""
        if isinstance(self.mechanism, DenseMechanism):
            past = min(step, self.num_past)
            row = self.mechanism.strategy[step, step - past : step + 1][::-1]
            column = np.zeros(self.num_past + 1)
            column[: row.size] = row
            return _sections(Rational((), (column,)))
        return self._constant_sections

    @cached_property
    def realized(self) -> AnyMechanism:
        """The mechanism that this filter runs: its coefficients are rounded to float32.

        Near a pole or zero at 1 that rounding moves the sensitivity far more than float64 would,
        so a guarantee is priced for this mechanism. Its own filter has the same coefficients to
        the last bit, so that realising it changes nothing.
        """
        if isinstance(self.mechanism, DenseMechanism):
            rows = [self.sections(step)[0] for step in range(self.num_steps)]
            strategy = np.zeros_like(self.mechanism.strategy)
            for step, section in enumerate(rows):
                past = min(step, self.num_past)
                strategy[step, step] = 1.0
                strategy[step, step - past : step] = -section.feedback[self.num_past - past :]
                strategy[step] /= np.float32(section.gain)
            strategy.flags.writeable = False
            return replace(self.mechanism, strategy=strategy)
        p = self.num_terms
        sections = self._constant_sections if p is None else self.window(p - 1)
        numerators, denominators = zip(*map(_series, sections), strict=True)
        series = Rational.of(_unless_one(numerators), _unless_one(denominators))
        return replace(self.mechanism, noising=series)

    def window(self, num_past: int) -> tuple[Section, ...]:
        """The newest terms of a banded C⁻¹ as a section whose past values are z: a ring buffer."""
        assert isinstance(self.mechanism, Mechanism)
        return _sections(Rational((self.mechanism.noising_coef[: num_past + 1],), ()))


def _sections(series: Rational) -> tuple[Section, ...]:
    one = np.ones(1)
    pairs = zip_longest(series.numerator, series.denominator, fillvalue=one)
    return tuple(_section(numerator, denominator) for numerator, denominator in pairs)


def _section(numerator: Array, denominator: Array) -> Section:
    size = max(numerator.size, denominator.size)
    n = np.concatenate([numerator, np.zeros(size - numerator.size)])
    d = np.concatenate([denominator, np.zeros(size - denominator.size)])
    d, gain = d / d[0], 1.0 / float(d[0])
    return Section(
        gain,
        float(n[0]) * gain,
        (-d[1:])[::-1].astype(np.float32),
        (n[1:] - n[0] * d[1:])[::-1].astype(np.float32),
        bool(np.any(d[1:])),
        numerator.size == 1 and float(n[0]) == 1.0,
    )


def _series(section: Section) -> tuple[Array, Array]:
    """Numerator and denominator of what a section computes, with the coefficients that it has.

    Both over the gain, so that ``_section`` finds the same float32 values in them again.
    """
    gain, direct = float(np.float32(section.gain)), float(np.float32(section.direct))
    d = np.concatenate([[1.0], -section.feedback[::-1].astype(np.float64)])
    if section.passes:
        return np.ones(1), d / gain
    n = (direct / gain) * d
    n[1:] += section.output[::-1].astype(np.float64)
    return n, (d if section.recursive else np.ones(1)) / gain


def _unless_one(factors: tuple[Array, ...]) -> tuple[Array, ...]:
    """No factors where their product is plainly 1: a banded C has no numerator."""
    return () if all(f.size == 1 and f[0] == 1.0 for f in factors) else factors


def _check_finite(coef: Array) -> None:
    if not np.all(np.abs(coef) <= float(np.finfo(np.float32).max)):  # false for NaN
        raise ValueError(
            "mechanism must have finite coefficients of C⁻¹ in float32, got one that is not; "
            "use fewer steps or other coefficients"
        )


def _num_bands(strategy: Array) -> int:
    rows, columns = np.nonzero(strategy)
    return int(np.max(rows - columns)) + 1
