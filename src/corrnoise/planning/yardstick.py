r"""The error that no factorization can beat at a budget, for the samplings where that is known.

Let L = ``lower_bound(workload, participation)``. Its proof takes a random participation u (a bin of
steps j, j+b, j+2b, …, uniform over j, with a unit vector for each step) and shows for every A = BC

    ‖B‖_F/√n · max_j ‖CU_j‖_F ≥ L,

where U_j is the participation in bin j. So wherever (ε, δ)-DP forces ‖CU_j‖_F ≤ μ*·σ for all j, the
error σ·‖B‖_F/√n of *every* factorization is at least L/μ*.

* *Fixed batches*: an example may be in any one bin. Telling it from no example is telling
  N(CU_j, σ²) from N(0, σ²), and μ* = μ(ε, δ), the exact Gaussian.
* *Balls-in-bins*: with the example the output is the mixture P = (1/b) Σ_j N(CU_j, σ²), without it
  Q = N(0, σ²). P ≥ N(CU_j, σ²)/b, so for every set S

      P(S) - e^ε Q(S) ≥ (1/b)·(N(CU_j, σ²)(S) - b·e^ε Q(S)),

  and the best S gives δ ≥ δ_Gauss(ε + log b, ‖CU_j‖/σ)/b. Hence μ* = μ(ε + log b, bδ). It holds for
  any signs of C, and says nothing where bδ ≥ 1.
* *Poisson, cyclic Poisson*: nothing is proven here.
"""

from __future__ import annotations

import math

from corrnoise.accounting import Sampling, gaussian
from corrnoise.bounds import lower_bound
from corrnoise.participation import Participation
from corrnoise.workloads import Workload


def least_error(
    workload: Workload,
    participation: Participation,
    *,
    epsilon: float,
    delta: float,
    sampling: Sampling,
) -> float | None:
    """An error per unit of clip norm below which no (ε, δ)-DP factorization can be.

    ``None`` where no bound is known.

    >>> import corrnoise as cn
    >>> part = cn.Participation(64, 16, 4)
    >>> setting = {"epsilon": 2.0, "delta": 1e-6, "sampling": "fixed"}
    >>> bound = least_error(cn.workloads.prefix_sum(64), part, **setting)
    >>> m = cn.mechanisms.band_mf(cn.workloads.prefix_sum(64), part, num_bands=16)
    >>> round(bound, 2), round(cn.calibrate(m, part, **setting).rmse(), 2)
    (9.7, 10.48)
    """
    b = participation.min_sep
    if sampling == "fixed":
        most = gaussian.mu(epsilon, delta)
    elif sampling == "balls-in-bins" and b * delta < 1.0:
        most = gaussian.mu(epsilon + math.log(b), b * delta)
    else:
        return None
    return lower_bound(workload, participation) / most
