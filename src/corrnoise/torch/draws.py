"""What a training step draws, such as dropout: from numbers that depend on key and step alone.

Which numbers an example gets depends on how many the examples before it took, and so on their
lengths. From a seed that is known, everyone could tell them apart: one example would change the
gradients of the others, in this step and all later ones. From a secret key nobody can: whatever
examples there are, each gets fresh random numbers. And a generator that is saved after a step, as
many loops do, would tell how many numbers its examples took.

So the generators of torch, NumPy and Python are seeded from the key when the batch of a step comes,
and from what they were seeded with at first, which is no secret, when the step was taken. A resumed
run draws the same, and its checkpoints need no state of them.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


class StepDraws:
    """Seeds the generators of this process when a step begins and when it has ended.

    Args:
        key: the subkey for what steps draw.
        rank: of this process; each has its own.
    """

    def __init__(self, key: bytes, rank: int) -> None:
        self._key, self._rank = key, rank
        self._first = struct.pack("<Q", torch.initial_seed() % 2**64)
        self._step: int | None = None  # that has begun

    def begin(self, step: int) -> None:
        """Before anything of a step is drawn; again for its later pieces, which does nothing."""
        if step != self._step:
            self._step = step
            self._seed(self._key)

    def restart(self) -> None:
        """The next batch begins its step, also one that had begun before."""
        self._step = None

    def again(self) -> None:
        """The step was not taken, and the loop may take its batch once more, from the key too."""
        if self._step is not None:
            self._seed(self._key)

    def end(self) -> None:
        """What comes now does not depend on the examples of the step."""
        if self._step is not None:
            self._seed(self._first)
            self._step = None

    def _seed(self, key: bytes) -> None:
        assert self._step is not None
        numbers = seeds(key, [self._step, self._rank])
        seed(numbers)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(numbers[0])
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(numbers[0])


@contextmanager
def undisturbed() -> Generator[None]:
    """Leave the generators as they were, whatever is drawn: for what happens once in a process.

    A resumed run would else draw other numbers than one that was not interrupted.
    """
    cuda = torch.cuda.is_initialized()
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])  # noqa: NPY002
        if cuda:
            torch.cuda.set_rng_state_all(devices)


def seed(numbers: tuple[int, int, int]) -> None:
    """Seed the generators of the CPU: torch's, NumPy's and Python's."""
    # Not torch.manual_seed, which also visits every device.
    torch.default_generator.manual_seed(numbers[0])
    np.random.seed(numbers[1] & 0xFFFFFFFF)  # noqa: NPY002
    random.seed(numbers[2])


def seeds(key: bytes, numbers: Sequence[int]) -> tuple[int, int, int]:
    """Three numbers of 64 bits: keyed BLAKE2b of numbers."""
    text = struct.pack(f"<{len(numbers)}q", *numbers)
    return struct.unpack("<3Q", hashlib.blake2b(text, key=key, digest_size=24).digest())
