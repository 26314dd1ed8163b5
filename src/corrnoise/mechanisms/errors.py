"""The error of a release with decoder B = AC⁻¹, before the sensitivity scales it.

Step i of B·z, with z of unit variance, has the squared error ‖B[i, :]‖². The n values are reduced
to one number in three ways: the ``mean`` over the steps (the paper's E²), the ``last`` step, or the
``max`` over the steps.

For a Toeplitz B the errors grow with i, so ``last`` and ``max`` are the same.
"""

from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks

Array = npt.NDArray[np.float64]

ErrorKind = Literal["mean", "last", "max"]


def step_squares(decoder_coef: Array) -> Array:
    """‖B[i, :]‖² of each step for a Toeplitz B, O(n).

    >>> step_squares(np.array([1.0, 0.5, 0.5]))
    array([1.  , 1.25, 1.5 ])
    """
    return np.cumsum(decoder_coef**2)


def reduce_squares(squares: Array, kind: ErrorKind) -> float:
    """Reduce the squared errors of the steps to one number.

    >>> reduce_squares(np.array([1.0, 3.0, 2.0]), "mean")
    2.0
    """
    return float({"mean": np.mean, "last": _last, "max": np.max}[kind](squares))


def coefficient_weights(num_steps: int, kind: ErrorKind) -> Array:
    """The weights w with Σ_t w_t d_t² = reduce_squares(step_squares(d), kind)."""
    if kind == "mean":
        return np.arange(num_steps, 0, -1) / num_steps
    return np.ones(num_steps)


def check_kind(kind: object) -> ErrorKind:
    """Return ``kind`` if it is one of the three, or raise."""
    return cast(ErrorKind, checks.choice("over", kind, ("mean", "last", "max")))


def _last(squares: Array) -> float:
    return float(squares[-1])
