r"""A rational series as recursions that run step by step in float32.

A section n(x)/d(x) with s past values w computes

    w_i = x_i/d_0 - Σ_{t=1..s} (d_t/d_0)·w_{i-t}
    y_i = (n_0/d_0)·x_i + Σ_{t=1..s} (n_t - n_0·d_t/d_0)·w_{i-t},

which is w = x/d(x), y = n(x)·w with the leading term taken out. The difference n_t - n_0·d_t/d_0 is
computed once, in float64, and not at each step between large numbers: poles and zeros near 1 need
this. A banded C has one section with n = 1; a BLT has one section, with one past value, for each
pair of a pole and a zero.

The coefficients of a section are float32, as every backend runs them. ``in_float32`` gives the
series that is actually run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from corrnoise.algebra.rational import Rational

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Section:
    """One recursion w_i = gain·x_i + Σ feedback[t]·w, y_i = direct·x_i + Σ output[t]·w.

    Attributes:
        gain: 1/d_0.
        direct: n_0/d_0.
        feedback: the weights of w_{i-s}, …, w_{i-1} (oldest first) in w_i, float32.
        output: their weights in y_i, in the same order, float32.
        recursive: whether any feedback is not 0.
        passes: whether y = w, so that only one of them is computed.
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


def sections(series: Rational) -> tuple[Section, ...]:
    """The recursions of a series, one for each pair of factors; each runs on the one before it."""
    one = np.ones(1)
    pairs = zip_longest(series.numerator, series.denominator, fillvalue=one)
    return tuple(_section(numerator, denominator) for numerator, denominator in pairs)


def in_float32(series: Rational) -> Rational:
    """The series that the sections of ``series`` compute, with their float32 coefficients.

    The sections of the result have the same coefficients to the last bit, so that a second call
    changes nothing.
    """
    numerators, denominators = zip(*map(_series, sections(series)), strict=True)
    return Rational.of(_unless_one(numerators), _unless_one(denominators))


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
    """Numerator and denominator of the series that a section computes with its coefficients.

    Both are divided by the gain, so that ``_section`` recovers the same float32 values from them.
    """
    gain, direct = float(np.float32(section.gain)), float(np.float32(section.direct))
    d = np.concatenate([[1.0], -section.feedback[::-1].astype(np.float64)])
    if section.passes:
        return np.ones(1), d / gain
    n = (direct / gain) * d
    n[1:] += section.output[::-1].astype(np.float64)
    return n, (d if section.recursive else np.ones(1)) / gain


def _unless_one(factors: tuple[Array, ...]) -> tuple[Array, ...]:
    """The factors, or none if each of them is the constant 1: a banded C has no numerator."""
    return () if all(f.size == 1 and f[0] == 1.0 for f in factors) else factors
