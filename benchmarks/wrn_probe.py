"""How many views a second each way of computing gives, and whether the kernels are right."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

import wrn_data
from corrnoise.apps.datasets import whole_batch
from corrnoise.torch import PrivacyEngine
from corrnoise.torch.clipping.clipper import Clipper
from corrnoise.torch.clipping.reference import clipped_sums
from wrn_settings import Machine, device, set_precision

STEPS = 20
# (rows, views, bfloat16, channels last, our kernels, CUDA graph); the likely ones first.
CASES = (
    (4096, 3, True, True, True, True),
    (4096, 12, True, True, True, True),
    (2048, 8, True, True, True, True),
    (2048, 8, False, False, True, True),
    (2048, 8, True, False, True, True),
    (2048, 8, False, True, True, True),
    (4096, 8, True, True, True, True),
    (2048, 16, True, True, True, True),
    (2048, 4, True, True, True, True),
    (1024, 8, True, True, True, True),
    (2048, 8, True, True, True, False),
    (2048, 8, True, True, False, True),
    (2048, 8, False, False, False, True),
)


def _pictures(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
    return x.to(device()), torch.randint(0, 10, (count,)).to(device())


def check(
    views: int = 2, examples: int = 2, draws: int = 5, *, smoke: bool = False
) -> dict[str, float]:
    """The clipped sums of one batch, beside a loop over examples in float32 by autograd alone.

    With float32 products it must agree to rounding. TF32 and bfloat16 are shown beside it. Few
    pictures and the median of some draws, since rounding alone changes the sign of about one
    activation in ten millions, and that of one moves the sums by about 1e-3.
    """
    every: dict[str, list[float]] = {}
    for seed in range(draws):
        for name, difference in _differences(seed, views, examples, smoke=smoke).items():
            every.setdefault(name, []).append(difference)
    found = {name: statistics.median(differences) for name, differences in every.items()}
    for name, difference in found.items():
        most = max(every[name])
        print(f"check {name}: relative difference {difference:.1e}, at most {most:.1e}", flush=True)
    return found


def _differences(seed: int, views: int, examples: int, *, smoke: bool) -> dict[str, float]:
    """Of each way to compute, relative to the loop."""
    found: dict[str, float] = {}
    torch.manual_seed(seed)
    x, y = _pictures(views * examples)
    y = y[::views].repeat_interleave(views)
    set_precision(False)
    net = Machine(low=False, channels_last=False, kernels=False).network(seed, smoke=smoke)
    params = list(net.parameters())
    state = net.state_dict()

    def loss(i: int) -> Tensor:
        rows = slice(i * views, (i + 1) * views)
        return functional.cross_entropy(net(x[rows]), y[rows])

    wanted = torch.cat([t.flatten() for t in clipped_sums(loss, params, examples, 1.0)])
    for low, last, kernels, rounds in itertools.product(*[(False, True)] * 4):
        if (rounds and device() == "cpu") or (low and not rounds):
            continue
        name = ", ".join(
            [
                "bf16" if low else "tf32" if rounds else "float32",
                "channels last" if last else "channels first",
                "our kernels" if kernels else "torch",
            ]
        )
        set_precision(rounds)
        try:
            other = Machine(low=low, channels_last=last, kernels=kernels).network(0, smoke=smoke)
            other.load_state_dict(state)
            clipper = Clipper(other, list(other.parameters()), 1.0, views=views)
            functional.cross_entropy(other(x), y).backward()
            clipper.sums()
            found[name] = float((clipper.flat - wanted).norm() / wanted.norm())
        except Exception as error:  # the next way may work
            print(f"check {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return found


def measure(
    machine: Machine, views: int, *, captured: bool, steps: int = STEPS, smoke: bool = False
) -> float:
    """Views a second of whole private steps, each of one physical batch."""
    set_precision()
    size = machine.rows // views
    x, y = _pictures(size * (steps + 3))
    net = machine.network(0, smoke=smoke)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = PrivacyEngine(data_fingerprint="random")
    pictures = wrn_data.Pictures(x, y, views, 0, lambda: engine.steps_taken)
    _, _, loader = engine.make_private(
        module=net,
        optimizer=optimizer,
        data_loader=DataLoader(pictures, batch_size=size, collate_fn=whole_batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=1,
        mechanism="dp_sgd",
        sampling="fixed",
        grad_sample_mode="one_pass",
        views=views,
    )

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return functional.cross_entropy(net(a), b)

    def plain(*batch: Tensor) -> None:
        loss(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step: Any = engine.step_function(loss, size=size) if captured else plain
    start = 0.0
    for number, batch in enumerate(loader):
        if number == 3:
            _wait()
            start = time.perf_counter()
        step(*batch)
    _wait()
    engine.close()
    return machine.rows * steps / (time.perf_counter() - start)


def probe(minutes: float, cases: Any = CASES) -> None:
    """Every case, until the time is over."""
    warnings.simplefilter("ignore")
    end = time.monotonic() + 60.0 * minutes
    check()
    for rows, views, low, last, kernels, captured in cases:
        if time.monotonic() > end:
            break
        name = (
            f"{rows} rows, {views} views, {'bf16' if low else 'tf32'}, "
            f"channels {'last' if last else 'first'}, {'our kernels' if kernels else 'torch'}, "
            f"{'captured' if captured else 'eager'}"
        )
        start = time.perf_counter()
        try:
            rate = measure(Machine(rows, low, last, kernels), views, captured=captured)
            memory = torch.cuda.max_memory_allocated() / 1e9 if device() == "cuda" else 0.0
            took = time.perf_counter() - start
            print(f"{name}: {rate:,.0f} views/s, {memory:.0f} GB, {took:.0f} s", flush=True)
        except Exception as error:  # the next way may work
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        gc.collect()
        if device() == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _wait() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()
