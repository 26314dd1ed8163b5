"""Hooks on the modules of a private run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A function as a hook: a compiled model does not compile it, and copies of a model share it.

    It cannot be pickled, and says what to do instead.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run: Any = torch.compiler.disable(run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives."""
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Hook:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "the model of a private run cannot be pickled before the run ends: save "
            "model.state_dict(), or call engine.close() first"
        )
