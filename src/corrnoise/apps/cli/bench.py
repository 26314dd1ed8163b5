"""``corrnoise bench``: time and error on this machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from corrnoise.apps.cli import options

if TYPE_CHECKING:
    from corrnoise.mechanisms import Mechanism

T = TypeVar("T")

# The budget that is calibrated for; the time hardly depends on it.
_EPSILON, _DELTA = 8.0, 1e-5
# The limits of the model size and of the seconds per noise.
_MOST_PARAMETERS, _MOST_SECONDS = 1_000_000_000, 3600.0


def bench(
    num_parameters: Annotated[
        int, typer.Option(help="Number of noise values in a step.")
    ] = 1_000_000,
    num_steps: Annotated[int, typer.Option(help="n of the mechanisms.")] = 1000,
    max_participations: Annotated[int, typer.Option(help="k; b = n/k.")] = 10,
    momentum: options.Momentum = 0.9,
    decay: options.Decay = 0.9999,
    mechanisms: options.FamilyNames = None,
    num_bands: Annotated[int, typer.Option(help="p of the banded families.")] = 4,
    num_buffers: Annotated[int, typer.Option(help="Number of buffers of blt.")] = 4,
    device: Annotated[
        Literal["all", "cpu", "cuda"], typer.Option(help="Device that generates the noise.")
    ] = "all",
    memory: Annotated[float, typer.Option(help="Model-sized vectors that the noise may keep.")] = 0,
    seconds: Annotated[float, typer.Option(help="How long to time each noise.")] = 0.5,
    as_json: options.AsJson = False,
) -> None:
    """Time mechanisms on this machine.

    Measures how long each mechanism takes to build, to calibrate and to make the noise of a step.
    "relative" is the time of a step divided by that of independent normals from NumPy (cpu) or
    torch (cuda), which cannot be regenerated, measured in the same run.

    \b
    Examples:
      corrnoise bench --num-parameters 10000 --num-steps 100 --seconds 0.02
      corrnoise bench --num-parameters 10000 --num-steps 100 --seconds 0.02 --mechanism bisr --num-bands 8 --device cpu --memory 2 --json
    """
    from corrnoise import _checks as checks
    from corrnoise import workloads
    from corrnoise._progress import Bar
    from corrnoise.apps.cli import terminal
    from corrnoise.mechanisms import dp_sgd
    from corrnoise.samplings import calibrate

    checks.integer(
        "num-parameters", num_parameters, 1, _MOST_PARAMETERS, "a vector of these takes 4 GB"
    )
    options.within("seconds", seconds, 0.0, _MOST_SECONDS)
    part = options.participation(num_steps=num_steps, max_participations=max_participations)
    workload = workloads.sgd(num_steps, momentum=momentum, decay=decay)
    families = options.families(mechanisms)
    devices = _devices(device)
    rows: list[dict[str, Any]] = []
    with Bar("timing") as progress:
        # This imports SciPy before anything is timed.
        calibrate(dp_sgd(workload), part, epsilon=_EPSILON, delta=_DELTA)
        plain = {where: _normals(where, num_parameters, seconds) for where in devices}
        for index, family in enumerate(families):
            size = options.size(family, num_bands, num_buffers)
            building, built = _once(partial(family.build, workload, part, size))
            pricing, _ = _once(partial(calibrate, built, part, epsilon=_EPSILON, delta=_DELTA))
            for where in devices:
                noise = _noise(built, where, num_parameters, memory, seconds)
                rows.append(
                    {
                        "mechanism": family.title(size),
                        "device": where,
                        "rmse": built.rmse(part),
                        "build_seconds": building,
                        "calibrate_seconds": pricing,
                        **noise,
                        "relative": noise["step_seconds"] / plain[where],
                    }
                )
            progress(index + 1, len(families))
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
    """The devices of this machine among those that were asked for."""
    if device == "cpu":
        return ["cpu"]
    try:
        import torch

        cuda = torch.cuda.is_available()
    except ModuleNotFoundError:
        cuda = False
    if device == "cuda" and not cuda:
        raise ValueError("device must be one that this machine has, got cuda; use cpu")
    return (["cpu"] if device == "all" else []) + (["cuda"] if cuda else [])


def _normals(where: str, count: int, seconds: float) -> float:
    """Seconds to make independent normals with NumPy or torch."""
    if where == "cuda":
        import torch

        return _median(lambda: torch.randn(count, device="cuda"), seconds, where)
    import numpy as np

    generator = np.random.default_rng(0)
    return _median(lambda: generator.standard_normal(count, dtype=np.float32), seconds, where)


def _noise(
    mechanism: Mechanism, where: str, count: int, memory: float, seconds: float
) -> dict[str, Any]:
    """The seconds of a step of correlated noise, and the memory that it keeps between steps."""
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
