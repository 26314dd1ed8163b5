r"""Which examples take part in which step, as the accounting assumes it, from a key.

    fixed            the dataset is cut once into b parts; step i takes part i mod b
    balls-in-bins    each example falls into one of b bins, uniformly; step i takes bin i mod b
    poisson          each example takes part in each step with probability 1/b
    cyclic-poisson   each example falls into one of p groups; step i takes group i mod p, each of
                     its examples with probability p/b

A batch depends on the key and the step alone, so a run that resumes sees the same batches. A bin, a
draw or a group belongs to its example whatever the others are, so that removing one leaves the
others where they were; with fixed batches the removed one leaves its place empty. Batches may be
empty; such a step still adds noise and still counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from corrnoise import checks
from corrnoise.accounting import SAMPLINGS, Sampling
from corrnoise.accounting.poisson import strategy_bands
from corrnoise.mechanisms import Mechanism
from corrnoise.noise.key import Key
from corrnoise.noise.stream import LARGEST_WORD, NoiseStream
from corrnoise.participation import Participation

Indices = npt.NDArray[np.int64]

# Streams that the noise, which counts from 0, leaves alone.
_EACH_STEP, _ONCE = LARGEST_WORD, LARGEST_WORD - 1


@dataclass(frozen=True)
class Batches:
    """The batches of a run.

    Guarantees: for "balls-in-bins" the bins are uniform up to a statistical distance of b/2^64 for
    each example; for the Poisson samplings the probability is rounded down to a multiple of 2^-64,
    and a smaller one is never less private. Cost: O(num_examples) a step for the Poisson samplings,
    the size of the batch for the others.

    Attributes:
        num_examples: the size of the dataset.
        participation: n and b.
        sampling: as in ``calibrate``.
        key: the secret that the draws come from.
        num_groups: p, for cyclic Poisson sampling; 1 otherwise.
        shuffled: for fixed batches, whether one random order (the same in each epoch) is cut
            instead of the dataset's own.

    >>> part = Participation(num_steps=6, min_sep=3, max_participations=2)
    >>> batches = Batches(10, part, "fixed", Key.from_bytes(bytes(32)))
    >>> [batches.indices(step).tolist() for step in (0, 2, 3)]
    [[0, 1, 2, 3], [7, 8, 9], [0, 1, 2, 3]]
    """

    num_examples: int
    participation: Participation
    sampling: Sampling
    key: Key
    num_groups: int = 1
    shuffled: bool = False

    def __post_init__(self) -> None:
        checks.integer("num_examples", self.num_examples, 1)
        checks.choice("sampling", self.sampling, SAMPLINGS)
        b = self.participation.min_sep
        if self.sampling == "fixed" and b > self.num_examples:
            raise ValueError(
                f"min_sep must be at most num_examples={self.num_examples} for fixed batches, "
                f"got {b}; use larger batches"
            )
        checks.integer("num_groups", self.num_groups, 1, b, "groups are at most min_sep")
        if self.num_groups > 1 and self.sampling != "cyclic-poisson":
            raise ValueError(
                f"num_groups must be 1 for sampling={self.sampling!r}, got {self.num_groups}; "
                "groups belong to cyclic-poisson"
            )

    @staticmethod
    def of(plan: Any, key: Key, *, shuffled: bool = False) -> Batches:
        """The batches that a plan was priced for."""
        groups = 1
        if plan.sampling == "cyclic-poisson":
            assert isinstance(plan.mechanism, Mechanism)
            groups = strategy_bands(plan.mechanism)
        return Batches(plan.num_examples, plan.participation, plan.sampling, key, groups, shuffled)

    def indices(self, step: int) -> Indices:
        """The examples of a step, in increasing order where the dataset's order is not shuffled."""
        n, b = self.participation.num_steps, self.participation.min_sep
        step = checks.integer("step", step, 0, n - 1, f"the run is planned for {n} steps")
        if self.sampling == "fixed":
            return self._parts[step % b]
        if self.sampling == "balls-in-bins":
            order, first = self._bins
            return order[first[step % b] : first[step % b + 1]]
        # p/b, rounded down to a multiple of 2^-64; 1 is every value of 64 bits.
        words = self._words(_EACH_STEP, step)
        taken = np.ones(words.size, bool)
        if self.num_groups < b:
            taken = words < np.uint64((self.num_groups << 64) // b)
        if self.num_groups > 1:
            taken &= self._groups == np.uint64(step % self.num_groups)
        return np.flatnonzero(taken)

    @cached_property
    def _parts(self) -> list[Indices]:
        order = np.arange(self.num_examples)
        if self.shuffled:
            order = np.argsort(self._words(_ONCE, 0), kind="stable")
        return np.array_split(order, self.participation.min_sep)

    @cached_property
    def _bins(self) -> tuple[Indices, Indices]:
        b = self.participation.min_sep
        bins = self._words(_ONCE, 0) % np.uint64(b)
        order = np.argsort(bins, kind="stable")
        return order, np.searchsorted(bins[order], np.arange(b + 1, dtype=np.uint64))

    @cached_property
    def _groups(self) -> npt.NDArray[np.uint64]:
        return self._words(_ONCE, 0) % np.uint64(self.num_groups)

    def _words(self, stream: int, step: int) -> npt.NDArray[np.uint64]:
        """64 random bits for each example."""
        words = NoiseStream(self.key, stream).words(step, 0, 2 * self.num_examples)
        return words.reshape(-1, 2).view(np.uint64)[:, 0]
