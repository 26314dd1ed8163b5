"""To jax_privacy and back: our mechanisms as its noising matrices, its strategies as ours."""

from __future__ import annotations

from typing import Any

import numpy as np

from corrnoise import _checks as checks
from corrnoise import _extras
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms import Mechanism, ToeplitzMechanism
from corrnoise.workloads import Workload

Array = Any

_NAME = "jax_privacy"


def to_jax_privacy(mechanism: Mechanism) -> Any:
    """C⁻¹ as a ``StreamingMatrix`` of jax_privacy, for its ``matrix_factorization_privatizer``.

    Its privatizer keeps p - 1 model-sized arrays for a banded C⁻¹ or a banded C. Its randomness is
    ``jax.random``, and it does not know the number of steps: past the last one it goes on.
    ``correlated_noise`` keeps nothing, and stops.

    Args:
        mechanism: Toeplitz, with p bands in C⁻¹ or in C. Its coefficients are those in float32.

    Raises:
        ValueError: neither matrix is banded.
    """
    if not isinstance(mechanism, ToeplitzMechanism):
        raise ValueError(
            f"mechanism must be Toeplitz, got {mechanism!r}; pass its dense C⁻¹, "
            "jnp.asarray(mechanism.noising), to jax_privacy as it is"
        )
    streaming = _extras.load("jax_privacy.matrix_factorization.streaming_matrix")
    toeplitz = _extras.load("jax_privacy.matrix_factorization.toeplitz")
    jnp = _extras.load("jax.numpy")
    run = mechanism.in_float32()
    n = run.num_steps
    if not run.recursive:
        coef = jnp.asarray(run.noising_coef[: run.noising_bands], jnp.float32)
        return _banded(streaming, jnp, coef)
    if run.strategy_bands < n:
        coef = jnp.asarray(run.strategy_coef[: run.strategy_bands], jnp.float32)
        return toeplitz.inverse_as_streaming_matrix(coef)
    raise ValueError(
        f"mechanism must have less than {n} bands in C or in C⁻¹, got {mechanism!r}; use "
        "jax_privacy's buffered_toeplitz for BLT"
    )


def from_jax_privacy(strategy: Any, workload: Workload, *, name: str = _NAME) -> Mechanism:
    """A strategy of jax_privacy as a mechanism, to be priced, planned and run here.

    The sensitivity is certified here; jax_privacy's is not used.

    Args:
        strategy: the Toeplitz coefficients of C (as of ``toeplitz.optimize_banded_toeplitz``), a
            ``BufferedToeplitz``, or the ``StreamingMatrix`` of a Toeplitz C⁻¹.
        workload: A, whose number of steps the mechanism gets.
        name: of the mechanism in tables and statements.

    Raises:
        ValueError: the strategy is not of these kinds, is not Toeplitz, or is not invertible.
    """
    n = workload.num_steps
    if hasattr(strategy, "multiply_next"):
        return _mechanism(name, workload, numerator=[_column(strategy, n)])
    if hasattr(strategy, "toeplitz_coefs"):
        coef = np.asarray(strategy.toeplitz_coefs(n), np.float64)
        return _mechanism(name, workload, denominator=[coef])
    coef = np.asarray(strategy, np.float64)
    if coef.ndim != 1:
        raise ValueError(
            "strategy must be Toeplitz coefficients of C, a BufferedToeplitz or a StreamingMatrix, "
            f"got an array of shape {coef.shape}; for a dense C use DenseMechanism"
        )
    return _mechanism(name, workload, denominator=[coef[:n]])


def _mechanism(name: str, workload: Workload, **factors: Any) -> Mechanism:
    (coef,) = next(iter(factors.values()))
    if not (coef.size and np.all(np.isfinite(coef)) and coef[0] > 0):
        raise ValueError(
            "strategy must have finite coefficients with a first one above 0, got "
            f"{coef[:4].tolist()}…; check what jax_privacy returned"
        )
    checks.text("name", name)
    return ToeplitzMechanism(name, workload, Rational.of(**factors))


def _column(matrix: Any, n: int) -> Any:
    """The coefficients of a Toeplitz matrix, or raise where it is another.

    The product with random signs shows a difference in any column: those of a banded C that was
    normalised differ in the last few steps alone.
    """
    jnp = _extras.load("jax.numpy")
    signs = np.random.default_rng(0).choice([-1.0, 1.0], n)
    vectors = np.stack([np.eye(n, 1)[:, 0], signs], axis=1)
    coef, product = np.asarray(matrix @ jnp.asarray(vectors, jnp.float32), np.float64).T
    expected = np.convolve(coef, signs)[:n]
    if not np.allclose(product, expected, rtol=0.0, atol=1e-5 * np.sum(np.abs(coef))):
        raise ValueError(
            "strategy must be a Toeplitz matrix, got a StreamingMatrix whose columns differ, such "
            "as a column-normalised one; pass its dense C to DenseMechanism"
        )
    last = int(np.flatnonzero(coef)[-1]) + 1 if np.any(coef) else 0
    return coef[:last]


def _banded(streaming: Any, jnp: Any, coef: Array) -> Any:
    """Multiplication by a banded Toeplitz matrix, one row at a time, with the last p - 1 inputs."""
    past = coef.shape[0] - 1

    def init(value: Array) -> Array:
        kind = jnp.promote_types(value.dtype, coef.dtype)
        return jnp.zeros((past, *value.shape), kind)  # the newest first

    def following(value: Array, state: Array) -> tuple[Array, Array]:
        result = coef[0] * value + jnp.tensordot(coef[1:], state, axes=1)
        return result, jnp.concatenate([value[None].astype(state.dtype), state])[:past]

    return streaming.StreamingMatrix.from_array_implementation(init, following)
