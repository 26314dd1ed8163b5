"""The experiments of "Back to Square Roots", one module each.

A module has ``TITLE``; ``run(smoke=, progress=) -> dict``, which computes the numbers;
``draw(result, folder)``, which draws them; and ``report(result) -> str``, which compares them with
the paper, in Markdown. A new experiment is a module and a line in ``EXPERIMENTS``.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from corrnoise import _checks as checks
from corrnoise._progress import Progress

EXPERIMENTS = {
    "fig-bandwidth": "bandwidth",
    "fig-sizes": "sizes",
    "fig-small-bandwidth": "small_bandwidth",
    "fig-convergence": "convergence",
    "table-noise": "noise_table",
    "conjecture": "conjecture",
    "beyond-amplified": "amplified",
    "table-cifar10": "cifar10",
    "beyond-cifar10": "beyond",
    "table-imdb": "imdb",
}
# Those that train models: they need torch, data and, in full, a GPU.
TRAINING = ("table-cifar10", "beyond-cifar10", "table-imdb")
# Names that stand for several experiments: "all-figures" is all that needs no training.
GROUPS = {
    "all-figures": (
        "fig-bandwidth",
        "fig-sizes",
        "fig-small-bandwidth",
        "fig-convergence",
        "table-noise",
        "conjecture",
        "beyond-amplified",
    )
}


def names() -> tuple[str, ...]:
    """The experiments, in the order of the paper."""
    return tuple(EXPERIMENTS)


def expand(name: str) -> tuple[str, ...]:
    """The experiments of a group, or the one of that name."""
    checks.choice("name", name, (*EXPERIMENTS, *GROUPS))
    return GROUPS.get(name, (name,))


def module(name: str) -> ModuleType:
    """The module of one experiment."""
    checks.choice("name", name, names())
    return import_module(f".{EXPERIMENTS[name]}", __name__)


def reproduce(
    name: str,
    *,
    smoke: bool = False,
    folder: str | Path = "reproduced",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run one experiment, write its numbers and its figure, and return the numbers.

    Args:
        name: one of ``names()``.
        smoke: a small size that takes seconds and shows that everything runs. Its files carry
            "-smoke" in their names.
        folder: gets ``results/NAME.json``, and ``figures/NAME.svg`` and ``.png``. Of a result that
            is there already, the experiments that train keep the rows that are finished.
        progress: called with (pieces done, pieces in all).
    """
    from . import record, style

    experiment = module(name)
    style.require()
    earlier = None if smoke else record.read(name, Path(folder))
    result = record.measured(name, experiment, smoke=smoke, progress=progress, earlier=earlier)
    record.write(result, Path(folder))
    experiment.draw(result, Path(folder) / "figures")
    return result
