"""The moment a step becomes public: check, write down, add noise.

A ``Release`` takes the place of ``add_noise`` on an Opacus optimizer. What comes before it (the
gradients of the examples, clipping, summing) and after it (scaling, the optimizer itself) stays
Opacus's own.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opacus.optimizers import optimizer as opacus_optimizer
from torch import nn

from corrnoise.ledger import Ledger
from corrnoise.noise import CorrelatedNoise
from corrnoise.noise.key import Key
from corrnoise.torch.loader import StepSampler
from corrnoise.torch.placement import Placement, local

# Opacus's own marks on gradients that were used already; it has no public name for them.
_CHECK: Any = opacus_optimizer._check_processed_flag  # pyright: ignore[reportPrivateUsage]
_MARK: Any = opacus_optimizer._mark_as_processed  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True)
class Settings:
    """What the plan was priced for and must find unchanged at every step, by Opacus's names."""

    noise_multiplier: float
    max_grad_norm: float
    max_grad_norms: tuple[float, ...]
    expected_batch_size: float
    loss_reduction: str


_REASONS = {
    "noise_multiplier": "the plan has one noise level: drop the noise scheduler",
    "max_grad_norm": "the plan has one clip norm: drop the clip scheduler or adaptive clipping",
    "max_grad_norms": "the plan has one clip norm for each layer",
    "expected_batch_size": "the normaliser must not depend on the batch",
    "loss_reduction": "it belongs to the normaliser",
}


class Release:
    """Called once for each logical step, where Opacus would draw its noise.

    In this order: refuse what the plan does not cover; refuse gradients that are not finite; write
    the step to the ledger; add the noise; hand the result to the optimizer. Whatever is refused
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
        self.step = 0
        self._optimizer = optimizer
        self._noise = noise
        self._stock_noise: Callable[[], None] = optimizer.add_noise
        self._placement = placement
        self._sampler = sampler
        self.ledger = ledger
        self._key = key
        self._params: list[nn.Parameter] = list(optimizer.params)
        self._settings = _settings(optimizer)

    def __call__(self) -> None:
        """Release the next step."""
        step = self.step
        self._check(step)
        grads = [self._summed(param) for param in self._params]
        digest = self._digest(step, grads)
        self.ledger.record(step, digest)
        if self._noise is None:
            self._stock_noise()
        else:
            grads = [grad if local(grad).is_contiguous() else grad.contiguous() for grad in grads]
            settings = self._settings
            scale = settings.noise_multiplier * settings.max_grad_norm / self._placement.divisor
            targets, offsets = self._placement.targets(grads)
            if targets:
                self._noise.add_(targets, step, scale, offsets)
            for param, grad in zip(self._params, grads, strict=True):
                param.grad = grad.view_as(param)
                _MARK(self._summed(param))
        self.step = step + 1

    def _check(self, step: int) -> None:
        self._sampler.check(step)
        now = _settings(self._optimizer)
        for name, reason in _REASONS.items():
            before, after = getattr(self._settings, name), getattr(now, name)
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

    def _summed(self, param: nn.Parameter) -> torch.Tensor:
        """The sum of clipped gradients, where Opacus keeps it."""
        kept = getattr(self._optimizer, "grad_state", None)
        grad = param.summed_grad if kept is None else kept[param]["summed_grad"]  # type: ignore[attr-defined]
        if grad is None:
            raise ValueError(
                "every parameter must have a gradient at each step, got one without; call "
                "loss.backward() first, also for an empty batch, and freeze unused parameters "
                "before make_private"
            )
        _CHECK(grad)
        return grad

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


def _settings(optimizer: Any) -> Settings:
    return Settings(
        optimizer.noise_multiplier,
        optimizer.max_grad_norm,
        tuple(getattr(optimizer, "max_grad_norms", ())),
        optimizer.expected_batch_size,
        optimizer.loss_reduction,
    )
