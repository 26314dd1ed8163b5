"""Time of an exact release beside the plain noise of the same plan, measured in one run.

    python benchmarks/exact.py                      # on the CPU
    python benchmarks/exact.py --device cuda

For each size of a model and number of bands p: the median time of ``CorrelatedNoise.add_`` on
float32 sums and of ``ExactNoise.add_`` on float64 sums, nothing kept between steps, and how many
entries float64 left undecided in all repetitions. JSON on the standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from corrnoise import mechanisms, workloads
from corrnoise.noise import CorrelatedNoise, Key
from corrnoise.noise.exact import ExactNoise

NUM_STEPS = 64
SIZES = (10**6, 10**7)
BANDS = (1, 4, 16)


class Counted(ExactNoise):
    """Counts the entries that arbitrary precision decides."""

    undecided = 0

    def nearest(self, value: float, index: int, release: Any) -> int:
        """As there."""
        self.undecided += 1
        return super().nearest(value, index, release)


def mechanism(bands: int) -> Any:
    workload = workloads.prefix_sum(NUM_STEPS)
    if bands == 1:
        return mechanisms.dp_sgd(workload).in_float32()
    return mechanisms.bisr(workload, num_bands=bands).in_float32()


def median_ms(function: Callable[[int], None], device: torch.device, repeats: int) -> float:
    times = []
    for number in range(repeats + 1):  # the first one compiles and allocates
        _wait(device)
        start = time.perf_counter()
        function(NUM_STEPS - 1 - number)
        _wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(size: int, bands: int, device: torch.device, threads: int, repeats: int) -> Any:
    key, run = Key.from_bytes(bytes(range(32))), mechanism(bands)
    plain = CorrelatedNoise(run, key, threads=threads)
    exact = Counted(run, key, threads=threads)
    narrow = torch.randn(size, device=device)
    wide = narrow.double()
    plain_ms = median_ms(lambda step: plain.add_([narrow], step, 1.0), device, repeats)
    exact_ms = median_ms(lambda step: exact.add_([wide], step, 1.0), device, repeats)
    return {
        "parameters": size,
        "bands": bands,
        "plain_ms": round(plain_ms, 3),
        "exact_ms": round(exact_ms, 3),
        "ratio": round(exact_ms / plain_ms, 2),
        "undecided": exact.undecided,
        "entries": size * (repeats + 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    given = parser.parse_args()
    device = torch.device(given.device)
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    rows = [
        measured(size, bands, device, given.threads, given.repeats)
        for size in given.sizes
        for bands in BANDS
    ]
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"device": on, "threads": given.threads, **versions, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
