"""``corrnoise bench``: time and error on this machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from corrnoise.cli import options

if TYPE_CHECKING:
    from corrnoise.mechanisms import DenseMechanism, Mechanism

T = TypeVar("T")

_DEFAULT = ("dp_sgd", "bisr", "band_inv_mf", "bsr", "band_mf", "blt")


def bench(
    num_parameters: Annotated[int, typer.Option(help="Values of noise in a step.")] = 1_000_000,
    num_steps: Annotated[int, typer.Option(help="n of the mechanisms.")] = 1000,
    max_participations: Annotated[int, typer.Option(help="k; b = n/k.")] = 10,
    momentum: options.Momentum = 0.9,
    decay: options.Decay = 0.9999,
    mechanisms: options.Families = None,
    num_bands: Annotated[int, typer.Option(help="p of the banded families.")] = 4,
    num_buffers: Annotated[int, typer.Option(help="Of blt.")] = 4,
    device: Annotated[
        Literal["all", "cpu", "cuda"], typer.Option(help="Where to make the noise.")
    ] = "all",
    memory: Annotated[float, typer.Option(help="Model-sized vectors that may be kept.")] = 0,
    seconds: Annotated[float, typer.Option(help="How long to time each noise.")] = 0.5,
    as_json: options.AsJson = False,
) -> None:
    """Time mechanisms on this machine.

    How long they take to build, to calibrate and to make the noise of a step. "relative" is the
    time of a step over that of independent normals from NumPy (cpu) or torch (cuda), measured in
    the same run; those cannot be made again.

    \b
    Examples:
      corrnoise bench --num-parameters 10000 --num-steps 100 --seconds 0.02
      corrnoise bench --num-parameters 10000 --num-steps 100 --seconds 0.02 --mechanism bisr --num-bands 8 --device cpu --memory 2 --json
    """
    from corrnoise import checks, workloads
    from corrnoise.accounting import calibrate
    from corrnoise.cli import terminal
    from corrnoise.mechanisms import build

    checks.integer("num-parameters", num_parameters, 1)
    checks.number("seconds", seconds, 0.0)
    part = options.participation(
        num_examples=None,
        batch_size=None,
        epochs=None,
        num_steps=num_steps,
        min_sep=None,
        max_participations=max_participations,
    )
    workload = workloads.sgd(num_steps, momentum=momentum, decay=decay)
    names = list(dict.fromkeys(mechanisms or _DEFAULT))
    devices = _devices(device)
    rows: list[dict[str, Any]] = []
    with terminal.progress("timing") as progress:
        calibrate(build("bisr", workload, part, 1), part, epsilon=8.0, delta=1e-5)  # loads SciPy
        plain = {where: _normals(where, num_parameters, seconds) for where in devices}
        for index, name in enumerate(names):
            size = {"dp_sgd": None, "dense": None, "blt": num_buffers}.get(name, num_bands)
            building, built = _once(partial(build, name, workload, part, size))
            pricing, _ = _once(partial(calibrate, built, part, epsilon=8.0, delta=1e-5))
            for where in devices:
                noise = _noise(built, where, num_parameters, memory, seconds)
                rows.append(
                    {
                        "mechanism": name if size is None else f"{name} {size}",
                        "device": where,
                        "rmse": built.rmse(part),
                        "build_seconds": building,
                        "calibrate_seconds": pricing,
                        **noise,
                        "relative": noise["step_seconds"] / plain[where],
                    }
                )
            progress(index + 1, len(names))
    if as_json:
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        terminal.print_json(
            {
                **machine,
                "num_parameters": num_parameters,
                "participation": part.to_dict(),
                "independent_seconds": plain,
                "rows": rows,
            }
        )
        return
    terminal.print_table(
        ["mechanism", "device", "rmse", "build", "calibrate", "a step", "values/s", "relative"],
        [
            [
                row["mechanism"],
                row["device"],
                f"{row['rmse']:.4g}",
                f"{1e3 * row['build_seconds']:.3g} ms",
                f"{1e3 * row['calibrate_seconds']:.3g} ms",
                f"{1e3 * row['step_seconds']:.3g} ms",
                f"{num_parameters / row['step_seconds']:.3g}",
                f"{row['relative']:.2f}",
            ]
            for row in rows
        ],
    )


def _devices(device: str) -> list[str]:
    """Where noise can be made, of what was asked for."""
    if device == "cpu":
        return ["cpu"]
    try:
        import torch

        cuda = torch.cuda.is_available()
    except ModuleNotFoundError:
        cuda = False
    if device == "cuda" and not cuda:
        raise ValueError("device must be one that is here, got cuda; use cpu")
    return (["cpu"] if device == "all" else []) + (["cuda"] if cuda else [])


def _normals(where: str, count: int, seconds: float) -> float:
    """Seconds to make independent normals with what everyone has."""
    if where == "cuda":
        import torch

        return _median(lambda: torch.randn(count, device="cuda"), seconds, where)
    import numpy as np

    generator = np.random.default_rng(0)
    return _median(lambda: generator.standard_normal(count, dtype=np.float32), seconds, where)


def _noise(
    mechanism: Mechanism | DenseMechanism, where: str, count: int, memory: float, seconds: float
) -> dict[str, Any]:
    """Seconds of a step of correlated noise, and what it keeps between steps."""
    from corrnoise.noise import CorrelatedNoise

    noise = CorrelatedNoise(mechanism, memory=memory)
    if where == "cuda":
        import torch

        grad: Any = torch.zeros(count, device="cuda")
    else:
        import numpy as np

        grad = np.zeros(count, np.float32)
    taken = 0

    def step() -> None:
        nonlocal taken
        if taken == noise.num_steps:
            taken = 0
            noise.seek(0)
        noise.add_([grad], taken, 1.0)
        taken += 1

    return {
        "scheme": noise.scheme.kind,
        "bytes_per_parameter": noise.scheme.bytes_per_parameter,
        "step_seconds": _median(step, seconds, where),
    }


def _once(function: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def _median(function: Callable[[], object], seconds: float, where: str) -> float:
    """The median time of a call, from at least three after the first."""

    def call() -> None:
        function()
        if where == "cuda":
            import torch

            torch.cuda.synchronize()

    call()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        times.append(_once(call)[0])
    return statistics.median(times)
