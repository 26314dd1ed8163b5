"""L-BFGS, as every optimised mechanism uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """Where the solver stopped, and why."""

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
        tolerance: the search has converged when the relative decrease of the function is below it.
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
