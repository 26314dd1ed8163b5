"""A data loader that delivers the batches of a plan, step by step, and knows where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from corrnoise.samplings import Batches
from corrnoise.torch import opacus


class _PhysicalBatches:
    """What Opacus's ``BatchSplittingSampler`` reads as the batch size of a ``BatchSampler``.

    It computes its own length as ⌈len(sampler)·(batch_size / max_batch_size)⌉. Dividing by the
    largest physical batch gives the exact number of physical batches in the epoch, over the number
    of logical ones: batches of random sizes have no one size.
    """

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler

    def __truediv__(self, largest: int) -> Fraction:
        parts = [max(1, -(-size // largest)) for size in self._sampler.epoch_sizes()]
        return Fraction(sum(parts), len(self._sampler))


class StepSampler(BatchSampler):
    """The batches of the steps that are still to be taken, up to the end of the epoch.

    Batch i belongs to step i and to no other: iteration always starts with the next step that the
    optimizer will take, also after a resume or a loop that was left early. Whatever part of that
    step's batch is in the sums of gradients already is dropped then, since the whole batch comes
    again.

    Args:
        batches: the run's.
        next_step: the number of steps taken.
        rank: of this process; each batch is dealt out to the ranks.
        world_size: the number of ranks.
        largest: how many examples come at once; a batch comes in several pieces if it has more.
    """

    def __init__(
        self,
        batches: Batches,
        next_step: Callable[[], int],
        rank: int = 0,
        world_size: int = 1,
        largest: int | None = None,
    ) -> None:
        self.sampler, self.drop_last = range(batches.num_examples), False
        self.batch_size: Any = _PhysicalBatches(self)
        self.restart: Callable[[], None] = lambda: None  # called when a loop begins
        self.batches, self.largest = batches, largest
        self._next_step = next_step
        self._rank, self._world_size = rank, world_size
        self._epoch: range | None = None  # what the last iteration has fetched, once it ended
        self._fetched: int | None = None
        self.delivered: int | None = None  # the step whose batch the loop has; None if unknown
        self.ahead = False  # whether worker processes fetch batches in advance

    @property
    def next_step(self) -> int:
        """The step that the optimizer takes next."""
        return self._next_step()

    def __len__(self) -> int:
        if self.largest is None:
            return self.batches.participation.min_sep
        n, b = self.batches.participation.num_steps, self.batches.participation.min_sep
        first = min(self.next_step, n - 1) // b * b
        return sum(len(self.pieces(step)) for step in range(first, min(n, first + b)))

    def __iter__(self) -> Iterator[list[int]]:
        n, b = self.batches.participation.num_steps, self.batches.participation.min_sep
        first = self.next_step
        if first >= n:
            raise ValueError(
                f"the plan has {n} steps, and all of them were taken; plan more epochs from the "
                "start, or look at the data through another loader"
            )
        if self._epoch is not None and self.ahead and self.delivered is None:
            self._check_none_skipped(self._epoch, first)
        self._epoch = None
        self.restart()
        epoch = range(first, min(n, first - first % b + b))
        for step in epoch:
            self._fetched = step
            self.delivered = None if self.ahead else step
            yield from self.pieces(step)
        self._epoch = epoch

    def share(self, step: int) -> list[int]:
        """The examples of a step that this process takes."""
        return self.batches.indices(step)[self._rank :: self._world_size].tolist()

    def pieces(self, step: int) -> list[list[int]]:
        """The examples of a step that come at once."""
        share = self.share(step)
        if self.largest is None:
            return [share]
        # As many in every process: those that hold shards of a model step together.
        most = -(-len(self.batches.indices(step)) // self._world_size)
        starts = range(0, max(most, 1), self.largest)
        return [share[start : start + self.largest] for start in starts]

    def complete(self, examples: int) -> bool:
        """Whether these are all examples of the next step that this process takes."""
        return examples >= len(self.share(self.next_step))

    def epoch_sizes(self) -> list[int]:
        """How many examples this process takes in each step of the current epoch."""
        n, b = self.batches.participation.num_steps, self.batches.participation.min_sep
        first = min(self.next_step, n - 1) // b * b
        return [len(self.share(step)) for step in range(first, min(n, first + b))]

    def check(self, step: int) -> None:
        """Raise unless the loop has the batch of ``step``."""
        n = self.batches.participation.num_steps
        if step >= n:
            raise ValueError(
                f"the plan has {n} steps, and all of them were taken; plan more epochs from the "
                "start: every further step would weaken the guarantee"
            )
        got = self._fetched if self.delivered is None else self.delivered
        if got is None or got < step or (got > step and self.delivered is not None):
            at = "no batch" if got is None else f"the batch of step {got}"
            raise ValueError(
                f"step {step} must be taken on its own batch, but {at} was loaded; iterate over "
                "the data loader that make_private returned, and call optimizer.step() once for "
                "every batch, also for an empty one"
            )

    @staticmethod
    def _check_none_skipped(epoch: range, now: int) -> None:
        # Only for a loader that is not ours, with workers: nobody sees which batch the loop has.
        if now not in (epoch.start, epoch.stop):
            raise ValueError(
                f"steps {epoch.start} to {epoch.stop - 1} were loaded, but {now - epoch.start} of "
                "them were taken; call optimizer.step() once for every batch, also for an empty "
                "one, and leave a loop early only with num_workers=0"
            )


class StepLoader(DataLoader[Any]):
    """A ``DataLoader`` over a ``StepSampler`` that tells it which batch the loop has."""

    def __iter__(self) -> Any:
        if self.num_workers == 0:
            return super().__iter__()
        return self._deliver()

    def _deliver(self) -> Iterator[Any]:
        sampler = self.batch_sampler
        assert isinstance(sampler, StepSampler)
        n = sampler.batches.participation.num_steps
        steps = (step for step in range(sampler.next_step, n) for _ in sampler.pieces(step))
        for batch, step in zip(super().__iter__(), steps, strict=False):
            sampler.delivered = step
            yield batch


def step_loader(
    loader: DataLoader[Any], sampler: StepSampler, *, batch_first: bool, rand_on_empty: bool
) -> StepLoader:
    """The user's loader with the plan's batches instead of its own."""
    sampler.ahead = loader.num_workers > 0
    return StepLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=opacus.collate(loader, batch_first=batch_first, rand_on_empty=rand_on_empty),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        # Of its own, so that iterating does not move the generator that dropout draws from.
        generator=torch.Generator().manual_seed(0),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )


def check_loader(loader: DataLoader[Any]) -> bool:
    """Whether the user's loader shuffles; refuses one whose sampling cannot be replaced."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "data_loader must have a dataset with indices, got an IterableDataset; the plan says "
            "which example takes part when: load it into a map-style dataset"
        )
    size = len(loader.dataset)  # type: ignore[arg-type]
    if size == 0 or len(loader) == 0:
        raise ValueError(
            f"data_loader must not be empty, got {size} examples in {len(loader)} batches; "
            "use smaller batches, or drop_last=False"
        )
    if isinstance(loader.batch_sampler, StepSampler):
        raise ValueError(
            "data_loader must be the one before make_private, got one that it returned; "
            "make a new DataLoader for a new run"
        )
    plain = type(loader.batch_sampler) is BatchSampler
    if not plain or type(loader.sampler) not in (SequentialSampler, RandomSampler):
        name = type(loader.sampler if plain else loader.batch_sampler).__name__
        raise ValueError(
            f"data_loader must sample in order or with shuffle=True, got {name}; its choice of "
            "examples is not what the plan prices: drop the sampler, make_private puts its own "
            "(weights can go into the loss, if they do not depend on the data)"
        )
    if isinstance(loader.sampler, RandomSampler):
        if loader.sampler.replacement or loader.sampler.num_samples != size:
            raise ValueError(
                "data_loader must use every example once an epoch, got a RandomSampler with "
                "replacement or num_samples; use shuffle=True"
            )
        return True
    return False
