"""README.md, written from the results: no number in it is typed."""

from __future__ import annotations

from pathlib import Path

from corrnoise import _files

from . import EXPERIMENTS, module, record

_HEAD = """\
# Back to Square Roots, reproduced

Kalinin, McKenna, Upadhyay and Lampert, *Back to Square Roots: An Optimal Bound on the Matrix
Factorization Error for Multi-Epoch Differentially Private SGD*, ICLR 2026.

Every picture and every number below comes from `results/*.json`, which

    corrnoise reproduce all-figures --out {folder}
    corrnoise reproduce table-cifar10 --out {folder}     # on a GPU
    corrnoise reproduce beyond-cifar10 --out {folder}    # on a GPU
    corrnoise reproduce table-imdb --out {folder}        # on a GPU

writes, with this page. RMSE is the paper's E(B, C), with unit noise and the certified sensitivity.
The verdicts compare with what the paper says in sections 4 and 5 and in appendix B; it prints no
numbers for its figures."""


def text(folder: Path) -> str:
    """The page for the results in ``folder``."""
    head = _HEAD.format(folder="papers/back_to_square_roots")
    parts = [head]
    for name in EXPERIMENTS:
        result = record.read(name, folder)
        if result is None:
            continue
        machine = result["machine"]
        parts += [
            f"## {result['title']} (`{name}`)",
            f"![{result['title']}](figures/{name}.svg)",
            module(name).report(result),
            f"<sub>{result['seconds']:.0f} s on "
            + (f"one {machine['gpu']} and " if "gpu" in machine else "")
            + f"{machine['cores']} cores of {machine['cpu']}, "
            f"Python {machine['python']}, NumPy {machine['numpy']}, SciPy {machine['scipy']}, "
            f"corrnoise {result['corrnoise']}, {result['date']}.</sub>",
        ]
    return "\n\n".join(parts) + "\n"


def write(folder: Path) -> None:
    """Write ``README.md`` in ``folder``."""
    _files.write(folder / "README.md", text(folder))
