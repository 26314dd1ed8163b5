"""Reproductions of papers: one package each, in ``papers/`` of a clone or here in a wheel."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_CLONE = Path(__file__).resolve().parents[3] / "papers"
if (_CLONE.parent / "pyproject.toml").is_file():
    __path__.append(str(_CLONE))


def load(name: str) -> ModuleType:
    """The package that reproduces a paper.

    >>> load("back_to_square_roots").names()[0]
    'fig-bandwidth'
    """
    if not name.isidentifier() or find_spec(f"{__name__}.{name}") is None:
        raise ValueError(
            f"name must be the reproduction of a paper, such as 'back_to_square_roots', got "
            f"{name!r}; none of that name is in {', '.join(__path__)}: install corrnoise from a "
            "wheel, or work in a clone that has its papers/ folder"
        )
    return import_module(f"{__name__}.{name}")
