"""Random allocation: in each epoch, each example takes part in one random step of the b."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from corrnoise._rounding import counted
from corrnoise.accounting import composed
from corrnoise.mechanisms import Mechanism
from corrnoise.mechanisms.registry import Amplification
from corrnoise.noise import Key
from corrnoise.participation import Participation
from corrnoise.samplings.batches import Batches, Indices, random_words
from corrnoise.samplings.sampling import Array, Sampling, by_step


@dataclass(frozen=True)
class RandomAllocation(Sampling):
    """Random allocation, drawn independently in each epoch, priced by composing its epochs.

    It is valid for independent noise. Every example is used exactly once in each whole epoch, and
    at most once in a last epoch that is cut short. ε (``corrnoise.accounting.composed``) is a bound
    with no random draws, tight up to grids, and never above that of fixed batches. The steps of the
    batches are uniform up to a statistical distance of b/2^64 for each example and epoch. The
    batches of an epoch take O(num_examples·log(num_examples)).
    """

    name: ClassVar[str] = "random-allocation"
    sentence: ClassVar[str] = (
        "random allocation: in each epoch each example in one random step, drawn afresh"
    )
    accountant: ClassVar[str] = "composition of dominating pairs of random allocation"
    secret: ClassVar[bool] = True
    amplification: ClassVar[Amplification] = "independent"

    def objection(self, mechanism: Mechanism, participation: Participation) -> str:
        """C must be a multiple of the identity, and every epoch must use every example."""
        n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
        if not mechanism.toeplitz or mechanism.strategy_bands > 1:
            return "C correlates the noise of different steps"
        if k != -(-n // b):
            return f"{n} steps have {-(-n // b)} epochs, but max_participations is {k}"
        return ""

    def takes_part(self, mechanism: Mechanism, participation: Participation) -> str:
        """Each example takes part once in each epoch; its steps may follow each other."""
        epoch = counted(participation.min_sep, "step")
        if participation.max_participations == 1:
            return f"at most once (k), in a random one of {epoch} (b)"
        return (
            f"at most once in each epoch of {epoch} (b), in a random one that is drawn afresh, so "
            f"{participation.most}, with no least distance"
        )

    def delta(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        epsilon: float,
        num_steps: int,
    ) -> float:
        """An upper bound of δ(ε), tight up to the grids of the accountant."""
        sigma = noise_multiplier / mechanism.column_norm
        return composed.delta_bound(sigma, participation.min_sep, num_steps, epsilon)

    def noise(
        self, mechanism: Mechanism, participation: Participation, epsilon: float, delta: float
    ) -> float:
        """The least noise multiplier with which a run is (ε, δ)-DP, or slightly more."""
        n, b = participation.num_steps, participation.min_sep
        return composed.noise(b, n, epsilon, delta) * mechanism.column_norm

    def log_ratio(
        self,
        mechanism: Mechanism,
        participation: Participation,
        precision: Array,
        outputs: Array,
        taken: npt.NDArray[np.bool_],
        means: Array | None = None,
    ) -> Array:
        """The sum over epochs of the log of the mean ratio of b steps; later steps have ratio 1."""
        n, b = participation.num_steps, participation.min_sep
        steps = by_step(precision, outputs)
        whole = np.zeros((-(-n // b) * b, steps.shape[1]))
        whole[:n] = steps
        epochs = whole.reshape(-1, b, steps.shape[1])
        return np.sum(np.logaddexp.reduce(epochs, axis=1) - math.log(b), axis=0)

    def batches(
        self,
        num_examples: int,
        participation: Participation,
        mechanism: Mechanism,
        key: Key,
        *,
        shuffled: bool = False,
    ) -> Batches:
        """One random step for each example and epoch, from 64 random bits each."""
        b = participation.min_sep

        @lru_cache(maxsize=1)
        def epoch(number: int) -> tuple[Indices, Indices]:
            own = random_words(key, num_examples, epoch=number) % np.uint64(b)
            order = np.argsort(own, kind="stable")
            return order, np.searchsorted(own[order], np.arange(b + 1, dtype=np.uint64))

        def choose(step: int) -> Indices:
            order, first = epoch(step // b)
            return order[first[step % b] : first[step % b + 1]]

        return Batches(num_examples, participation, choose)


RANDOM_ALLOCATION = RandomAllocation()
