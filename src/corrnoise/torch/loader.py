"""A data loader that delivers the batches of a plan, step by step, and knows where it stands."""

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
        draws: what a step draws; seeded when the loop gets its batch.
        rank: of this process; each batch is dealt out to the ranks.
        world_size: the number of ranks.
        largest: how many examples come at once; a batch comes in several pieces if it has more.
        views: how often each example is read, one time after the other.
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
        """The pieces, each of which counts as what the loop has once it is fetched.

        Around it no worker may run ahead of the loop: steps would be refused.
        """
        for step, complete, indices in self.steps():
            self.deliver(step, complete=complete)
            yield indices

    def deliver(self, step: int, *, complete: bool) -> None:
        """The loop gets a piece of the batch of a step, perhaps the last one."""
        self.delivered, self.complete = step, complete
        self._draws.begin(step)

    def steps(self) -> Iterator[tuple[int, bool, list[int]]]:
        """Each step, whether a piece of its batch is the last one, and the piece."""
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

    def epoch_sizes(self) -> list[int]:
        """How many rows this process takes in each step of the current epoch."""
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
    """What the worker processes are asked for, in order; it remembers the steps.

    Attributes:
        steps: of the orders of the last iteration that no one has taken out yet, and whether they
            complete their batches.
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

    Worker processes run ahead of the loop. Torch delivers batches in the order in which it asked
    for them, so the loader counts along.

    Args:
        dataset: the user's.
        sampler: of the run.
        key: the subkey for augmentation.
        split: makes physical batches of the sampler's.
        options: torch's.

    Attributes:
        device: where batches are put; ``None`` leaves them where they are.
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
        """The expected fraction of the dataset in a batch, as loaders of Opacus have it."""
        return self._step_sampler.sample_rate

    def __iter__(self) -> Any:
        self._step_sampler.signals = self._signals
        batches = super().__iter__() if self.num_workers == 0 else self._deliver()
        return batches if self.device is None else self._placed(batches)

    @property
    def complete(self) -> bool:
        """Whether what was delivered last completes the batch of its step."""
        return self._step_sampler.complete

    def in_parts(self, split: Split) -> StepLoader:
        """The same loader with physical batches; it too tells the sampler what the loop has."""
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
    """The user's loader with the plan's batches instead of its own."""
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
    """The loader that the user made, of one that ``make_private`` returned for another run."""
    while isinstance(loader, StepLoader) and loader.source is not None:
        loader = loader.source
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"data_loader must be a torch.utils.data.DataLoader, got a {type(loader).__name__}; "
            "wrap the dataset in one"
        )
    return loader


def batch_size(loader: DataLoader[Any]) -> int:
    """Of a loader, also of one that was made with a batch sampler, as Accelerate makes them."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0)


def num_examples(loader: DataLoader[Any]) -> int:
    """The size of the dataset; warns where ``drop_last`` makes batches much larger than declared.

    The plan's batches use every example. Without its last batch an epoch has fewer of them.
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
