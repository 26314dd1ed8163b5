"""Measure one way of jax-privacy: ``python theirs.py CASE N REPEAT_UNDER_S`` prints lines of JSON.

Runs in the environment that ``environment.py`` makes. float64 is on throughout (JAX_ENABLE_X64),
so that no difference in error comes from rounding the result to float32.
"""

from __future__ import annotations

import os

os.environ["JAX_ENABLE_X64"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import cases
from worker import emit, limit_memory, peak_mib, timed, warm

MEMORY_GIB = 12.0
NUM_BANDS = 4

# Whether what comes back holds coefficients of C⁻¹, coefficients of C, or C itself.
KINDS = {
    cases.BANDED_TOEPLITZ: "strategy",
    cases.LISTING: "noising",
    cases.LISTING_LONG: "noising",
    cases.LEAN: "noising",
    cases.LEAN_LONG: "noising",
    cases.BUFFERED: "strategy",
    cases.NOISING_COEFS: "noising",
    cases.STRATEGY_COEFS: "strategy",
    cases.DENSE_EPOCHS: "matrix",
    cases.DENSE_BANDED: "matrix",
}


def builder(case: str, n: int, k: int) -> Callable[[], Any]:
    from jax_privacy import matrix_factorization as mf

    b = n // k
    return {
        cases.BANDED_TOEPLITZ: lambda: mf.toeplitz.optimize_banded_toeplitz(n, b),
        cases.LISTING: lambda: listing(n, k, 20, lean=False),
        cases.LISTING_LONG: lambda: listing(n, k, 250, lean=False),
        cases.LEAN: lambda: listing(n, k, 20, lean=True),
        cases.LEAN_LONG: lambda: listing(n, k, 250, lean=True),
        cases.BUFFERED: lambda: mf.buffered_toeplitz.optimize(
            n=n, min_sep=b, max_participations=k, error="mean", min_buffers=4, max_buffers=4
        ),
        cases.NOISING_COEFS: lambda: mf.toeplitz.optimal_max_error_noising_coefs(NUM_BANDS),
        cases.STRATEGY_COEFS: lambda: mf.toeplitz.optimal_max_error_strategy_coefs(b),
        cases.DENSE_EPOCHS: lambda: mf.dense.optimize(n, epochs=k),
        cases.DENSE_BANDED: lambda: mf.dense.optimize(n, bands=b, equal_norm=True),
    }[case]


def listing(n: int, k: int, steps: int, *, lean: bool) -> Any:
    """Band-Inv-MF as the paper's listing has it, with names that exist in jax-privacy 2.0.0.

    The listing pads C⁻¹ to n terms before it inverts it, and multiplies by an explicit workload:
    both O(n²). ``lean`` inverts the four terms alone and sums in place of the multiplication, the
    quickest way that the library offers; the loss is the same function.
    """
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import optimization, toeplitz

    workload = None if lean else jnp.ones(n)

    def loss(coef: Any) -> Any:
        padded = jnp.pad(coef, (0, n - coef.size))
        error = toeplitz.per_query_error(
            noising_coef=padded, n=n, workload_coef=workload, skip_checks=True
        )
        strategy = toeplitz.inverse_coef(coef if lean else padded, n)
        square = toeplitz.minsep_sensitivity_squared(strategy, n // k, k, n, skip_checks=True)
        return square * jnp.mean(error)

    start = [1.0]
    for j in range(1, NUM_BANDS):
        start.append(start[-1] * (j - 1.5) / j)
    return optimization.optimize(loss, jnp.array(start), max_optimizer_steps=steps)


def main(case: str, n: int, repeat_under_s: float) -> None:
    """Time the import and the first call; then, where that was short enough, a second call."""
    limit_memory(MEMORY_GIB)
    jax, import_s = timed(_library)
    build = builder(case, n, cases.MAX_PARTICIPATIONS)

    def call() -> Any:
        return jax.block_until_ready(build())

    result, first_s = timed(call)
    coef = result.toeplitz_coefs(n) if case == cases.BUFFERED else result
    emit(
        import_s=import_s,
        first_s=first_s,
        kind=KINDS[case],
        coef=coef.tolist(),
        peak_mib=peak_mib(),
        versions={name: version(name) for name in ("jax-privacy", "jax")},
    )
    if first_s < repeat_under_s:
        emit(warm_s=warm(call, first_s))


def _library() -> Any:
    import jax
    import jax_privacy.matrix_factorization  # noqa: F401

    return jax


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
