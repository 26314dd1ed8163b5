"""A private step: check the sum of clipped gradients, record it in the ledger, add the noise.

A ``PrivateStep`` takes the place of ``add_noise`` on an Opacus optimizer. What comes before it (the
gradients of the examples, clipping, summing) and after it (scaling, the optimizer itself) is
Opacus's own.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from corrnoise.noise import CorrelatedNoise, Key
from corrnoise.records import Ledger
from corrnoise.torch import opacus
from corrnoise.torch.loader import StepSampler
from corrnoise.torch.placement import Placement, local

_REASONS = {
    "noise_multiplier": "the plan has one noise level: drop the noise scheduler",
    "max_grad_norm": "the plan has one clip norm: drop the clip scheduler or adaptive clipping",
    "max_grad_norms": "the plan has one clip norm for each layer",
    "expected_batch_size": "the divisor must not depend on the batch",
    "loss_reduction": "it belongs to the divisor",
}


class PrivateStep:
    """Called once for each logical step, where Opacus would draw its noise.

    In this order: refuse what the plan does not cover; refuse gradients that are not finite; record
    the step in the ledger; add the noise; hand the result to the optimizer. Whatever is refused
    leaves gradients, noise and ledger as they were.

    Args:
        optimizer: Opacus's, of any class.
        noise: the correlated noise; ``None`` keeps Opacus's own normals.
        placement: which part of it is added here.
        sampler: the run's batches.
        ledger: of this process.
        key: for the digests of the ledger.
    """

    def __init__(
        self,
        optimizer: Any,
        noise: CorrelatedNoise | None,
        placement: Placement,
        sampler: StepSampler,
        ledger: Ledger,
        key: Key,
    ) -> None:
        self.taken = 0  # how many steps were taken
        self._optimizer = optimizer
        self._noise = noise
        self._stock_noise: Callable[[], None] = optimizer.add_noise
        self._placement = placement
        self._sampler = sampler
        self.ledger = ledger
        self._key = key
        self._params: list[nn.Parameter] = list(optimizer.params)
        self._pinned = opacus.Pinned.of(optimizer)

    def __call__(self) -> None:
        """Take the next step."""
        step = self.taken
        self._check(step)
        grads = opacus.summed_gradients(self._optimizer, self._params)
        digest = self._digest(step, grads)
        self.ledger.record(step, digest)
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
        self.taken = step + 1

    def _check(self, step: int) -> None:
        self._sampler.check(step)
        now = opacus.Pinned.of(self._optimizer)
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
        bits = torch.stack([_bits(part) for part in parts])
        norms = torch.stack([torch.linalg.vector_norm(part.detach()).double() for part in parts])
        values = norms.tolist()
        if not all(math.isfinite(value) for value in values):
            bad = next(k for k, value in enumerate(values) if not math.isfinite(value))
            raise ValueError(
                f"gradients must be finite, got NaN or infinity in parameter {bad} (shape "
                f"{tuple(self._params[bad].shape)}) at step {step}; nothing was released: call "
                "optimizer.zero_grad() and lower the learning rate or mend the data"
            )
        text = repr((step, values, bits.tolist())).encode()
        return hmac.new(self._key.reveal(), b"gradient" + text, hashlib.sha256).hexdigest()[:16]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kind = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.detach().contiguous().view(kind).sum(dtype=torch.int64)
