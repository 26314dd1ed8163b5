"""A private step: check the sum of clipped gradients, record it in the ledger, add the noise.

A ``PrivateStep`` takes the place of ``add_noise`` on an Opacus optimizer. What comes before it (the
gradients of the examples, clipping, summing) and after it (scaling, the optimizer itself) is
Opacus's own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import nn

from corrnoise.noise import CorrelatedNoise, Key
from corrnoise.records import Ledger
from corrnoise.torch import opacus
from corrnoise.torch.fingerprint import PositionHash, keyed
from corrnoise.torch.loader import StepSampler
from corrnoise.torch.placement import Placement, local

# What rounding may add to the norm of a sum, relative: that of TF32 in matrix products included.
_ROUNDING = 0.01

_REASONS = {
    "noise_multiplier": "the plan has one noise level: drop the noise scheduler",
    "max_grad_norm": "the plan has one clip norm: drop the clip scheduler or adaptive clipping",
    "max_grad_norms": "the plan has one clip norm for each layer",
    "expected_batch_size": "the divisor must not depend on the batch",
    "loss_reduction": "it belongs to the divisor",
    "ghost_clip_norm": "the plan has one clip norm: leave the model's max_grad_norm alone",
}


class PrivateStep:
    """Called once for each logical step, where Opacus would draw its noise.

    In this order: refuse what the plan does not cover; refuse gradients that are not finite; record
    the step in the ledger; add the noise; hand the result to the optimizer. Whatever is refused
    leaves gradients, noise and ledger as they were.

    Args:
        wrapped: Opacus's objects.
        noise: the correlated noise; ``None`` keeps Opacus's own normals.
        placement: which part of it is added here.
        sampler: the run's batches.
        ledger: of this process.
        key: for the digests of the ledger.
        stand_in: whether an empty batch comes as one example that stands for none, for modes that
            cannot run on an empty batch; its gradient is replaced by zeros.
        on_first: called when the first step has been recorded, before it is released.
    """

    def __init__(
        self,
        wrapped: opacus.Wrapped,
        noise: CorrelatedNoise | None,
        placement: Placement,
        sampler: StepSampler,
        ledger: Ledger,
        key: Key,
        *,
        stand_in: bool = False,
        on_first: Callable[[], None] | None = None,
    ) -> None:
        self.taken = 0  # how many steps were taken
        self.tally = opacus.Tally(wrapped)
        sampler.restart = self.tally.drop
        self._process, self._stand_in = os.getpid(), stand_in
        self._on_first = on_first
        self._hash = PositionHash(key.subkey("positions"))
        self._wrapped, self._optimizer = wrapped, wrapped.optimizer
        self._noise = noise
        self._stock_noise: Callable[[], None] = self._optimizer.add_noise
        self._placement = placement
        self._sampler = sampler
        self.ledger = ledger
        self._key = key
        self._params: list[nn.Parameter] = wrapped.params
        self._pinned = opacus.Pinned.of(wrapped)

    def __call__(self) -> None:
        """Take the next step.

        Raises:
            ValueError: something is refused; nothing was released, and the sums are dropped, so
                that a new loop over the data loader begins with the whole batch of this step.
        """
        try:
            self._take(self.taken)
        except BaseException:
            self.tally.drop()
            raise
        self.tally.examples = 0
        self.taken += 1

    def _take(self, step: int) -> None:
        self._check(step)
        grads = opacus.summed_gradients(self._optimizer, self._params)
        if self._stand_in and not self._sampler.share(step):
            for grad in grads:
                grad.zero_()
        digest = self._digest(step, grads)
        self.ledger.record(step, digest)
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        if self._noise is None:
            self._stock_noise()
        else:
            grads = [grad if local(grad).is_contiguous() else grad.contiguous() for grad in grads]
            pinned = self._pinned
            scale = pinned.noise_multiplier * pinned.max_grad_norm / self._placement.divisor
            targets, offsets = self._placement.targets(grads)
            if targets:
                self._noise.add_(targets, step, scale, offsets)
            opacus.hand_over(self._optimizer, self._params, grads)

    def _check(self, step: int) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                "a run must stay in the process that called make_private, got a step in a fork of "
                "it; two processes would release different gradients with the same noise: call "
                "make_private in the process that trains"
            )
        self._sampler.check(step)
        expected, found = len(self._sampler.share(step)), self.tally.examples
        if found != expected and not (expected == 0 and self._stand_in and found == 1):
            raise ValueError(
                f"step {step} must be taken on the {expected} examples of its batch, each once, "
                f"but {found} are in the sum; nothing was released: begin a new loop over the data "
                "loader that make_private returned, and call optimizer.step() once for every "
                "physical batch"
            )
        now = opacus.Pinned.of(self._wrapped)
        for name, reason in _REASONS.items():
            before, after = getattr(self._pinned, name), getattr(now, name)
            if before != after:
                raise ValueError(
                    f"{name} must stay {before!r} for the whole run, got {after!r}; {reason}"
                )
        params = list(self._optimizer.params)
        if len(params) != len(self._params) or any(
            a is not b for a, b in zip(params, self._params, strict=True)
        ):
            raise ValueError(
                f"the optimizer must keep the {len(self._params)} parameters that make_private "
                f"saw, got {len(params)}, not all of them the same; freeze, unfreeze or add "
                "parameters before make_private"
            )

    def _digest(self, step: int, grads: Sequence[torch.Tensor]) -> str:
        """64 keyed bits that tell this process's gradients from others; refuses what is not finite.

        The gradients have no noise yet, so that nobody without the key may compare anything.
        """
        parts = [local(grad) for grad in grads]
        norms = [torch.linalg.vector_norm(part.detach()).double() for part in parts]
        values = torch.stack(norms).tolist()
        if not all(math.isfinite(value) for value in values):
            bad = next(k for k, value in enumerate(values) if not math.isfinite(value))
            raise ValueError(
                f"gradients must be finite, got NaN or infinity in parameter {bad} (shape "
                f"{tuple(self._params[bad].shape)}) at step {step}; nothing was released: lower "
                "the learning rate or mend the data, and begin a new loop over the data loader"
            )
        self._check_norm(step, values)
        text = repr((step, values, int(self._hash(parts)))).encode()
        return keyed(self._key, b"gradient", text)

    def _check_norm(self, step: int, norms: Sequence[float]) -> None:
        """Raise if the sum is longer than clipped gradients can make it, rounding aside."""
        norm, count = math.hypot(*norms), self.tally.examples
        if self._placement.divisor > 1:  # a shard of a sum over all ranks
            count = len(self._sampler.batches.indices(step))
        most = count * self._pinned.max_grad_norm / self._placement.divisor
        if norm > most * (1.0 + _ROUNDING):
            raise ValueError(
                f"the sum of {count} clipped gradients must have a norm of at most {most:g}, got "
                f"{norm:g} at step {step}; gradients were not clipped: nothing was released. Use "
                "the model, criterion and optimizer that make_private returned"
            )
