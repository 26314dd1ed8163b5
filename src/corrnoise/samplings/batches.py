"""The batches of a run: which examples take part in which step, from a key.

A batch depends only on the key and the step, so a resumed run gets the same batches. The bin, draw
or group of an example does not depend on the other examples, so removing one example does not move
the others; with fixed batches the removed example leaves its place empty. A batch may be empty.
Such a step still adds noise, and still counts as a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise.noise import Key
from corrnoise.noise.generator.stream import NoiseStream
from corrnoise.participation import Participation

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# The ids of the random streams under the subkey for batches.
_ONCE, _EACH_STEP, _EACH_EPOCH = 0, 1, 2


@dataclass(frozen=True)
class Batches:
    """The batches of a run, as returned by ``Sampling.batches``.

    They are a function of the key and the step. A step takes O(num_examples) time at most, or
    O(num_examples·log(num_examples)) for random allocation.

    Attributes:
        num_examples: the size of the dataset.
        participation: n and b.
        choose: a function from a step in [0, n) to the indices of its examples.

    >>> import corrnoise as cn
    >>> part = cn.Participation(num_steps=6, min_sep=3, max_participations=2)
    >>> m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(6))
    >>> batches = cn.samplings.get("fixed").batches(10, part, m, Key.from_bytes(bytes(range(32))))
    >>> [batches.indices(step).tolist() for step in (0, 2, 3)]
    [[0, 1, 2, 3], [7, 8, 9], [0, 1, 2, 3]]
    """

    num_examples: int
    participation: Participation
    choose: Callable[[int], npt.ArrayLike]

    def __post_init__(self) -> None:
        checks.integer("num_examples", self.num_examples, 1)

    def indices(self, step: int) -> Indices:
        """The indices of a step's examples, in increasing order unless batches are shuffled."""
        n = self.participation.num_steps
        step = checks.integer("step", step, 0, n - 1, f"the run is planned for {n} steps")
        return np.asarray(self.choose(step), dtype=np.int64)


def random_words(
    key: Key, num_examples: int, step: int | None = None, *, epoch: int | None = None
) -> Words:
    """64 random bits for each example: drawn once for the run, or for one step or epoch.

    They are words of the ChaCha20 stream of a subkey of their own, in O(num_examples). A sampling
    draws its batches from them.

    Args:
        key: the secret of the run.
        num_examples: the size of the dataset.
        step: the step that the bits are for; by default they are for the whole run.
        epoch: the epoch that the bits are for, instead of a step.

    >>> key = Key.from_bytes(bytes(range(32)))
    >>> bool((random_words(key, 4) == random_words(key, 4)).all()), random_words(key, 4).dtype
    (True, dtype('uint64'))
    """
    which = _ONCE if step is None else _EACH_STEP
    which = which if epoch is None else _EACH_EPOCH
    stream = NoiseStream(key, which, purpose="batches")
    words = stream.words(step or epoch or 0, 0, 2 * num_examples)
    return words.reshape(-1, 2).view(np.uint64)[:, 0]
