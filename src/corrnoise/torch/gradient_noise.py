r"""What the noise of a run does to the moments that an adaptive optimizer keeps.

Each coordinate of the gradient that the optimizer sees at step t is g_t + s·(C⁻¹z)_t, with
independent standard normals z and s = σ·clip norm/divisor. So all of this is known before the run:

    variance of the noise at step t                     s²·‖row t of C⁻¹‖²
    what it adds to the second moment, in expectation   s²·Σᵢ wᵢ·‖row i of C⁻¹‖²
    the most that this can vary, as a standard deviation   s²·(2·κ·Σᵢ wᵢ²)^½
    the equivalent independent noise                    s²·Σₜ‖row t of AC⁻¹‖²/Σₜ‖row t of A‖²

with wᵢ = (1 - β₂)β₂ᵗ⁻ⁱ/(1 - β₂ᵗ⁺¹), κ = maxᵢ Σⱼ (C⁻¹C⁻ᵀ)ᵢⱼ² and A what the optimizer does to
gradients, 1/((1 - x)(1 - β₁x)). The derivations are in docs/adam.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from corrnoise import workloads
from corrnoise.mechanisms import Mechanism

Array = npt.NDArray[np.float64]

# Steps from which κ is computed: further apart, noise is hardly correlated.
_WINDOW = 512


@dataclass(frozen=True)
class GradientNoise:
    """The noise in the gradients of a run, as its optimizer sees them.

    Attributes:
        mechanism: of the run, as it runs.
        scale: s, the noise multiplier times the clip norm over the divisor.
    """

    mechanism: Mechanism
    scale: float

    @cached_property
    def variances(self) -> Array:
        """Of the noise at each step, in each coordinate; length n."""
        return self.scale**2 * self._squares(momentum=0.0, decay=0.0)

    def second_moment(self, beta: float) -> Array:
        """What noise adds to the second moment after each step, bias-corrected; length n.

        Args:
            beta: β₂.
        """
        found = np.empty_like(self.variances)
        total = 0.0
        for step, variance in enumerate(self.variances):
            total = beta * total + (1.0 - beta) * variance
            found[step] = total / (1.0 - beta ** (step + 1))
        return found

    def deviations(self, beta: float) -> Array:
        """The most that the noise's part of the second moment varies, after each step; length n.

        Standard deviations: an upper bound, by Schur's test on the matrix (C⁻¹C⁻ᵀ)ᵢⱼ².

        Args:
            beta: β₂.
        """
        powers = beta ** np.arange(1.0, self.mechanism.num_steps + 1)
        squares = (1.0 - beta) / (1.0 + beta) * (1.0 + powers) / (1.0 - powers)
        return self.scale**2 * np.sqrt(2.0 * self._correlation * squares)

    def independent(self, beta: float) -> float:
        """The standard deviation of independent noise that would move the weights as far.

        That is, with the same mean over the steps of the squared error of the weights, for an
        optimizer with the first beta β₁ whose denominators stay constant.

        Args:
            beta: β₁.
        """
        whole = workloads.sgd(self.mechanism.num_steps, momentum=beta)
        alone = np.cumsum(whole.coef**2)
        ours = self._squares(momentum=beta, decay=1.0)
        return self.scale * math.sqrt(ours.sum() / alone.sum())

    @cached_property
    def _correlation(self) -> float:
        """The constant κ."""
        rows = self.mechanism.noising_matrix(min(self.mechanism.num_steps, _WINDOW))
        return float(np.max(np.sum((rows @ rows.T) ** 2, axis=1)))

    def _squares(self, *, momentum: float, decay: float) -> Array:
        """The squared norms of the rows of AC⁻¹ for a workload A."""
        workload = workloads.sgd(self.mechanism.num_steps, momentum=momentum, decay=decay)
        return replace(self.mechanism, workload=workload).step_squares
