"""Sums of clipped gradients by our own clipping, for the user's own model and optimizer.

Neither is wrapped. Hooks on the model's layers watch the forward and backward pass; a hook on the
optimizer clips, adds the noise and hands the gradients over, just before it takes its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

from corrnoise.planning import Plan
from corrnoise.torch import owners
from corrnoise.torch.clipping.clipper import Clipper
from corrnoise.torch.clipping.loss import check_loss
from corrnoise.torch.clipping.recorder import CLOSED
from corrnoise.torch.loader import REPEATED, StepSampler
from corrnoise.torch.options import Options
from corrnoise.torch.pinned import Pinned, check_params, mark
from corrnoise.torch.placement import flattened, local, place, trained
from corrnoise.torch.processes import Processes, unwrapped


class OnePassSums:
    """Sums of clipped gradients over the examples of a logical batch.

    Args:
        module: the user's; with DDP or FSDP2, so wrapped.
        optimizer: the user's.
        plan: of the run.
        processes: that train the model.
        sampler: of the run's batches.
        options: of ``make_private``.

    Attributes:
        optimizer: the user's.
        model: what it trains, without DDP's wrapper.
        params: the trained ones, in the optimizer's order.
        clip_norm: C.
        largest: how many examples come at once, if that is limited.
        placement: of the sums in the flat vector of all parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        processes: Processes,
        sampler: StepSampler,
        options: Options,
    ) -> None:
        self.params, self.clip_norm = trained(optimizer), options.clip_norm
        self.optimizer, self._processes, self._sampler = optimizer, processes, sampler
        self._divisor = float(plan.divisor) if options.loss_reduction == "mean" else 1.0
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = False  # there is nothing for it to sum
        self.model = model = unwrapped(module)
        self._mean = options.loss_reduction == "mean"
        self.clipper = Clipper(
            model,
            self.params,
            self.clip_norm,
            mean=self._mean,
            own=_sharded if processes.sharded else None,
            views=options.views,
        )
        if options.criterion is not None:
            options.criterion.examples = lambda: self.clipper.recorder.examples
        whole = place(self.params, distributed=processes.distributed)
        self._sizes = [local(param).numel() for param in self.params]
        self.placement = flattened(whole, self._sizes)
        self.largest = options.max_physical_batch_size
        self._handed: dict[int, torch.Tensor] = {}
        self._closed = False
        self._skip: list[bool] = []  # what Opacus's memory manager says of batches to come
        self.clipper.recorder.on_start = self._starts
        self._pinned = mark(optimizer, plan, processes.world_size, options)
        # What scripts call the model behind Opacus's wrapper; outside of its submodules.
        object.__setattr__(module, "_module", model)
        # Else torch's scaler finds no gradients before our own step, and says so by an assertion.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._zero_grad: Callable[..., None] = optimizer.zero_grad
        optimizer.zero_grad = self.zero_grad
        optimizer.signal_skip_step = self.signal_skip_step  # type: ignore[attr-defined]

    @property
    def examples(self) -> int:
        """In the sums now."""
        return self.clipper.examples

    @property
    def left_out(self) -> int:
        """None: no single example can be left out of products over all of them."""
        return 0

    def attach(self, step: Callable[[], None]) -> None:
        """Call this before each step of the optimizer that ends a logical batch."""

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            self.check_open()
            if owners.inside(optimizer):
                return None
            _refuse_scaler(optimizer)
            found = None
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # after the optimizer
            if closure is not None:  # it computes the gradients: now, not after the noise
                with torch.enable_grad():
                    loss = closure()
                found = args[:1], {**kwargs, "closure": lambda: loss}
            self._collect()
            if self._unfinished():
                self.check()  # a parameter that came later would get a gradient without noise
                for param in self.params:
                    param.grad = None  # so that the optimizer has nothing to do
            else:
                step()
            owners.steps(optimizer)
            return found

        self.optimizer.register_step_pre_hook(before)

    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()``, with gradients that are not divided by the size of the batch."""
        self.check_open()
        self.clipper.backward(loss)

    def check_loss(self, loss: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> None:
        """Raise unless a loss is a mean or a sum over examples, as ``make_private`` was told."""
        recorder = self.clipper.recorder
        recorder.paused = True
        try:
            check_loss(self.model, loss, batch, mean=self._mean)
        finally:
            recorder.paused = False
        recorder.loss.close()

    def check_open(self) -> None:
        """Raise if the run was ended."""
        if self._closed:
            raise ValueError(CLOSED)

    def close(self) -> None:
        """Leave the model alone from now on."""
        self._closed = True
        self.clipper.recorder.close()

    def undo(self) -> None:
        """Leave the model and the optimizer to another run, as this one does not begin."""
        self.close()
        self.optimizer.zero_grad = self._zero_grad

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Whether a batch to come is followed by another of the same logical batch."""
        self._skip.append(do_skip)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's: a backward pass that no step has used yet is forgotten.

        What ``step`` has taken of a batch that comes in pieces stays.
        """
        self.clipper.recorder.take()
        self._zero_grad(set_to_none=set_to_none)

    def check(self) -> None:
        """Raise if the settings or the parameters have changed."""
        self._pinned.check(Pinned.of(self.optimizer))
        check_params(self.params, self.optimizer)

    def gradients(self) -> list[torch.Tensor]:
        """The sums, as one flat vector: of this process's examples, or its shards of all sums."""
        self.clipper.begin()
        return [self.clipper.flat]

    def hand_over(self, grads: Sequence[torch.Tensor], batches: int = 1) -> None:
        """Give the optimizer its noisy gradients, of this many batches; the next one begins.

        They are in memory of their own. Whoever keeps a gradient (an optimizer, a logger) must not
        see the sums of the next batch in it, which have no noise yet.
        """
        (flat,) = grads
        if self._processes.world_size > 1 and not self._processes.sharded:
            torch.distributed.all_reduce(flat)
        noisy = flat / (self._divisor * (batches if self._mean else 1))  # never ``flat`` itself
        for param, part in zip(self.params, noisy.split(self._sizes), strict=True):
            param.grad = _like(part, param)
            self._handed[id(param)] = param.grad
        self.clipper.drop()

    def own_noise(self) -> None:
        """There is none here."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forget everything of the batch."""
        owners.stops(self.optimizer)
        self.clipper.drop()
        self._skip.clear()

    def _unfinished(self) -> bool:
        """Whether more of the logical batch is to come."""
        if self._skip:
            return self._skip.pop(0)
        if self._sampler.signals:
            self.drop()
            raise ValueError(REPEATED)
        return not self._sampler.complete

    def _starts(self) -> None:
        """The model starts on a batch: what the optimizer had from us is no gradient of it."""
        here, there = self.params[0].device, self.clipper.flat.device
        if here != there:
            raise ValueError(
                f"the model must stay on the device that make_private saw, {there}, got {here}; "
                "move it, or let Accelerate or Lightning move it, before make_private"
            )
        self._collect()
        for param in self.params:
            if param.grad is not None and param.grad is self._handed.get(id(param)):
                param.grad = None
        self._handed.clear()

    def _collect(self) -> None:
        self.clipper.collect(self._handed)


def _refuse_scaler(optimizer: Any) -> None:
    """Raise if a step comes from a scaler of losses."""
    if getattr(optimizer, "found_inf", None) is None:
        return
    for name in ("grad_scale", "found_inf"):  # which torch removes after a step alone
        vars(optimizer).pop(name, None)
    raise ValueError(
        "a private step must come without a GradScaler, whose factor changes from step to step; "
        "use torch.autocast with bfloat16, which needs none: nothing was released"
    )


def _sharded(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """This process's shard of the sum over all processes."""
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    whole = DTensor.from_local(value.view(param.shape), mesh, [Partial("sum")] * mesh.ndim)
    return whole.redistribute(placements=param.placements).to_local()


def _like(values: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """A gradient in the shape and type of its parameter, and sharded as that is."""
    grad = values.view(local(param).shape).to(param.dtype)
    if not isinstance(param, DTensor):
        return grad
    return DTensor.from_local(
        grad, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )
