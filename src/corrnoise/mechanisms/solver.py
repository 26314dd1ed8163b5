"""L-BFGS with the settings of the optimised mechanisms, and a short BFGS for local estimates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """The point where the solver stopped, and the reason."""

    point: Array
    converged: bool
    message: str
    iterations: int
    evaluations: int


@dataclass(frozen=True)
class Solver:
    """Settings of L-BFGS.

    Attributes:
        memory: how many steps approximate the Hessian.
        iterations: the largest number of iterations.
        tolerance: the search has converged once the relative decrease of the function is below it.
    """

    memory: int
    iterations: int
    tolerance: float

    def minimize(
        self,
        function: Callable[[Array], tuple[float, Array]],
        start: Array,
        trace: Callable[[float], None] | None = None,
    ) -> Solution:
        """Minimise a function that returns its value and gradient; ``trace`` gets each value."""
        from scipy.optimize import (  # deferred, like all of SciPy, for a quick import
            OptimizeResult,
            minimize,
        )

        def step(intermediate_result: OptimizeResult) -> None:
            if trace is not None:
                trace(float(intermediate_result.fun))

        result = minimize(
            function,
            start,
            jac=True,
            method="L-BFGS-B",
            callback=step,
            options={
                "maxcor": self.memory,
                "maxiter": self.iterations,
                "maxfun": 2 * self.iterations,
                "ftol": self.tolerance,
                "gtol": 0.0,
            },
        )
        return Solution(
            point=np.asarray(result.x, dtype=np.float64),
            converged=bool(result.success),
            message=str(result.message),
            iterations=int(result.nit),
            evaluations=int(result.nfev),
        )


# A step is shortened at most this often, by this factor, until the function falls by this fraction
# of the decrease that its slope predicts.
_TRIES, _SHORTER, _DECREASE = 5, 0.3, 1e-4


def descend(
    function: Callable[[Array], tuple[float, Array]],
    start: Array,
    *,
    radius: float,
    iterations: int,
    tolerance: float,
) -> Array:
    """A point with a smaller value, by BFGS; the function may be infinite far from the start.

    After a step had to be shortened, later steps are limited too, so that few of them end where the
    function is infinite.

    Args:
        function: returns its value and gradient; the value may be infinite, except at the start.
        start: where to begin, in coordinates with about the same curvature in all directions.
        radius: the length of the longest step.
        iterations: the largest number of steps.
        tolerance: a step with a smaller predicted decrease is not taken.
    """
    point, longest = start, radius
    value, gradient = function(start)
    inverse = np.eye(start.size)
    for _ in range(iterations):
        step = -(inverse @ gradient)
        step *= min(1.0, longest / max(float(np.linalg.norm(step)), 1e-300))
        slope = float(gradient @ step)
        if -slope < tolerance:
            break
        for _ in range(_TRIES):
            next_value, next_gradient = function(point + step)
            if next_value <= value + _DECREASE * slope:
                break
            step, slope = _SHORTER * step, _SHORTER * slope
        else:
            break
        longest = min(radius, 2.0 * float(np.linalg.norm(step)))
        change = next_gradient - gradient
        curvature = float(step @ change)
        point, value, gradient = point + step, next_value, next_gradient
        if curvature > 1e-10 * math.sqrt(float(step @ step) * float(change @ change)):
            keep = np.eye(start.size) - np.outer(step, change) / curvature
            inverse = keep @ inverse @ keep.T + np.outer(step, step) / curvature
    return point
