"""Noise on a CPU beside ``torch.Tensor.normal_``: speed as ratios of one run, and extra memory.

    python benchmarks/noise_cpu.py

Each pair is measured alternately and by processor time, so that other load on the machine touches
both alike; threads are compared by the clock.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import corrnoise as cn
from corrnoise.noise import CorrelatedNoise, Key, NoiseStream

KEY = Key.from_bytes(bytes(range(32)))


def ratio(
    base: Callable[[], object],
    ours: Callable[[], object],
    clock: Callable[[], float],
    repeats: int,
) -> tuple[float, float, float]:
    """Medians of both times, and the median of base/ours over pairs run one after the other."""
    times = list[tuple[float, float]]()
    for _ in range(repeats + 1):
        start = clock()
        base()
        middle = clock()
        ours()
        times.append((middle - start, clock() - middle))
    times = times[1:]
    return (
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(a / b for a, b in times),
    )


def bisr(num_bands: int, memory: float = 0, threads: int = 1) -> CorrelatedNoise:
    mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(1000), num_bands=num_bands)
    return CorrelatedNoise(mechanism, KEY, memory=memory, threads=threads)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def extra_memory(size: int) -> float:
    """MB that one call needs beyond the gradient, at its highest."""
    grad = torch.ones(size)
    noise = bisr(1)
    noise.add_([torch.ones(1000)], 0, 1.0)  # imports
    before = resident()
    noise.add_([grad], 0, 1.0)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=2**24)
    parser.add_argument("--memory-size", type=float, default=1e8)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    size, repeats = int(arguments.size), arguments.repeats
    print(
        f"extra memory at d = {arguments.memory_size:.0e}: "
        f"{extra_memory(int(arguments.memory_size)):.2f} MB"
    )
    torch.set_num_threads(1)
    grad, noisy = torch.zeros(size), torch.zeros(size)
    stream = NoiseStream(KEY)
    array = noisy.numpy()

    def line(name: str, result: tuple[float, float, float]) -> None:
        base, ours, times = result
        print(
            f"{name:46s} normal_ {base / size * 1e9:5.2f} ns   this {ours / size * 1e9:6.2f} ns   "
            f"throughput {times:5.2f}x"
        )

    def fill() -> None:
        for start in range(0, size, 1 << 20):
            array[start : start + (1 << 20)] = stream.normals(
                0, start, min(start + (1 << 20), size)
            )

    clock = time.process_time
    line("z alone, one thread", ratio(grad.normal_, fill, clock, repeats))
    for p in (1, 4):
        noise = bisr(p)
        line(
            f"p = {p}, regenerate, one thread",
            ratio(grad.normal_, lambda n=noise: n.add_([noisy], 500, 1.0), clock, repeats),
        )
    narrow = torch.zeros(size, dtype=torch.bfloat16)
    noise = bisr(1)
    line(
        "p = 1, bfloat16, one thread",
        ratio(grad.normal_, lambda: noise.add_([narrow], 500, 1.0), clock, repeats),
    )
    for memory in (2, 3):
        noise, steps = bisr(4, memory), iter(range(200, 1000))
        kind = f"{noise.scheme.kind}, {memory} vectors, {noise.scheme.draws_per_step:.3g} draws"
        many = noise.scheme.lookahead * 2

        def run(n: CorrelatedNoise = noise, at: object = steps, count: int = many) -> None:
            for _ in range(count):
                n.add_([noisy], next(at), 1.0)  # type: ignore[call-overload]

        base, ours, times = ratio(grad.normal_, run, clock, repeats)
        line(f"p = 4, {kind}", (base, ours / many, times * many))
    threads = torch.multiprocessing.cpu_count()
    one, all_ = bisr(1), bisr(1, threads=threads)
    _, _, times = ratio(
        lambda: one.add_([noisy], 0, 1.0),
        lambda: all_.add_([noisy], 0, 1.0),
        time.perf_counter,
        repeats,
    )
    print(f"{threads} threads against one, by the clock: {times:.2f}x")
    print(f"NumPy {np.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
