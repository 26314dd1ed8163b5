"""Clipping in one backward pass: from the calls of layers to sums of clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corrnoise.torch.clipping.loop_loss import backward_times
from corrnoise.torch.clipping.parts import Direct, Factors, Part, bound, together
from corrnoise.torch.clipping.recorder import CALLED_TWICE, Call, Recorder
from corrnoise.torch.clipping.views import grouped
from corrnoise.torch.placement import local
from corrnoise.torch.precision import LEAST_FACTOR

# Of all tensors in a few launches; torch has no public name for it.
_add_to_all: Any = torch._foreach_add_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

# A clip factor and its products are rounded too, in float32.
_DOWN = 1.0 - 2.0**-20


class Clipper:
    """Sums of clipped gradients over the examples of a logical batch.

    Every example's gradient is clipped to the norm ``clip_norm`` and added up, batch by batch,
    until ``drop``. The loss must be a mean or a sum over the examples.

    Guarantees: what one example adds to the sums has a norm of at most ``clip_norm``, all rounding
    in float32 included; where matrix units make products, under the assumptions on them of
    docs/proofs/clipping.md.

    Args:
        model: of which every trained parameter belongs to a layer.
        params: the trained ones, in the order of the sums.
        clip_norm: C.
        mean: whether the loss is a mean over the examples of a batch, else a sum.
        own: what this process keeps of the sum of a parameter's gradients: all of it by default,
            and its shard of the sum over all processes where parameters are sharded.
        views: rows of a batch for each example, one after the other, whose gradients are averaged.

    Attributes:
        examples: in the sums now.
        flat: the sums, in float32, one parameter after the other.
        real: 1 for each row of the batch that is an example and 0 for each that only fills it up;
            ``None`` if all are examples. With it, whoever sets it counts the examples.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        clip_norm: float,
        *,
        mean: bool = True,
        own: Callable[[nn.Parameter, Tensor], Tensor] | None = None,
        views: int = 1,
    ) -> None:
        self.examples = 0
        self.views = views
        self.real: Tensor | None = None
        self.recorder = Recorder(model, params, probe=own is None, mean=mean, views=views)
        self.recorder.on_start = self.collect
        self._params, self._clip_norm = list(params), clip_norm
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._own = own or (lambda param, value: value)
        sizes = [local(param).numel() for param in params]
        self._begun = True  # whether ``flat`` holds this batch's sums, and not those before it
        self.flat = torch.zeros(sum(sizes), device=params[0].device)
        self._views = {
            id(param): view for param, view in zip(params, self.flat.split(sizes), strict=True)
        }

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``, but a mean over the batch counts as the sum.

        Gradients of single examples are then not divided by the size of the batch, and are rounded
        alike in batches of all sizes.

        Raises:
            ValueError: the loss is a mean in 16 bits, or no single number, or the model was last
                called on another number of rows.
        """
        recorder = self.recorder
        if recorder.summed:
            loss.backward()
            return
        if loss.numel() != 1 or loss.dtype not in (torch.float32, torch.float64):
            kind = str(loss.dtype).removeprefix("torch.")
            raise ValueError(
                f"loss must be one number in float32, got {kind} of shape {tuple(loss.shape)}; "
                "compute it from outputs.float(), or call loss.backward()"
            )
        rows, recorder.summed = recorder.examples, True
        try:
            backward_times(loss, rows)
        finally:
            recorder.summed = False
        sizes = {call.examples for call in recorder.calls if call.summed} - {rows}
        if sizes:  # the gradients were multiplied by the size of another batch
            self.drop()
            raise ValueError(
                f"engine.backward must get the loss of the model's latest call, got one of "
                f"{max(sizes)} rows where the latest call was on {rows}; call it before the model "
                "runs again, or call loss.backward(), also where the whole model is inside a "
                "checkpoint with use_reentrant=True: nothing was released"
            )

    def collect(self, known: Mapping[int, Tensor] | None = None) -> None:
        """Add what the last backward pass left to the sums.

        Args:
            known: gradients of parameters that are not of that pass, by the parameters' ids.

        Raises:
            ValueError: a parameter got a gradient outside of its layer, or something mixes
                examples; the sums are dropped.
        """
        calls = self.recorder.take()
        self._check_outside(known or {})
        if not calls:
            return
        count = calls[0].examples
        if any(call.examples != count for call in calls):
            self.drop()
            raise ValueError(
                "every layer must see the same examples between two steps, got batches of "
                f"{sorted({call.examples for call in calls})}; call the model that make_private "
                "saw, not its parts: nothing was released"
            )
        if len({call.number for call in calls}) > 1:
            self.drop()
            raise ValueError(CALLED_TWICE)
        if len({call.summed for call in calls}) > 1:
            self.drop()
            raise ValueError(
                "all losses of a batch must go through engine.backward, or none of them, got some "
                "of each: nothing was released"
            )
        if count % self.views:
            self.drop()
            raise ValueError(
                f"a batch must have {self.views} rows for each example, the views that "
                f"make_private was told of, got {count} rows: nothing was released"
            )
        count //= self.views
        self.recorder.paused = True
        try:
            with torch.no_grad(), torch.autocast(self.flat.device.type, enabled=False):
                self._add(calls, count)
            if self.real is None:
                self.examples += count
        except BaseException:  # sums and count must agree
            self.drop()
            raise
        finally:
            self.recorder.paused = False

    def sums(self) -> list[Tensor]:
        """The sums of the batch so far, one for each parameter: views of ``flat``."""
        self.collect()
        self.begin()
        return [self._views[id(param)].view(local(param).shape) for param in self._params]

    def drop(self) -> None:
        """Forget everything of the batch."""
        self.recorder.recover()
        self.recorder.take()
        self.examples = 0
        self._begun = False

    def begin(self) -> None:
        """Set the sums to zero, unless the batch has begun already."""
        if not self._begun:
            self.flat.zero_()
            self._begun = True

    def _add(self, calls: Sequence[Call], count: int) -> None:
        if count:
            found = self._clipped(calls, count)
        else:  # many layers cannot tell the gradients of no examples apart
            params = {param for call in calls for param in call.layer.params.values()}
            found = {param: self.flat.new_zeros(param.shape) for param in params}
        # In one order, also where a batch is empty in one process: they add up shards together.
        used = [param for param in self._params if param in found]
        own = [self._own(param, found[param]).reshape(-1) for param in used]
        self.begin()
        _add_to_all([self._views[id(param)] for param in used], own)

    def _clipped(self, calls: Sequence[Call], count: int) -> dict[nn.Parameter, Tensor]:
        """The sums of a batch, by parameter."""
        parts: dict[nn.Parameter, list[Part]] = {}
        for call in calls:
            for name, part in call.make().items():
                part = grouped(part, self.views)
                parts.setdefault(call.layer.params[name], []).append(part)
        whole = {param: together(some) for param, some in parts.items()}
        small = {param: part for param, part in whole.items() if isinstance(part, Direct)}
        norms = [part.norms() for param, part in whole.items() if param not in small]
        flat: Direct | None = None
        if small:  # all of them at once
            flat = Direct(torch.cat([part.each().flatten(1) for part in small.values()], 1))
            norms.append(flat.norms())
        scale = 1.0 / self.views if calls[0].summed else float(count)
        longest = (bound(norms) * scale).clamp_min(self._clip_norm)
        factor = scale * _DOWN * self._clip_norm / longest
        factor = factor.masked_fill(factor < LEAST_FACTOR, 0.0).float()
        factors = Factors(factor if self.real is None else factor * self.real[:: self.views])
        found: dict[nn.Parameter, Tensor] = {}
        if flat is not None:
            sizes = [math.prod(part.each().shape[1:]) for part in small.values()]
            found.update(zip(small, flat.weighted(factors).split(sizes), strict=True))
        for param in [param for param in whole if param not in small]:
            found[param] = whole.pop(param).weighted(factors)
        return found

    def _check_outside(self, known: Mapping[int, Tensor]) -> None:
        for param in self._params:
            if param.grad is not None and param.grad is not known.get(id(param)):
                name = self._names.get(id(param), "?")
                self.drop()
                raise ValueError(
                    f"the parameter {name!r} must be used by its own layer alone, but it got a "
                    "gradient outside of it, which was not clipped: nothing was released. Call the "
                    "layer instead of using its parameter, leave penalties on weights to the "
                    "optimizer's weight_decay, or freeze the parameter"
                )
