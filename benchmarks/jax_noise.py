"""Time and memory of the noise in JAX beside a plain copy and, on a CUDA device, our own kernel.

    python benchmarks/jax_noise.py --size 28 --bands 1 4 16 [--variant four-warps rolled ...]

It prints JSON: for each number of bands the milliseconds of one update, their ratio to a copy and
to the kernel for torch, the bytes of temporary memory, the seconds of compilation, and the largest
error of a normal among 2^22. The arrays are float32 and are updated in place; nothing is stored
between steps. A variant is a layout of the kernel for CUDA devices; elsewhere all are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import jax
import jax.numpy as jnp
import numpy as np

import corrnoise as cn
from corrnoise.jax import correlated_noise, pallas_kernel, secret_words

KEY = cn.noise.Key.from_bytes(bytes(range(32)))
VARIANTS = {
    "four-warps": pallas_kernel.DEFAULT,
    "two-warps": pallas_kernel.Layout(lanes=64, warps=2),
    "one-warp": pallas_kernel.Layout(lanes=32, warps=1),
    "rolled": pallas_kernel.Layout(lanes=32, warps=1, unroll=1),
    "unrolled": pallas_kernel.Layout(lanes=32, warps=1, unroll=9),
}
CALLS = 10  # in a row, so that launches overlap; the device is waited for once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=28, help="log2 of the number of parameters")
    parser.add_argument("--bands", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=["four-warps"])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    size = 1 << given.size
    copied = time_of(copies(size), given.repeats)
    rows = []
    for bands in given.bands:
        mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(1000), num_bands=bands)
        torch_ms = time_of(in_torch(mechanism, size), given.repeats)
        for variant in given.variant:
            pallas_kernel.DEFAULT = VARIANTS[variant]
            jax.clear_caches()
            found = measure(mechanism, size, given.repeats)
            found["copies"] = found["ms"] / copied
            if torch_ms is not None:
                found |= {"torch_ms": torch_ms, "of_torch": found["ms"] / torch_ms}
            rows.append({"bands": bands, "variant": variant, **found})
    print(json.dumps({**machine(), "size": size, "copy_ms": copied, "rows": rows}, indent=2))


def time_of(calls: Callable[[], None] | None, repeats: int) -> float | None:
    """The median milliseconds of one of ``CALLS`` calls in a row."""
    if calls is None:
        return None
    calls()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        calls()
        times.append((time.perf_counter() - begun) / CALLS * 1e3)
    return statistics.median(times)


def copies(size: int) -> Callable[[], None]:
    """Read an array and write another."""
    copy = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    held = [jnp.zeros(size)]

    def calls() -> None:
        for _ in range(CALLS):
            held[0] = copy(held[0])
        held[0].block_until_ready()

    return calls


def measure(mechanism: Any, size: int, repeats: int) -> dict[str, float]:
    noise = correlated_noise(mechanism, KEY, scale=1.0)
    held: list[Any] = [jnp.zeros(size)]
    state, secret = noise.init(held[0]), secret_words(KEY)
    # A step where no weight is 0, and the same for all calls.
    state = type(state)(jnp.int32(500), state.layout)
    update = jax.jit(lambda g, s, k: noise.update(g, s, secret=k)[0], donate_argnums=0)
    begun = time.perf_counter()
    compiled = update.lower(held[0], state, secret).compile()
    seconds = time.perf_counter() - begun
    check(mechanism, compiled(held[0], state, secret), held)
    error = worst_error(secret, size)

    def calls() -> None:
        for _ in range(CALLS):
            held[0] = compiled(held[0], state, secret)
        held[0].block_until_ready()

    memory = compiled.memory_analysis()
    return {
        "ms": time_of(calls, repeats),
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_s": seconds,
        "worst_error": error,
    }


def check(mechanism: Any, found: Any, held: list[Any]) -> None:
    """What is timed must be the noise of the stream."""
    expected = cn.noise.CorrelatedNoise(mechanism, KEY).row(500, 0, 4096)
    far = float(np.abs(np.asarray(found[:4096]) - expected).max())
    if not far < 1e-5:
        raise SystemExit(f"the noise differs from the stream by {far}")
    held[0] = found


def worst_error(secret: Any, size: int) -> float:
    """The largest difference of a normal from the definition, computed in float64."""
    count = min(size, 1 << 22)
    plain = correlated_noise(cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(1)), KEY, scale=1.0)
    zeros = jnp.zeros(count)
    found = jax.jit(plain.update)(zeros, plain.init(zeros), secret=secret)[0]
    exact = cn.noise.NoiseStream(KEY).normals(0, 0, count, np.float64)
    return float(np.abs(np.asarray(found, np.float64) - exact).max())


def in_torch(mechanism: Any, size: int) -> Callable[[], None] | None:
    """Our kernel for torch, or ``None`` without a CUDA device."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    grad = torch.zeros(size, device="cuda")
    noise = cn.noise.CorrelatedNoise(mechanism, KEY)

    def calls() -> None:
        for _ in range(CALLS):
            noise.add_([grad], 500, 1.0)
        torch.cuda.synchronize()

    return calls


def machine() -> dict[str, Any]:
    versions = {}
    for name in ("jax", "jaxlib", "optax", "torch", "triton", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "python": platform.python_version(),
        "versions": versions,
    }


if __name__ == "__main__":
    main()
