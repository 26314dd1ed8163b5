"""Put what jax-privacy returns on our scale: certified sensitivity, exact error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import corrnoise as cn
from corrnoise import sensitivity
from corrnoise.algebra import toeplitz
from corrnoise.algebra.rational import Rational


def price(answer: Mapping[str, Any], participation: cn.Participation) -> dict[str, float]:
    """The certified rmse of these coefficients on the prefix sum, and its sensitivity's gap."""
    n = participation.num_steps
    workload = cn.workloads.prefix_sum(n)
    coef = np.asarray(answer["coef"], dtype=np.float64)
    if answer["kind"] == "matrix":
        sens = sensitivity.of_matrix(coef, participation)
        decoder = np.linalg.solve(coef.T, toeplitz.matrix(workload.coef).T).T
        return {"rmse": sens.value * math.sqrt(np.sum(decoder**2) / n), "gap": sens.gap}
    factors = {"numerator" if answer["kind"] == "noising" else "denominator": [coef]}
    mechanism = cn.mechanisms.ToeplitzMechanism("jax-privacy", workload, Rational.of(**factors))
    return {
        "rmse": mechanism.rmse(participation),
        "gap": mechanism.sensitivity(participation).gap,
    }
