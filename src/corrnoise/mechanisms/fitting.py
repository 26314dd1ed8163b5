r"""Fit the coefficients of a Toeplitz family to a workload: one optimiser for all of them.

The parameters of a family map free variables v to a noising series C⁻¹ = N/D. With u = AN/D the
decoder and c = D/N the strategy, both in terms of the same factors, we minimise over v

    log Σ_t w_t u_t² + log S(c),

with w from the error kind and S a squared sensitivity. For a factor q of N, ∂u/∂q_j is u/q delayed
by j, and ∂c/∂q_j is -c/q delayed by j; for a factor of D the signs are swapped. So the gradient
takes one filter and one set of lag products per factor: O(np), or O(n log n) where p is large.

*The certified error is minimised.* First S is the value that the pattern 0, b, 2b, … attains: a
smooth function in O(n) that is never above the certified one. If the two agree at its minimiser,
that point minimises the certified value as well. If they agree to 0.05 %, it is that close to the
least certified value. In both cases the search ends. Otherwise the certified bound itself is
minimised, with its absolute values smoothed, from stage to stage less. The result is the point with
the least certified error of all points seen, including the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from corrnoise import sensitivity as _sensitivity
from corrnoise.algebra import toeplitz
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms import solver
from corrnoise.mechanisms.errors import ErrorKind, coefficient_weights
from corrnoise.mechanisms.mechanism import Optimization
from corrnoise.mechanisms.solver import Solution, Solver
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]
SquaredSensitivity = Callable[[Array], tuple[float, Array]]
Trace = Callable[[float], None]

# The objective, a log squared error, is cut off at its value at the start plus this. A trial step
# beyond has left the region where C and C⁻¹ are well-behaved, and the line search shortens it.
_WALL = 20.0
# A search that ends after fewer iterations has reached this bound in its first steps.
_FEW = 4
_TIGHT = 5e-4
_SOLVER = Solver(memory=40, iterations=600, tolerance=1e-12)
# Settings of a descent with estimates: in coordinates of unit curvature they are accurate within
# about this radius.
_ROUGH_RADIUS, _ROUGH_ITERATIONS, _ROUGH_TOLERANCE = 0.2, 15, 1e-5
# The smoothings of the certified bound, each with the tolerance of its search. The first prepares
# the second; without smoothing (0.0) the bound has kinks, where a line search gains little.
_SMOOTHINGS = {1e-3: 1e-7, 1e-5: 1e-11, 0.0: 1e-9}


class Parameters(Protocol):
    """The map from the free variables of a family to its noising series."""

    def series(self, variables: Array) -> Rational:
        """C⁻¹ for these variables."""
        ...

    def pull_back(self, variables: Array, factors: FactorGradients) -> Array:
        """The gradient with respect to the variables, from that with respect to the factors."""
        ...


@dataclass(frozen=True)
class FactorGradients:
    """Gradients with respect to the coefficients of each factor of N and of D."""

    numerator: tuple[Array, ...]
    denominator: tuple[Array, ...]


def optimize(
    name: str,
    parameters: Parameters,
    starts: tuple[Array, ...],
    workload: Workload,
    participation: Participation,
    over: ErrorKind,
    *,
    radius: float,
    trace: Trace | None = None,
) -> ToeplitzMechanism:
    """The member of a family with the least certified error found by a search from the best start.

    Args:
        name: the mechanism's name.
        parameters: the map from variables to series.
        starts: the starts of the search; the result is never worse than the best of them.
        workload: A.
        participation: n, b, k.
        over: which rmse to minimise.
        radius: the length of the first step.
        trace: called with the error that is minimised, at the start and after each step.
    """
    fit = _Fit(name, parameters, workload, participation, over, trace)
    for start in starts:
        fit.certify(start)
    if fit.best_error == math.inf:
        raise OverflowError(
            f"workload must have an error in the range of floats, but that of {name} is beyond it "
            "at every start; scale the workload"
        )
    before = fit.best_error
    status = fit.search(fit.best_variables, fit.attained, radius, _SOLVER.tolerance)
    if not status.tight:
        for smoothing, tolerance in _SMOOTHINGS.items():
            square = fit.certified(smoothing)
            status = fit.search(fit.best_variables, square, radius, tolerance)
    found = Optimization(
        converged=status.converged,
        message=status.message,
        evaluations=fit.evaluations,
        start=before,
        final=fit.best_error,
        participation=participation,
    )
    return ToeplitzMechanism(name, workload, parameters.series(fit.best_variables), found)


def descend(
    name: str,
    parameters: Parameters,
    start: Array,
    workload: Workload,
    participation: Participation,
    square: SquaredSensitivity,
) -> ToeplitzMechanism:
    """A mechanism with less error than at ``start``, with ``square`` as the squared sensitivity.

    ``square`` is an estimate and may be infinite far from the start, so nothing is certified and a
    rough optimum is enough. The parameters have about unit curvature.
    """
    fit = _Fit(name, parameters, workload, participation, "mean")
    found = solver.descend(
        lambda v: fit.objective(v, square, math.inf),
        start,
        radius=_ROUGH_RADIUS,
        iterations=_ROUGH_ITERATIONS,
        tolerance=_ROUGH_TOLERANCE,
    )
    return ToeplitzMechanism(name, workload, parameters.series(found))


@dataclass(frozen=True)
class _Status:
    converged: bool
    message: str
    tight: bool  # whether attained and certified value agree where the search ended


class _Fit:
    """The state of one optimisation: the objective and the best certified point so far."""

    def __init__(
        self,
        name: str,
        parameters: Parameters,
        workload: Workload,
        participation: Participation,
        over: ErrorKind,
        trace: Trace | None = None,
    ) -> None:
        self.name, self.parameters, self.workload = name, parameters, workload
        self.participation, self.trace = participation, trace
        self.over: ErrorKind = over
        self.weights = coefficient_weights(workload.num_steps, over)
        self.evaluations = 0
        self.best_error = math.inf
        self.best_variables = np.zeros(0)

    def attained(self, strategy_coef: Array) -> tuple[float, Array]:
        return _sensitivity.attained_gradient(strategy_coef, self.participation)

    def certified(self, smoothing: float) -> SquaredSensitivity:
        return lambda c: _sensitivity.autocorrelation(c, self.participation, smoothing)

    def certify(self, variables: Array) -> bool:
        """Certify a point, and keep it if it has the least certified error so far.

        Returns whether 0, b, 2b, … attains the certified sensitivity of this point to 0.05 %.
        """
        mechanism = ToeplitzMechanism(self.name, self.workload, self.parameters.series(variables))
        try:
            error = mechanism.rmse(self.participation, self.over)
        except OverflowError:
            return False
        if error < self.best_error:
            self.best_error, self.best_variables = error, variables
        value = mechanism.sensitivity(self.participation).value
        attained = _sensitivity.attained(mechanism.strategy_coef, self.participation)
        return value <= math.sqrt(attained) * (1.0 + _TIGHT)

    def search(
        self, start: Array, square: SquaredSensitivity, radius: float, tolerance: float
    ) -> _Status:
        """Minimise from ``start``, and certify the point that was found."""
        before = self.best_error
        result = self.minimize(start, square, radius, tolerance)
        tight = self.certify(result.point)
        # At a kink of the certified bound the line search fails although the optimum is reached.
        stalled = self.best_error > before * (1.0 - 1e-6)
        return _Status(result.converged or stalled, result.message, tight)

    def minimize(
        self, start: Array, square: SquaredSensitivity, radius: float, tolerance: float
    ) -> Solution:
        """Run L-BFGS from ``start``, and again with a shorter first step if it stops at once."""
        point = start
        first = self.objective(start, square, math.inf)[0]
        self.report(first)
        wall = first + _WALL
        while True:
            base, scale = point, radius

            def scaled(s: Array, base: Array = base, scale: float = scale) -> tuple[float, Array]:
                value, gradient = self.objective(base + scale * s, square, wall)
                return value, scale * gradient

            lbfgs = replace(_SOLVER, tolerance=tolerance)
            result = lbfgs.minimize(scaled, np.zeros_like(start), self.report)
            point = base + scale * result.point
            if result.iterations >= _FEW or radius < 1e-5:
                return replace(result, point=point)
            radius /= 10.0

    def report(self, objective: float) -> None:
        """Pass the error that belongs to this objective to the trace."""
        if self.trace is not None:
            self.trace(math.exp(objective / 2.0))

    def objective(
        self, variables: Array, square: SquaredSensitivity, wall: float
    ) -> tuple[float, Array]:
        """The logarithm of the squared error, at most ``wall``, and its gradient."""
        self.evaluations += 1
        n = self.workload.num_steps
        noising = self.parameters.series(variables)
        with np.errstate(over="ignore", invalid="ignore"):
            u = (noising * self.workload.series).coef(n)
            c = noising.reciprocal.coef(n)
            weighted = self.weights * u
            error = toeplitz.dot(weighted, u)
            column = toeplitz.dot(c, c)
        if not (
            error < math.inf and column < math.inf and math.log(error) + math.log(column) < wall
        ):
            return wall, np.zeros_like(variables)
        sens, sens_slope = square(c)
        if sens == math.inf:
            return wall, np.zeros_like(variables)
        error_slope = weighted * (2.0 / error)
        sens_slope = sens_slope / sens

        def slope(factor: Array) -> Array:
            by_error = toeplitz.lag_products(
                error_slope, toeplitz.divide(u, factor, n), factor.size
            )
            by_sens = toeplitz.lag_products(sens_slope, toeplitz.divide(c, factor, n), factor.size)
            return by_error - by_sens

        gradients = FactorGradients(
            tuple(slope(q) for q in noising.numerator),
            tuple(-slope(q) for q in noising.denominator),
        )
        return math.log(error) + math.log(sens), self.parameters.pull_back(variables, gradients)
