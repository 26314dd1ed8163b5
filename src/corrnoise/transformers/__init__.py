"""Private training with Hugging Face's Trainer: the same class, with a budget."""

from corrnoise import _extras

try:
    from corrnoise.transformers.trainer import Trainer
except ModuleNotFoundError as missing:
    raise _extras.explained(missing) from None

__all__ = ["Trainer"]
