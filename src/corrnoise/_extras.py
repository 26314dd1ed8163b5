"""Optional libraries: imported on use; where one is missing, the error names its extra."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# The extra of pyproject.toml that installs each optional library.
EXTRAS = {
    "accelerate": "transformers",
    "cryptography": "noise",
    "dp_accounting": "accounting",
    "jax": "jax",
    "jax_privacy": "jax-privacy",
    "markupsafe": "report",
    "matplotlib": "plots",
    "opacus": "torch",
    "optax": "jax",
    "portalocker": "noise",
    "sklearn": "demo",
    "torch": "torch",
    "transformers": "transformers",
    "triton": "gpu",
    "threadpoolctl": "accounting",
    "typer": "cli",
}


def load(module: str) -> Any:
    """Import an optional library.

    Raises:
        ModuleNotFoundError: the library is not installed; the message names its extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        raise explained(missing) from None


def explained(missing: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error, with a message that names the extra if one installs the library."""
    name = (missing.name or "").partition(".")[0]
    if name not in EXTRAS:
        return missing
    return ModuleNotFoundError(
        f"{name} is needed and not installed: {install(EXTRAS[name])}", name=name
    )


def install(extra: str) -> str:
    """The command that installs an extra; it names a clone, as the package is on no registry."""
    return f"in a clone of corrnoise, pip install '.[{extra}]'"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, so that kernels can be compiled."""
    return find_spec("triton") is not None
