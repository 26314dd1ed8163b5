"""What seeds of torch decide in a run, and what they must not.

The noise of a private run comes from a secret key, and so do random batches, whose secrecy the
price of their sampling assumes. A seed in a script is no secret. Three things may follow seeds: the
order of fixed batches, which is priced for any order; the batches of a run without noise; and those
of a run whose noise comes from a generator of the user.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from corrnoise.noise import Key
from corrnoise.planning import Plan
from corrnoise.samplings import Batches
from corrnoise.torch.processes import Processes

# A generator that nobody has seeded starts at 53 random bits; seeds that people write are shorter.
_WRITTEN = 2**32
_said: set[str] = set()  # what this process has been told already


@dataclass(frozen=True)
class Drawn:
    """The batches of a run.

    Attributes:
        batches: by step.
        key: that they were drawn from, and that augmentation is drawn from.
        order: a digest of the order of the examples, where the key does not decide it.
    """

    batches: Batches
    key: Key
    order: str | None = None


def draw(
    plan: Plan,
    secret: Key,
    loader: DataLoader[Any],
    processes: Processes,
    *,
    shuffled: bool,
    fresh: bool,
    seeded: bool,
) -> Drawn:
    """The batches of a run, from its key or, where that is safe, from torch's generators.

    Args:
        plan: of the run.
        secret: the key of the run.
        loader: the user's, with or without a generator.
        processes: that train the model; the first one draws for all.
        shuffled: whether the loader shuffles.
        fresh: whether the key is new, and lost with the process. A key that is kept decides the
            batches, so that a resumed run has the same ones.
        seeded: whether the run is without noise, or with noise from the user's generator.
    """
    fixed = not plan.sampling.secret
    if seeded and fresh:
        drawn = processes.agree(lambda: torch.randint(256, (32,), generator=loader.generator))
        key = Key.from_bytes(bytes(drawn.tolist()))
        return Drawn(plan.batches(key, shuffled=shuffled), key)
    _warn(loader, plan, fresh=fresh)
    if not (fixed and shuffled) or (loader.generator is None and not fresh):
        return Drawn(plan.batches(secret, shuffled=shuffled), secret)
    order = processes.agree(
        lambda: torch.randperm(plan.num_examples, generator=loader.generator).numpy()
    )
    batches = plan.batches(secret)
    digest = hashlib.sha256(np.asarray(order, dtype="<i8").tobytes()).hexdigest()
    return Drawn(
        Batches(
            batches.num_examples, batches.participation, lambda step: order[batches.indices(step)]
        ),
        secret,
        digest[:16],
    )


def _warn(loader: DataLoader[Any], plan: Plan, *, fresh: bool) -> None:
    """Say which seeds of the user have no effect; once in a process."""
    if plan.sampling.secret and loader.generator is not None:
        _say(
            f"the generator of the data_loader is not used: the batches of sampling="
            f"{plan.sampling.name!r} must be secret and come from the run's key; pass key= to "
            "PrivacyEngine for the same batches again, or sampling='fixed'"
        )
    if fresh and torch.initial_seed() < _WRITTEN:
        what = "the noise of a private run, which comes"
        if plan.sampling.secret:
            what = "the noise or the random batches of a private run, which come"
        _say(
            f"torch.manual_seed does not fix {what} from a secret "
            "key of the operating system; pass key= to PrivacyEngine, a Key or a path, for the "
            "same run again"
        )


def _say(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=7)
