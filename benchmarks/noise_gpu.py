"""Noise on one GPU: correctness first, then every time beside a device copy of the same run.

    PYTHONPATH=src python benchmarks/noise_gpu.py [--quick]

Needs torch, Triton and NumPy; the words are checked against the NumPy ChaCha of the library. Each
section stands alone: an error is printed and the next one runs. Times are medians of CUDA events;
tuning is done outside of them. With OUT set in the environment, noise_gpu.json is written there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton

import corrnoise as cn
from corrnoise.noise import CorrelatedNoise, Key, NoiseStream
from corrnoise.noise.backends.triton_backend import TritonBackend, Tuning
from corrnoise.noise.filtering import scheme
from corrnoise.noise.generator import normals

KEY = Key.from_bytes(bytes(range(32)))
DEVICE = "cuda:0"
STEPS = 1000
GOALS = {  # milliseconds at 2^28 float32
    "chacha20 p=1": 0.81,
    "chacha20 p=4": 2.9,
    "chacha20 p=16": 11.0,
    "chacha8 p=4": 1.4,
    "ring p=4, 2 vectors": 1.9,
}
TUNINGS = [
    Tuning(block, warps)
    for block, warps in ((32, 1), (128, 4), (64, 2), (256, 8), (256, 4), (128, 2))
] + [Tuning(registers=48), Tuning(registers=None)]  # benchmarks/noise_registers.py counts them
RESULTS: dict[str, Any] = {"times_ms": {}, "checks": {}, "errors": {}, "tuning": {}}


@contextmanager
def section(name: str) -> Iterator[None]:
    print(f"\n== {name}", flush=True)
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        RESULTS["errors"][name] = repr(error)[:2000]
        traceback.print_exc()
    print(f"   ({time.perf_counter() - start:.1f} s)", flush=True)


def check(name: str, passed: bool, detail: str = "") -> None:
    RESULTS["checks"][name] = {"passed": bool(passed), "detail": detail}
    print(f"   {'ok  ' if passed else 'FAIL'} {name} {detail}", flush=True)


def milliseconds(run: Callable[[], object], repeats: int = 15, warmup: int = 3) -> float:
    """The median time of one call on the device.

    The device sleeps first, so that the host is ahead of it and its own time is not measured.
    """
    for _ in range(warmup):
        run()
    times = list[float]()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(3_000_000)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def report(name: str, time_ms: float) -> None:
    RESULTS["times_ms"][name] = time_ms
    copy = RESULTS["times_ms"].get("copy")
    beside = f"   {time_ms / copy:6.2f} copies" if copy else ""
    goal = GOALS.get(name)
    verdict = f"   goal {goal}: {'met' if time_ms <= goal else 'MISSED'}" if goal else ""
    print(f"   {name:44s} {time_ms:8.3f} ms{beside}{verdict}", flush=True)


def bisr(num_bands: int, rounds: int = 20, memory: float = 0) -> CorrelatedNoise:
    mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(STEPS), num_bands=num_bands)
    return CorrelatedNoise(mechanism, KEY, memory=memory, rounds=rounds)


def force(noise: CorrelatedNoise, kind: scheme.Scheme) -> CorrelatedNoise:
    """The noise with another scheme than the one that its memory would choose."""
    noise.scheme = kind
    noise._forget(0)
    return noise


def lookahead(p: int, m: int) -> CorrelatedNoise:
    return force(bisr(p), scheme.Scheme("lookahead", m - 1, (p + m - 1) / m, m))


def with_tuning(noise: CorrelatedNoise, tuning: Tuning) -> CorrelatedNoise:
    noise._backends[DEVICE] = TritonBackend(noise.stream, DEVICE, tuning)
    return noise


# Correctness


def check_words(tunings: list[Tuning]) -> None:
    rng = np.random.default_rng(0)
    places = [0, 12_345, 2**32 - 5000, 2**36 - 5000, 2**40 + 7, 2**62 + 99]
    places += rng.integers(0, 2**62, 4).tolist()
    for rounds in (20, 12, 8):
        stream = NoiseStream(KEY, 2**31 + 7, rounds)
        expected = [stream.words(2**32 - 1, at, at + 9000) for at in places]
        for tuning in tunings if rounds == 20 else tunings[:1]:
            maker = TritonBackend(stream, DEVICE, tuning)
            found = [maker.words(2**32 - 1, at, at + 9000) for at in places]
            same = all(
                np.array_equal(f.cpu().numpy().view(np.uint32), e)
                for f, e in zip(found, expected, strict=True)
            )
            check(f"words, rounds {rounds}, {tuning}", same)


def check_normals() -> None:
    size = 1 << 22
    for fast in (True, False):
        stream = NoiseStream(KEY, rounds=8)
        maker = TritonBackend(stream, DEVICE, Tuning(fast=fast))
        out = torch.zeros(size, device=DEVICE)
        maker.add_weighted([out], ((0, size),), 0, np.ones(1, np.float32), 1.0)
        words = maker.words(0, 0, size).cpu().numpy().view(np.uint32)
        exact = normals.box_muller_exact(words, stream.refinement(0, 0))
        pairs = exact.reshape(-1, 2, 256)
        radius = np.hypot(pairs[:, 0], pairs[:, 1])[:, None]
        error = np.abs(out.cpu().numpy().astype(np.float64).reshape(-1, 2, 256) - pairs) / radius
        worst = float(error.max())
        check(f"normals, fast={fast}", worst < 1e-6, f"worst error {worst:.2e} of the radius")


def check_rows() -> None:
    offset, size, n = 2**33 + 1234, 5000, 12
    workload, part = cn.workloads.prefix_sum(n), cn.Participation(n, 4, 3)
    banded = cn.mechanisms.bisr(workload, num_bands=4)
    cases = {
        "dp_sgd": (cn.mechanisms.dp_sgd(workload), None),
        "bisr regenerate": (banded, "regenerate"),
        "bisr lookahead": (banded, "lookahead"),
        "bisr ring": (banded, "ring"),
        "bisr ring of 2": (banded, scheme.Scheme("ring", 2, 2.0)),
        "bsr": (cn.mechanisms.bsr(workload, num_bands=4), None),
        "blt": (cn.mechanisms.blt(workload, part, num_buffers=2), None),
    }
    for name, (mechanism, kind) in cases.items():
        noise = CorrelatedNoise(mechanism, KEY)
        if isinstance(kind, scheme.Scheme):
            force(noise, kind)
        elif kind:
            force(noise, [s for s in scheme.candidates(4) if s.kind == kind][-1])
        exact, worst = noise.rows(offset, offset + size), 0.0
        for step in range(n):
            grad = torch.zeros(size, device=DEVICE)
            noise.add_([grad], step, 1.0, offsets=[offset])
            worst = max(worst, float(np.abs(grad.cpu().numpy() - exact[step]).max()))
        check(f"rows, {name} ({noise.scheme.num_vectors} vectors)", worst < 2e-5,
              f"worst error {worst:.1e}")  # fmt: skip


def check_narrow_and_lists() -> None:
    noise = bisr(4)
    shapes = [(3, 5), (768,), (1000, 77), (0,), (1,), (4096,), (30, 31, 7)]
    sizes = [int(np.prod(s)) for s in shapes]
    flat = torch.randn(sum(sizes), device=DEVICE)
    parts = [p.clone().view(s) for p, s in zip(flat.split(sizes), shapes, strict=True)]
    noise.add_([flat], 20, 0.5)
    noise.add_(parts, 20, 0.5)
    check("a list gets the bits of the flat tensor",
          torch.equal(torch.cat([p.reshape(-1) for p in parts]), flat))  # fmt: skip
    wide = torch.randn(1 << 20, device=DEVICE).bfloat16()
    exact = wide.float()
    noise.add_([exact], 20, 0.5)
    noise.add_([wide], 20, 0.5)
    check("bfloat16 is the float32 sum, rounded once", torch.equal(wide, exact.bfloat16()))


def check_law(draws: int) -> None:
    """Moments and tails of the fast path; thresholds of 6 standard errors."""
    size, worst = 1 << 27, 0.0
    sums, tails, count = torch.zeros(8, dtype=torch.float64), dict.fromkeys((4, 5, 6), 0), 0
    maker = TritonBackend(NoiseStream(KEY, 3), DEVICE, Tuning())
    out = torch.empty(size, device=DEVICE)
    for step in range(max(1, draws // size)):
        out.zero_()
        maker.add_weighted([out], ((0, size),), step, np.ones(1, np.float32), 1.0)
        x = out.double()
        sums += torch.stack([(x**k).sum() for k in range(1, 9)]).cpu()
        for sigma in tails:
            tails[sigma] += int((out.abs() > sigma).sum())
        count += size
    moment = [1, 0, 1, 0, 3, 0, 15, 0, 105, 0, 945, 0, 10395, 0, 135135, 0, 2027025]
    for k in range(1, 9):
        width = (moment[2 * k] - moment[k] ** 2) ** 0.5 / count**0.5
        score = (float(sums[k - 1]) / count - moment[k]) / width
        worst = max(worst, abs(score))
    check(f"moments to order 8 on {count:.2g} draws", worst < 6, f"largest score {worst:.2f}")
    for sigma, found in tails.items():
        expected = count * float(torch.special.erfc(torch.tensor(sigma / 2**0.5).double()))
        good = abs(found - expected) < 6 * expected**0.5 + 6
        check(f"beyond {sigma} sigma", good, f"{found} found, {expected:.1f} expected")


# Times


def time_baselines(grad: torch.Tensor) -> None:
    other = torch.empty_like(grad)
    report("copy", milliseconds(lambda: other.copy_(grad)))
    report("grad.normal_()", milliseconds(lambda: other.normal_()))
    report("g + torch.normal(...)", milliseconds(
        lambda: grad + torch.normal(0.0, 1.0, grad.shape, device=DEVICE)))  # fmt: skip
    coefs = bisr(4)._filter.weights(10)[::-1]
    ring = [torch.randn_like(grad) for _ in range(3)]

    def eager() -> None:
        z = torch.randn_like(grad)
        out = grad + float(coefs[0]) * z
        for c, past in zip(coefs[1:], ring, strict=True):
            out += float(c) * past
        ring.pop()
        ring.insert(0, z)

    report("ring buffer in eager torch, p=4", milliseconds(eager))


def tune(name: str, make: Callable[[], CorrelatedNoise], grad: torch.Tensor,
         tunings: list[Tuning], steps: int = 1) -> Tuning:  # fmt: skip
    """Time one call (or ``steps`` successive ones) under each tuning; the fastest."""
    found = list[tuple[float, Tuning]]()
    for tuning in tunings:
        try:
            noise = with_tuning(make(), tuning)
            time_ms = milliseconds(lambda n=noise: steps_of(n, grad, steps), 5, 2) / steps
        except Exception as error:
            print(f"   {name}: {tuning} failed: {error!r}"[:300], flush=True)
            continue
        found.append((time_ms, tuning))
        print(f"   {name:24s} {time_ms:8.3f} ms  {tuning}", flush=True)
    found.sort(key=lambda pair: pair[0])
    RESULTS["tuning"][name] = [[t, str(c)] for t, c in found]
    return found[0][1]


def steps_of(noise: CorrelatedNoise, grad: torch.Tensor | list[torch.Tensor], count: int) -> None:
    """The steps 96, 97, …: enough of the past for every p here, and the start of a lookahead."""
    grads = grad if isinstance(grad, list) else [grad]
    if noise.scheme.kind == "recursion":
        noise.add_(grads, noise._ready, 1e-3)
        return
    first = 96
    for step in range(first, first + count):
        noise.add_(grads, step, 1e-3)


def time_regenerate(grad: torch.Tensor, quick: bool) -> dict[int, Tuning]:
    best = dict[int, Tuning]()
    for rounds in (20, 12, 8):
        tunings = TUNINGS if rounds == 20 and not quick else TUNINGS[:3]
        best[rounds] = tune(f"chacha{rounds} p=4", lambda r=rounds: bisr(4, r), grad, tunings)
    for rounds in (20, 12, 8):
        for p in (1, 4, 16):
            noise = with_tuning(bisr(p, rounds), best[rounds])
            report(f"chacha{rounds} p={p}", milliseconds(lambda n=noise: steps_of(n, grad, 1)))
    plain = with_tuning(bisr(4), Tuning())
    report("chacha20 p=4, default tuning", milliseconds(lambda: steps_of(plain, grad, 1)))
    precise = with_tuning(bisr(4), Tuning(fast=False))
    report("chacha20 p=4, precise functions", milliseconds(lambda: steps_of(precise, grad, 1)))
    return best


def time_memory(grad: torch.Tensor, best: dict[int, Tuning]) -> None:
    b = best.get(20, Tuning())
    shapes = [Tuning(128, 4), Tuning(64, 2), Tuning(32, 1)]
    for p, m in ((4, 2), (4, 3), (16, 4), (16, 8)):
        name = f"lookahead p={p}, {m - 1} vectors"
        tuning = tune(name, lambda p=p, m=m: lookahead(p, m), grad, shapes, m)
        noise = with_tuning(lookahead(p, m), tuning)
        report(name, milliseconds(lambda n=noise, m=m: steps_of(n, grad, m)) / m)
        del noise
    for p, s in ((4, 1), (4, 2), (4, 3), (16, 7)):
        noise = with_tuning(force(bisr(p), scheme.Scheme("ring", s, float(p - s))), b)
        steps_of(noise, grad, 1)
        ring = iter(range(97, STEPS))
        name = f"ring p={p}, {s} vectors"
        report(name, milliseconds(lambda n=noise, r=ring: n.add_([grad], next(r), 1e-3)))
        del noise


def time_recursions(grad: torch.Tensor, best: dict[int, Tuning]) -> None:
    workload, part = cn.workloads.prefix_sum(STEPS), cn.Participation(STEPS, 100, 10)
    for name, mechanism in {
        "bsr p=4": cn.mechanisms.bsr(workload, num_bands=4),
        "blt 4 buffers": cn.mechanisms.blt(workload, part, num_buffers=4),
    }.items():
        noise = with_tuning(CorrelatedNoise(mechanism, KEY), best.get(20, Tuning()))
        report(name, milliseconds(lambda n=noise: steps_of(n, grad, 1)))
        del noise


def time_narrow(size: int, best: dict[int, Tuning]) -> None:
    grad, other = (torch.zeros(size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    report("copy, bfloat16", milliseconds(lambda: other.copy_(grad)))
    for p in (1, 4):
        noise = with_tuning(bisr(p), best.get(20, Tuning()))
        report(f"chacha20 p={p}, bfloat16", milliseconds(lambda n=noise: steps_of(n, grad, 1)))


def bert_shapes() -> list[tuple[int, ...]]:
    d, f = 768, 3072
    layer = [(d, d), (d,)] * 4 + [(d,), (d,), (f, d), (f,), (d, f), (d,), (d,), (d,)]
    return [(30522, d), (512, d), (2, d), (d,), (d,), *(layer * 12), (d, d), (d,)]


def time_lists(best: dict[int, Tuning]) -> None:
    grads = [torch.zeros(shape, device=DEVICE) for shape in bert_shapes()]
    flat = torch.zeros(sum(g.numel() for g in grads), device=DEVICE)
    other = torch.empty_like(flat)
    print(f"   {len(grads)} tensors, {flat.numel() / 1e6:.1f} M parameters")
    report("BERT: copy of the flat tensor", milliseconds(lambda: other.copy_(flat), 51))
    for p in (1, 4):
        many, one = (with_tuning(bisr(p), best.get(20, Tuning())) for _ in range(2))
        a = milliseconds(lambda n=one: steps_of(n, flat, 1), 51)
        b = milliseconds(lambda n=many: steps_of(n, grads, 1), 51)
        report(f"BERT p={p}: one flat tensor", a)
        report(f"BERT p={p}: {len(grads)} tensors", b)
        check(f"BERT p={p}: within 1.3x of flat", b <= 1.3 * a, f"{b / a:.3f}x")
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            steps_of(many, grads, 1)
        torch.cuda.synchronize()
        report(f"BERT p={p}: {len(grads)} tensors, by the clock",
               (time.perf_counter() - start) * 50)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tunings and draws")
    parser.add_argument("--log2-size", type=int, default=28)
    arguments = parser.parse_args()
    size, quick = 1 << arguments.log2_size, arguments.quick
    RESULTS["machine"] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "size": size,
    }
    print(json.dumps(RESULTS["machine"]))
    best: dict[int, Tuning] = {}
    with section("words, bit for bit"):
        check_words(TUNINGS[:1] if quick else TUNINGS[::4])
    with section("normals against float64"):
        check_normals()
    with section("correlated rows against float64"):
        check_rows()
    with section("lists and bfloat16"):
        check_narrow_and_lists()
    with section("law of the fast path"):
        check_law(1 << (27 if quick else 30))
    torch.cuda.empty_cache()
    grad = torch.zeros(size, device=DEVICE)
    with section("baselines"):
        time_baselines(grad)
    torch.cuda.empty_cache()
    with section("regenerate, 0 bytes of state"):
        best = time_regenerate(grad, quick)
    with section("memory for time"):
        time_memory(grad, best)
    torch.cuda.empty_cache()
    with section("recursions"):
        time_recursions(grad, best)
    with section("bfloat16"):
        time_narrow(size, best)
    del grad
    torch.cuda.empty_cache()
    with section("BERT-base as a list of tensors"):
        time_lists(best)
    return finish()


def finish() -> int:
    print("\n== table")
    for name, time_ms in RESULTS["times_ms"].items():
        report(name, time_ms)
    failed = [name for name, found in RESULTS["checks"].items() if not found["passed"]]
    print(f"\n{len(RESULTS['checks'])} checks, {len(failed)} failed {failed}; "
          f"errors in {list(RESULTS['errors'])}")  # fmt: skip
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "noise_gpu.json"), "w") as file:
            json.dump(RESULTS, file, indent=1)
    return 1 if failed or RESULTS["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
