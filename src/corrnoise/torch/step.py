"""A private step: check the sum of clipped gradients, record it in the ledger, add the noise.

What comes before it (the gradients of the examples, clipping, summing) is the work of ``Sums``:
Opacus's or our own. What comes after it is the optimizer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from corrnoise.noise import CorrelatedNoise, Key
from corrnoise.noise.exact import ExactNoise
from corrnoise.records import Ledger
from corrnoise.records.keys import Use, keyed
from corrnoise.torch import finite
from corrnoise.torch.draws import StepDraws
from corrnoise.torch.fingerprint import PositionHash
from corrnoise.torch.loader import StepSampler
from corrnoise.torch.placement import Placement, local
from corrnoise.torch.processes import Processes

# What rounding may add to the norm of a sum, relative: that of TF32 in matrix products included.
_ROUNDING = 0.01


class Sums(Protocol):
    """Sums of clipped gradients over the examples of a logical batch, and how they are used.

    Attributes:
        params: the trained ones, in the optimizer's order.
        clip_norm: C.
        placement: of the sums in the flat vector of all parameters: where noise is added here.
    """

    params: list[nn.Parameter]
    clip_norm: float
    placement: Placement

    @property
    def examples(self) -> int:
        """In the sums now."""
        ...

    @property
    def left_out(self) -> torch.Tensor | int:
        """How many of them count as zero, since their gradients are not finite.

        A number on the device of the sums, if it is not 0.
        """
        ...

    def check(self) -> None:
        """Raise if what the plan was made for has changed."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """The sums: one for each parameter, or larger pieces of the flat vector."""
        ...

    def hand_over(self, grads: Sequence[torch.Tensor], batches: int = 1) -> None:
        """Give the optimizer its noisy gradients, of this many batches; the next one begins."""
        ...

    def own_noise(self) -> None:
        """Add normals that are not the stream's, where that is asked for, and hand over."""
        ...

    def drop(self) -> None:
        """Forget everything of the batch."""
        ...

    def check_loss(self, loss: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> None:
        """Raise unless a loss is a mean or a sum over examples, as was told."""
        ...

    def close(self) -> None:
        """Leave the model alone from now on."""
        ...


class PrivateStep:
    """Called once for each logical step, when its sums are complete.

    In this order: refuse what the plan does not cover; refuse sums that are not finite; record the
    step in the ledger; add the noise; hand the result to the optimizer. Whatever is refused leaves
    gradients, noise and ledger as they were. The first step with examples that count as zero, since
    their gradients are not finite, warns.

    Args:
        sums: of clipped gradients.
        noise: the correlated noise, or that of an exact release; ``None`` for normals that are not
            the stream's.
        noise_multiplier: the plan's.
        sampler: the run's batches.
        draws: what a step draws; it ends with the step.
        ledger: of this process.
        key: for the digests of the ledger.
        processes: that train the model.
        stand_in: whether an empty batch comes as one example that stands for none, for modes that
            cannot run on an empty batch; its gradient is replaced by zeros.
        joins: whether one step may take several batches in a row: only where batches are disjoint
            and each step has noise of its own, so that an example still takes part once.
        use: of the key, in the process that keeps its file.
    """

    def __init__(
        self,
        sums: Sums,
        noise: CorrelatedNoise | ExactNoise | None,
        noise_multiplier: float,
        sampler: StepSampler,
        draws: StepDraws,
        ledger: Ledger,
        key: Key,
        processes: Processes,
        *,
        stand_in: bool = False,
        joins: bool = False,
        use: Use | None = None,
    ) -> None:
        self.sums = sums
        sampler.restart = sums.drop
        self._process, self._stand_in = os.getpid(), stand_in
        self._processes = processes
        self._use, self._joins = use, joins
        self._warned = False
        self._hash = PositionHash(key.subkey("positions"))
        self._noise = noise
        self._placement = sums.placement
        self._scale = noise_multiplier * sums.clip_norm
        self._sampler, self._draws = sampler, draws
        self.ledger = ledger
        self._key = key

    @property
    def taken(self) -> int:
        """How many steps were taken."""
        return self._sampler.next_step

    def seek(self, step: int) -> None:
        """Go on with this step: what was taken of its batch so far is dropped."""
        self.sums.drop()
        self._sampler.next_step = step

    def __call__(self) -> None:
        """Take the next step.

        Raises:
            ValueError: something is refused; nothing was released, and the sums are dropped, so
                that a new loop over the data loader begins with the whole batch of this step.
        """
        try:
            self._sampler.next_step = self._take(self.taken)
        except BaseException:
            self.sums.drop()
            self._draws.again()
            raise
        self._draws.end()

    def _take(self, first: int) -> int:
        """Take the step of a batch, or of several that were added up; the step after it."""
        step = self._last(first)
        self._check(first, step)
        grads = self.sums.gradients()
        empty = self._stand_in and not any(map(self._sampler.share, range(first, step + 1)))
        if empty:
            for grad in grads:
                grad.zero_()
        digest = self._digest(step, grads, 0 if empty else self.sums.left_out)
        self._processes.check_step(step, grads[0].device)
        if self._use is not None:
            self._use.claim()
        for each in range(first, step + 1):
            self.ledger.record(each, digest)
        if self._use is not None:
            self._use.mark()
            self._use = None
        if self._noise is None:
            self.sums.own_noise()
            return step + 1
        grads = [grad if local(grad).is_contiguous() else grad.contiguous() for grad in grads]
        targets, offsets = self._placement.targets(grads)
        try:
            if targets and self._scale:
                self._noise.add_(targets, step, self._scale, offsets)
            self.sums.hand_over(grads, step - first + 1)
        except BaseException:  # noise that keeps a state may be past this step, or half-way
            self._noise.seek(step)
            raise
        return step + 1

    def _last(self, first: int) -> int:
        """The last of the batches that the step takes: the one that the loop has.

        Fixed batches of one epoch are disjoint. Added up before they get noise, they cost what they
        cost one by one if each step has noise of its own: every example takes part once. A loop
        ends with the epoch, and a new one starts with empty sums.
        """
        at = self._sampler.delivered
        return at if self._joins and at is not None and at > first else first

    def _check(self, first: int, step: int) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                "a run must stay in the process that called make_private, got a step in a fork of "
                "it; two processes would release different gradients with the same noise: call "
                "make_private in the process that trains"
            )
        self._processes.check()
        self._sampler.check(step)
        shares = [len(self._sampler.share(each)) for each in range(first, step + 1)]
        expected, found = sum(shares), self.sums.examples
        if found != expected and not (expected == 0 and self._stand_in and found == 1):
            raise ValueError(
                f"step {step} must be taken on the {expected} examples of its batch, each once, "
                f"but {found} are in the sum; nothing was released: begin a new loop over the data "
                "loader that make_private returned, and call optimizer.step() once for every "
                "physical batch; where examples are the second dimension, pass batch_first=False"
            )
        self.sums.check()

    def _digest(
        self, step: int, grads: Sequence[torch.Tensor], left_out: torch.Tensor | int
    ) -> str:
        """64 keyed bits that tell this process's gradients from others; refuses what is not finite.

        The gradients have no noise yet, so that nobody without the key may compare anything.
        """
        parts = [local(grad) for grad in grads]
        norms = [torch.linalg.vector_norm(part.detach()).double() for part in parts]
        if isinstance(left_out, torch.Tensor):  # read together, so that the device waits once
            norms.append(left_out.to(norms[0]))
        bits = self._hash(parts)  # before anything waits for the device
        values = torch.stack(norms).tolist()
        count = int(values.pop()) if isinstance(left_out, torch.Tensor) else left_out
        if not all(map(math.isfinite, values)):
            values = self._wide_norms(step, parts)
        self._check_norm(step, values)
        if count and not self._warned:
            self._warned = True
            finite.announce(count, self.sums.examples, step)
        text = repr((step, values, int(bits))).encode()
        return keyed(self._key, b"gradient", text)

    def _wide_norms(self, step: int, parts: Sequence[torch.Tensor]) -> list[float]:
        """Norms where float32 has none: refuses gradients that are not finite themselves."""
        wide = [torch.linalg.vector_norm(part.detach(), dtype=torch.float64) for part in parts]
        values: list[float] = torch.stack(wide).tolist()
        if all(map(math.isfinite, values)):
            return values
        raise ValueError(
            f"gradients must be finite, got NaN or infinity in {self._where(parts)} at step "
            f"{step}; nothing was released: lower the learning rate or mend the data, and begin a "
            "new loop over the data loader. In this mode no single example can be left out of a "
            "sum; grad_sample_mode='hooks' counts it as zero"
        )

    def _where(self, parts: Sequence[torch.Tensor]) -> str:
        """The first parameter whose gradient is not finite."""
        flat = torch.cat([part.detach().reshape(-1) for part in parts])
        sizes = [local(param).numel() for param in self.sums.params]
        for index, part in enumerate(flat.split(sizes)):
            if not part.isfinite().all():
                return f"parameter {index} (shape {tuple(self.sums.params[index].shape)})"
        return "no parameter"

    def _check_norm(self, step: int, norms: Sequence[float]) -> None:
        """Raise if the sum is longer than clipped gradients can make it, rounding aside."""
        norm, count = math.hypot(*norms), self.sums.examples
        if self._placement.sharded:  # of a sum over all ranks
            count = len(self._sampler.batches.indices(step))
        most = count * self.sums.clip_norm
        if norm > most * (1.0 + _ROUNDING):
            raise ValueError(
                f"the sum of {count} clipped gradients must have a norm of at most {most:g}, got "
                f"{norm:g} at step {step}; gradients were not clipped: nothing was released. Use "
                "the model and optimizer that make_private returned"
            )
