"""The plots of the page on choosing a mechanism, from the library itself: ``make docs-plots``.

    python docs/plots.py [--small] [--out FOLDER]

Each function computes its numbers, draws them and returns them. Sizes are those of the paper's
CIFAR-10 run unless ``--small``, which takes seconds and shows that everything runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

import corrnoise as cn

style: Any = import_module("corrnoise.papers.back_to_square_roots.style")
ASSETS = Path(__file__).parent / "assets"
KEY = cn.noise.Key.from_bytes(bytes(range(32)))  # public: for pictures alone


@dataclass(frozen=True)
class Setting:
    """The run that the plots are about: SGD with momentum and decay, k epochs of b steps."""

    min_sep: int = 98
    max_participations: int = 10
    num_bands: int = 4
    samples: int | None = None
    budgets: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)

    @property
    def participation(self) -> cn.Participation:
        """n, b, k."""
        steps = self.min_sep * self.max_participations
        return cn.Participation(steps, self.min_sep, self.max_participations)

    @property
    def workload(self) -> cn.Workload:
        """A."""
        return cn.workloads.sgd(self.participation.num_steps, momentum=0.9, decay=0.9999)


SMALL = Setting(min_sep=8, max_participations=3, num_bands=2, samples=5_000, budgets=(2.0, 8.0))


@contextmanager
def sheet(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Axes in the style of the paper's figures, written as one SVG at the end of the block."""
    with mpl.rc_context(style.LOOK):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots(rows, columns, squeeze=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def samplings(folder: Path, setting: Setting) -> dict[str, list[list[int]]]:
    """Which of some examples take part in which step, by sampling: real draws from one key."""
    size, part = 16, cn.Participation(12, 4, 3)
    found: dict[str, list[list[int]]] = {}
    names = cn.samplings.names()
    workload = cn.workloads.prefix_sum(part.num_steps)
    # Two bands of C where the sampling has an analysis for them, else one.
    built = [cn.mechanisms.bsr(workload, num_bands=2), cn.mechanisms.dp_sgd(workload)]
    with sheet(folder / "samplings.svg", 1, len(names), (2.4 * len(names), 2.6)) as axes:
        for panel, name in zip(axes[0], names, strict=True):
            sampling = cn.samplings.get(name)
            mechanism = next(m for m in built if not sampling.objection(m, part))
            batches = sampling.batches(size, part, mechanism, KEY)
            found[name] = [batches.indices(step).tolist() for step in range(part.num_steps)]
            at = np.array([(step, i) for step, here in enumerate(found[name]) for i in here])
            panel.scatter(at[:, 0], at[:, 1], s=14, marker="s", color=style.COLOURS["bisr"])
            for epoch in range(1, part.max_participations):
                panel.axvline(epoch * part.min_sep - 0.5, color="#aaaaaa", linewidth=0.8)
            panel.set(title=name, xlabel="step", xticks=range(0, part.num_steps, 4), yticks=[])
            panel.grid(visible=False)
        axes[0][0].set_ylabel("example")
    return found


def steps(folder: Path, setting: Setting) -> dict[str, list[float]]:
    """The error of each step at equal privacy: what correlation does over a run."""
    workload, part = setting.workload, setting.participation
    built = {
        "dp_sgd": cn.mechanisms.dp_sgd(workload),
        "bisr": cn.mechanisms.bisr(workload, num_bands=setting.num_bands),
        "blt": cn.mechanisms.blt(workload, part, num_buffers=4),
        "band_mf": cn.mechanisms.band_mf(workload, part, num_bands=part.min_sep),
        "band_inv_mf": cn.mechanisms.band_inv_mf(workload, part, num_bands=setting.num_bands),
    }
    found = {name: m.rmse_per_step(part).tolist() for name, m in built.items()}
    with sheet(folder / "steps.svg", 1, 1, (6.4, 3.4)) as axes:
        panel = axes[0][0]
        for name, errors in found.items():
            style.curve(panel, name, range(1, len(errors) + 1), errors, marker="")
        panel.set(xlabel="step", ylabel="error of the step", yscale="log", xlim=(0, part.num_steps))
        panel.set_ylim(0.9 * min(map(min, found.values())), 1.1 * max(map(max, found.values())))
        style.plain(panel.yaxis)
        panel.legend(loc="lower right")
    return found


def bands(folder: Path, setting: Setting) -> dict[str, list[float]]:
    """The error against p: how much the bands of each family reduce it."""
    workload, part = setting.workload, setting.participation
    b = part.min_sep
    sizes = sorted({p for p in (1, 2, 4, 8, 16, 32, 64, b) if p <= b})
    found = {
        name: [cn.mechanisms.build(name, workload, part, p).rmse(part) for p in sizes]
        for name in ("bsr", "bisr", "band_mf", "band_inv_mf")
    }
    bound = cn.lower_bound(workload, part)
    with sheet(folder / "bands.svg", 1, 1, (6.4, 3.4)) as axes:
        panel = axes[0][0]
        for name, errors in found.items():
            style.curve(panel, name, sizes, errors)
        blt = cn.mechanisms.blt(workload, part, num_buffers=4).rmse(part)
        panel.axhline(blt, label="BLT, 4 buffers", color=style.COLOURS["blt"], linewidth=1.2)
        style.below(panel, sizes, [bound] * len(sizes))
        panel.set(xlabel="number of bands p", ylabel="error at unit noise", xscale="log")
        panel.set(yscale="log", xlim=(1, b), ylim=(0.8 * bound, 1.1 * max(found["bsr"])))
        style.counts(panel.xaxis, sizes)
        style.plain(panel.yaxis)
        panel.legend(ncols=2)
    return {**found, "lower bound": [bound]}


def budgets(folder: Path, setting: Setting) -> dict[str, list[float]]:
    """The error against ε at δ = 1e-5, with fixed batches (exact) and balls-in-bins (certified)."""
    workload, part = setting.workload, setting.participation
    built = {
        "dp_sgd": cn.mechanisms.dp_sgd(workload),
        "bisr": cn.mechanisms.bisr(workload, num_bands=setting.num_bands),
        "band_inv_mf": cn.mechanisms.band_inv_mf(workload, part, num_bands=setting.num_bands),
    }
    found: dict[str, list[float]] = {}
    with sheet(folder / "budgets.svg", 1, 1, (6.4, 3.4)) as axes:
        panel = axes[0][0]
        for name, mechanism in built.items():
            for how, line in (("fixed", "--"), ("balls-in-bins", "-")):
                errors = [
                    cn.calibrate(
                        mechanism,
                        part,
                        epsilon=epsilon,
                        delta=1e-5,
                        sampling=how,
                        samples=setting.samples,
                    ).error
                    for epsilon in setting.budgets
                ]
                found[f"{name}, {how}"] = errors
                label = f"{style.METHODS[name]}, {how}"
                style.curve(panel, name, setting.budgets, errors, linestyle=line, label=label)
        panel.set(xlabel="ε", ylabel="error per unit of clip norm", xscale="log", yscale="log")
        panel.set_ylim(0.8 * min(map(min, found.values())), 1.2 * max(map(max, found.values())))
        style.counts(panel.xaxis, [int(epsilon) for epsilon in setting.budgets])
        style.plain(panel.yaxis)
        panel.legend(ncols=1, fontsize=8)
    return found


PLOTS = (samplings, steps, bands, budgets)


def main(arguments: list[str] | None = None) -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a size that takes seconds")
    parser.add_argument("--out", type=Path, default=ASSETS)
    options = parser.parse_args(arguments)
    for plot in PLOTS:
        plot(options.out, SMALL if options.small else Setting())
        print(options.out / f"{plot.__name__}.svg")


if __name__ == "__main__":
    main()
