"""A data loader that delivers the batches of a plan step by step and tracks the current step."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from corrnoise.samplings import Batches
from corrnoise.torch.augmentation import Augmented, Order, WorkerStart, worker_seed
from corrnoise.torch.collating import collate
from corrnoise.torch.draws import StepDraws

# Batches that are larger than declared by this factor are worth a warning.
_LARGER = 1.2
# From the batches of the steps to physical batches, in the same order.
Split = Callable[[Iterable[list[int]]], Iterable[list[int]]]


REPEATED = (
    "every piece of a batch must be taken once, got one that the loader did not announce, as where "
    "a loop takes the same rows again: nothing was released; begin a new loop over the data loader"
)


class _PhysicalBatches:
    """The value that Opacus's ``BatchSplittingSampler`` reads as ``batch_size`` of a sampler.

    Opacus computes its length as ⌈len(sampler)·(batch_size / max_batch_size)⌉. Random batches have
    no single size, so this object defines that division: it gives the exact number of physical
    batches in the epoch over the number of logical batches.
    """

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler

    def __truediv__(self, largest: int) -> Fraction:
        parts = [max(1, -(-size // largest)) for size in self._sampler.epoch_sizes()]
        return Fraction(sum(parts), len(self._sampler))


class StepSampler(BatchSampler):
    """The batches of the steps that are still to be taken, up to the end of the epoch.

    Batch i belongs to step i only. Iteration always starts with the next step that the optimizer
    will take, also after a resume, or after a loop that ended early. If a part of that step's batch
    is in the sums of gradients already, it is dropped, since the whole batch is delivered again.

    Args:
        batches: the batches of the run.
        draws: seeds the random generators when the loop gets a step's batch.
        rank: the rank of this process; each batch is divided among the ranks.
        world_size: the number of ranks.
        largest: the most examples that are delivered at once; a larger batch comes in pieces.
        views: how often each example is read; its reads follow each other.
        sample_rate: the expected fraction of the dataset in a batch.
    """

    def __init__(
        self,
        batches: Batches,
        draws: StepDraws,
        rank: int = 0,
        world_size: int = 1,
        largest: int | None = None,
        views: int = 1,
        sample_rate: float = 1.0,
    ) -> None:
        self.sample_rate = sample_rate
        self.sampler, self.drop_last = range(batches.num_examples), False
        self.batch_size: Any = _PhysicalBatches(self)
        self.restart: Callable[[], None] = lambda: None  # called when a loop begins
        self.batches, self.largest, self.views = batches, largest, views
        self.next_step = 0  # that the optimizer takes
        self._draws = draws
        self._rank, self._world_size = rank, world_size
        self.delivered: int | None = None  # the step whose batch the loop has
        self.complete = True  # whether it has the last piece of it
        self.signals = False  # whether the optimizer is told of each piece if more are to come

    def __len__(self) -> int:
        if self.largest is None:
            return self.batches.participation.min_sep
        n, b = self.batches.participation.num_steps, self.batches.participation.min_sep
        first = min(self.next_step, n - 1) // b * b
        return sum(len(self.pieces(step)) for step in range(first, min(n, first + b)))

    def __iter__(self) -> Iterator[list[int]]:
        """The pieces; a piece counts as delivered once it is fetched.

        No worker may prefetch from this iterator: steps would be refused.
        """
        for step, complete, indices in self.steps():
            self.deliver(step, complete=complete)
            yield indices

    def deliver(self, step: int, *, complete: bool) -> None:
        """Record that the loop gets a piece of a step's batch, ``complete`` if it is the last."""
        self.delivered, self.complete = step, complete
        self._draws.begin(step)

    def steps(self) -> Iterator[tuple[int, bool, list[int]]]:
        """Triples of a step, whether this is the last piece of its batch, and the piece."""
        n, b = self.batches.participation.num_steps, self.batches.participation.min_sep
        first = self.next_step
        self.restart()
        self._draws.restart()
        if first >= n:  # to look at the data; ``check`` refuses steps
            first = (n - 1) // b * b
        for step in range(first, min(n, first - first % b + b)):
            pieces = self.pieces(step)
            for number, piece in enumerate(pieces, start=1):
                yield step, number == len(pieces), [i for i in piece for _ in range(self.views)]

    def share(self, step: int) -> list[int]:
        """The examples of a step that this process processes."""
        return self.batches.indices(step)[self._rank :: self._world_size].tolist()

    def pieces(self, step: int) -> list[list[int]]:
        """The examples of a step, in pieces that are delivered at once."""
        share = self.share(step)
        if self.largest is None:
            return [share]
        # As many in every process: those that hold shards of a model step together.
        most = -(-len(self.batches.indices(step)) // self._world_size)
        starts = range(0, max(most, 1), self.largest)
        return [share[start : start + self.largest] for start in starts]

    def epoch_sizes(self) -> list[int]:
        """How many rows this process processes in each step of the current epoch."""
        n, b = self.batches.participation.num_steps, self.batches.participation.min_sep
        first = min(self.next_step, n - 1) // b * b
        return [self.views * len(self.share(step)) for step in range(first, min(n, first + b))]

    def check(self, step: int) -> None:
        """Raise unless the loop has the batch of ``step``."""
        n = self.batches.participation.num_steps
        if step >= n:
            raise ValueError(
                f"the run is complete: the plan has {n} steps, and all of them were taken. The "
                "model is trained; leave the loop when engine.steps_taken == engine.plan.num_steps."
                " For more steps plan more epochs from the start: every further step would weaken "
                "the guarantee"
            )
        if self.delivered != step:
            got = self.delivered
            at = "no batch" if got is None else f"the batch of step {got}"
            raise ValueError(
                f"step {step} must be taken on its own batch, but {at} was loaded; iterate over "
                "the data loader that make_private returned, and call optimizer.step() once for "
                "every batch, also for an empty one; instead of adding up gradients of several "
                "batches, take larger ones with max_physical_batch_size"
            )


class _Orders:
    """The requests to the worker processes, in order, with the steps that they belong to.

    Attributes:
        steps: for each request of the last iteration that was not delivered yet, its step and
            whether it completes the batch.
    """

    def __init__(self, sampler: StepSampler, split: Split) -> None:
        self.steps: deque[tuple[int, bool]] = deque()
        self._sampler, self._split = sampler, split

    def __iter__(self) -> Iterator[Order]:
        steps = self.steps = deque[tuple[int, bool]]()
        at = (0, True)

        def batches() -> Iterator[list[int]]:
            nonlocal at
            for step, complete, indices in self._sampler.steps():
                at = (step, complete)
                yield indices

        for indices in self._split(batches()):
            steps.append(at)
            yield Order(at[0], indices)


class StepLoader(DataLoader[Any]):
    """A ``DataLoader`` over a ``StepSampler`` that tells it which batch the loop has.

    Worker processes prefetch batches. Torch delivers batches in the order of its requests, so the
    loader finds the step of a batch by counting.

    Args:
        dataset: the user's dataset.
        sampler: the sampler of the run.
        key: the subkey for augmentation.
        split: divides the sampler's batches into physical batches.
        options: options of torch's ``DataLoader``.

    Attributes:
        device: the device that batches are moved to; ``None`` does not move them.
    """

    # Accelerate's mark of a loader that it has prepared. It takes this one as it is, and fetches no
    # batch ahead of the step.
    _is_accelerate_prepared = True

    def __init__(
        self, dataset: Any, sampler: StepSampler, key: bytes, split: Split, **options: Any
    ) -> None:
        super().__init__(
            dataset,
            batch_sampler=split(sampler),  # type: ignore[arg-type]
            # Of its own, so that iterating does not move the generator of torch.
            generator=torch.Generator().manual_seed(0),
            **options,
        )
        self._step_sampler, self._key, self._options = sampler, key, options
        self.device: torch.device | None = None
        self.source: DataLoader[Any] | None = None  # the user's, before make_private
        self._signals = False
        self._orders, self._seeds = _Orders(sampler, split), torch.Generator()
        self._worker_loader: DataLoader[Any] | None = None

    @property
    def sample_rate(self) -> float:
        """The expected fraction of the dataset in a batch, an attribute of Opacus's loaders."""
        return self._step_sampler.sample_rate

    def __iter__(self) -> Any:
        self._step_sampler.signals = self._signals
        batches = super().__iter__() if self.num_workers == 0 else self._deliver()
        return batches if self.device is None else self._placed(batches)

    @property
    def complete(self) -> bool:
        """Whether the last delivered piece completes the batch of its step."""
        return self._step_sampler.complete

    def in_parts(self, split: Split) -> StepLoader:
        """A loader with physical batches that reports to the same sampler."""
        found = StepLoader(self.dataset, self._step_sampler, self._key, split, **self._options)
        found.device, found._signals = self.device, True
        return found

    def _placed(self, batches: Iterable[Any]) -> Iterator[Any]:
        def put(leaf: Any) -> Any:
            return leaf.to(self.device) if hasattr(leaf, "to") else leaf

        for batch in batches:
            yield pytree.tree_map(put, batch)

    def _deliver(self) -> Iterator[Any]:
        sampler = self._step_sampler
        if self._worker_loader is None:
            options: dict[str, Any] = {
                **self._options,
                "batch_sampler": self._orders,
                "generator": self._seeds,
                "worker_init_fn": WorkerStart(self.worker_init_fn),
            }
            self._worker_loader = DataLoader(Augmented(self.dataset, self._key), **options)
        self._seeds.manual_seed(worker_seed(self._key, sampler.next_step))
        batches = iter(self._worker_loader)
        steps = self._orders.steps
        for batch in batches:
            # Persistent workers have one queue: a loop that began later has taken it over.
            mine = self._orders.steps if self.persistent_workers else steps
            step, complete = mine.popleft()
            sampler.deliver(step, complete=complete)
            yield batch


def step_loader(
    loader: DataLoader[Any],
    sampler: StepSampler,
    key: bytes,
    *,
    batch_first: bool,
    rand_on_empty: bool,
) -> StepLoader:
    """The user's loader, with the batches of the plan."""
    found = StepLoader(
        loader.dataset,
        sampler,
        key,
        lambda batches: batches,
        num_workers=loader.num_workers,
        collate_fn=collate(
            loader, batch_first=batch_first, rand_on_empty=rand_on_empty, views=sampler.views
        ),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )
    found.source = loader
    return found


def users_loader(loader: Any) -> Any:
    """The user's own loader, also if ``make_private`` returned this one for another run."""
    while isinstance(loader, StepLoader) and loader.source is not None:
        loader = loader.source
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"data_loader must be a torch.utils.data.DataLoader, got a {type(loader).__name__}; "
            "wrap the dataset in one"
        )
    return loader


def batch_size(loader: DataLoader[Any]) -> int:
    """The batch size of a loader, also of one with a batch sampler, as Accelerate makes them."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0)


def num_examples(loader: DataLoader[Any]) -> int:
    """The size of the dataset; warns where ``drop_last`` makes batches much larger than declared.

    The plan's batches use every example, so an epoch with one batch less has larger batches.
    """
    size, batches = len(loader.dataset), len(loader)  # type: ignore[arg-type]
    declared = batch_size(loader)
    if loader.drop_last and size > _LARGER * batches * declared:
        warnings.warn(
            f"drop_last=True leaves {batches} batches of {declared} for {size} examples, and the "
            f"plan drops no example: batches have {size / batches:g} on average; use "
            "drop_last=False, or a batch size that divides the dataset",
            stacklevel=4,
        )
    return size


def check_loader(loader: DataLoader[Any]) -> bool:
    """Whether the user's loader shuffles; raises if its sampler cannot be replaced."""
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
    if loader.batch_sampler is None:
        raise ValueError(
            "data_loader must form the batches itself, got batch_size=None, with which the dataset "
            "forms them; give it a batch_size, and a dataset of single examples"
        )
    plain = type(loader.batch_sampler) is BatchSampler
    if not plain or type(loader.sampler) not in (SequentialSampler, RandomSampler):
        name = type(loader.sampler if plain else loader.batch_sampler).__name__
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError(
                "data_loader must have no DistributedSampler, nor the loop its set_epoch: every "
                "process gives the whole dataset, with the batch size of all processes together, "
                "and make_private deals each batch out; leave it out, with shuffle=True"
            )
        raise ValueError(
            f"data_loader must sample in order or with shuffle=True, got {name}; its choice of "
            "examples is not what the plan prices: make_private puts its own in its place. For a "
            "part of the examples, such as all but those held out, pass a "
            "torch.utils.data.Subset as dataset (weights can go into the loss, if they do not "
            "depend on the data)"
        )
    if isinstance(loader.sampler, RandomSampler):
        if loader.sampler.replacement or loader.sampler.num_samples != size:
            raise ValueError(
                "data_loader must use every example once an epoch, got a RandomSampler with "
                "replacement or num_samples; use shuffle=True"
            )
        return True
    return False
