"""The batches of a run for Hugging Face's loop: one item for each step, in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from corrnoise.torch.loader import StepLoader
from corrnoise.transformers.refusals import rows


class Pieces(list[Any]):
    """The physical batches of a step. A ``training_step`` of one's own may take it for a batch."""

    def __getitem__(self, index: Any) -> Any:
        """A piece by its index.

        Raises:
            TypeError: a column was asked for.
        """
        if isinstance(index, str):
            raise TypeError(
                f"inputs[{index!r}]: the inputs of training_step are the physical batches of a "
                "step, a list of them; give them to super().training_step whole, and change "
                "compute_loss, which gets one after the other"
            )
        return super().__getitem__(index)


class LogicalBatches:
    """What the Trainer's loop iterates over: each item is the list of a step's physical batches.

    An empty batch is an empty list. The loop begins with the next step of the run, also after a
    resume. Accelerate takes it as it is: it neither fetches ahead nor deals batches out.

    Args:
        plain: the loader that the plan's batches are taken instead of.

    Attributes:
        dataset: the training examples.
    """

    _is_accelerate_prepared = True

    def __init__(self, plain: DataLoader[Any]) -> None:
        self.plain, self.dataset = plain, plain.dataset
        self.private: StepLoader | None = None  # when the run has begun

    def __len__(self) -> int:
        return len(self.plain)

    def __iter__(self) -> Iterator[Pieces]:
        if self.private is None:
            raise ValueError("the run must have begun; call trainer.train()")
        pieces = Pieces()
        for piece in self.private:
            if rows(piece):
                pieces.append(piece)
            if self.private.complete:
                yield pieces
                pieces = Pieces()
