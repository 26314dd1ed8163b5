"""Random augmentation in loader workers: it depends on the key, the step and the example alone.

A worker process seeds the generators of torch, NumPy and Python before it reads an example. So a
transformation draws the same numbers whichever worker reads the example and however often the run
was interrupted, and the numbers of one example do not depend on the other examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, Subset, get_worker_info

from corrnoise.torch import draws

_EXAMPLE, _BATCH, _COLLATE, _WORKERS = range(4)


@dataclass(frozen=True)
class Order:
    """A physical batch that a worker process is asked for.

    Attributes:
        step: the step of the run that it belongs to.
        indices: the examples.
    """

    step: int
    indices: list[int]


class Augmented(Dataset[Any]):
    """The user's dataset as a worker process reads it, one order at a time.

    Args:
        dataset: the user's.
        key: the subkey for augmentation.
    """

    def __init__(self, dataset: Dataset[Any], key: bytes) -> None:
        self.dataset, self._key = dataset, key

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, order: Order) -> Sequence[Any]:
        """The examples of an order; then the generators are seeded for the collate function.

        A dataset that reads whole batches gets one seed for the batch, any other one for each
        example.
        """
        data: Any = self.dataset
        if _reads_batches(data):
            self._seed(_BATCH, order.step, order.indices)
            examples = data.__getitems__(order.indices)
        else:
            seen: Counter[int] = Counter()
            examples: list[Any] = []
            for index in order.indices:
                examples.append(self._example(order.step, index, seen[index]))
                seen[index] += 1
        self._seed(_COLLATE, order.step, order.indices)
        return examples

    def _example(self, step: int, index: int, view: int) -> Any:
        self._seed(_EXAMPLE, step, [index, view] if view else [index])
        return self.dataset[index]

    def _seed(self, purpose: int, step: int, indices: Sequence[int]) -> None:
        draws.seed(draws.seeds(self._key, [purpose, step, *indices]))


class WorkerStart:
    """The start of a worker process, which shows the user's function the user's dataset.

    Args:
        user: the ``worker_init_fn`` of the user's loader.
    """

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker_id: int) -> None:
        """Called in the worker process before its first batch."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch's is read-only
        if self._user is not None:
            self._user(worker_id)


def worker_seed(key: bytes, step: int) -> int:
    """What torch derives the seeds of the workers from, for a loop that begins with ``step``.

    They reach only what a user's ``worker_init_fn`` makes of ``get_worker_info().seed``.
    """
    return draws.seeds(key, [_WORKERS, step])[0]


def _reads_batches(dataset: Any) -> bool:
    if type(dataset) is Subset:  # it has __getitems__ whatever its dataset has
        return _reads_batches(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))
