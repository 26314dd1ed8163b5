"""Every touch of Opacus's insides, in one place.

Opacus takes the gradients of single examples, clips and sums them. What is used of it beyond its
documented surface stands here, so that another version, or another clipping engine, is a change to
one file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import opacus
import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import GradSampleModule, conv
from opacus.layers.dp_multihead_attention import DPMultiheadAttention
from opacus.layers.dp_rnn import DPRNNBase
from opacus.optimizers import optimizer as opacus_optimizer
from opacus.utils import batch_memory_manager
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.utils.data import DataLoader

from corrnoise.planning import Plan
from corrnoise.torch import corrected, owners
from corrnoise.torch.added_up import AddedUp
from corrnoise.torch.calls import ModelCalls
from corrnoise.torch.clipping.loss import check_loss
from corrnoise.torch.clipping.recorder import CALLED_TWICE, CLOSED
from corrnoise.torch.finite import clear_, finite_rows, looks_free
from corrnoise.torch.grid_sums import MOST_EXAMPLES, grid, grid_sum
from corrnoise.torch.loader import REPEATED, StepSampler
from corrnoise.torch.options import Options
from corrnoise.torch.packed import PackedOrders
from corrnoise.torch.pinned import Pinned, check_params
from corrnoise.torch.placement import place
from corrnoise.torch.precision import clip_factors, clipped_sum, wide_factors

MODES = ("hooks", "functorch", "ew", "no_op")
# Layers that Opacus's hooks know, and whose parts see the examples in another dimension.
OWN_LAYERS = (DPRNNBase, DPMultiheadAttention)
# Layers that mix the examples of a batch.
MIXING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DistributedDataParallel = DifferentiallyPrivateDistributedDataParallel

# Opacus's own marks on gradients that were used already; it has no public name for them.
_CHECK: Any = opacus_optimizer._check_processed_flag  # pyright: ignore[reportPrivateUsage]
_MARK: Any = opacus_optimizer._mark_as_processed  # pyright: ignore[reportPrivateUsage]


_wrap_data_loader: Any = batch_memory_manager.wrap_data_loader


def _wrap_step_loader(*, data_loader: Any, max_batch_size: int, optimizer: Any) -> Any:
    """What ``BatchMemoryManager`` makes of a loader: for ours, one that knows its batches.

    Opacus would put a plain ``DataLoader`` around our sampler. Its workers run ahead, and nobody
    would see which batch the loop has.
    """
    in_parts = getattr(data_loader, "in_parts", None)
    if in_parts is None:
        return _wrap_data_loader(
            data_loader=data_loader, max_batch_size=max_batch_size, optimizer=optimizer
        )

    def split(batches: Any) -> Any:
        return batch_memory_manager.BatchSplittingSampler(
            sampler=batches, max_batch_size=max_batch_size, optimizer=optimizer
        )

    return in_parts(split)


batch_memory_manager.wrap_data_loader = _wrap_step_loader


_unfold: Any = conv.unfold2d


def _unfold_in_order(pictures: torch.Tensor, **options: Any) -> torch.Tensor:
    """The patches of pictures in any layout.

    Opacus reads the memory as if rows lay one after the other. With channels last, the gradients of
    an example would be those of other pixels, and with the batch last, of other examples.
    """
    return _unfold(pictures.contiguous(), **options)


conv.unfold2d = _unfold_in_order

# Opacus's gradients of single examples that are not those of torch.
_samplers: dict[type[nn.Module], Any] = GradSampleModule.GRAD_SAMPLERS
_samplers.update(
    {kind: corrected.convolution(_samplers[kind]) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
)
_samplers[nn.Embedding] = corrected.embedding(_samplers[nn.Embedding])
_samplers[nn.EmbeddingBag] = corrected.bags
_samplers[nn.LayerNorm] = corrected.layer_norm(_samplers[nn.LayerNorm])


@dataclass(frozen=True)
class Wrapped:
    """What Opacus made of the user's objects.

    Attributes:
        returned: what its ``make_private`` returned.
        optimizer: of any of its classes.
    """

    returned: Any
    optimizer: Any

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that are trained, in the optimizer's order."""
        return list(self.optimizer.params)

    @property
    def module(self) -> Any:
        """The wrapped model."""
        return self.returned[0]


class OpacusSums:
    """The sums of clipped gradients that Opacus keeps, and how many examples are in them.

    Opacus adds up the clipped gradients of physical batches until a logical batch is complete. The
    count says what went in, so that a step is taken on the examples of its own batch, each once.
    Gradients of single examples are clipped here, and not by Opacus: its norms are sums in the type
    of the gradients, and can be too small by their rounding, in float32 too. Opacus clips where it
    draws the noise as well, from a generator of the user's, so that such a run is stock Opacus to
    the bit. The sums of an exact run are float64 and without rounding. An example whose gradient is
    not finite counts as zero.

    Attributes:
        examples: in the sums now.
        left_out: how many of them count as zero: a number on the device, or 0.
        params: the trained ones, in the optimizer's order.
        clip_norm: C.
        placement: of the sums in the flat vector of all parameters.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        options: Options,
        sampler: StepSampler,
        *,
        distributed: bool = False,
    ) -> None:
        self.examples = 0
        self.left_out: torch.Tensor | int = 0
        self._exact, self._sampler = options.exact, sampler
        self.placement = place(wrapped.params, distributed=distributed)
        self._wrapped, self._pinned = wrapped, Pinned.of(wrapped.optimizer)
        self.params, self.clip_norm = wrapped.params, options.clip_norm
        self._own_noise: Callable[[], None] = wrapped.optimizer.add_noise
        self._optimizer = wrapped.optimizer
        # Without a wrapper there are hooks alone, which know the model but are none.
        self._model: nn.Module = getattr(wrapped.module, "_module", wrapped.module)
        # The wrapper of "ew" runs the model with parameters of its own kind.
        self._mode, self._mean = options.grad_sample_mode, options.loss_reduction == "mean"
        called = wrapped.module if self._mode == "ew" else self._model
        # With "no_op" the user takes gradients by functions of their own.
        watched = () if self._mode == "no_op" else self.params
        self._calls = ModelCalls(
            called,
            self._model,
            watched,
            own=(DPRNNBase,),
            mixing=keeps_or_mixes,
            batch_first=options.batch_first,
            mean=self._mean,
        )
        known = self._mode in ("hooks", "functorch")  # where autograd has gradients too
        recurrent = [part for part in self._model.modules() if isinstance(part, DPRNNBase)]
        self._packed = PackedOrders(recurrent if known else (), self._calls)
        self._added_up = AddedUp(
            self._model, self.params if known else (), self._calls, mean=self._mean
        )
        self._closed = False
        self._handing = False  # whether the optimizer's step is one of ours
        self._guard: Any = self._optimizer.original_optimizer.register_step_pre_hook(self._own_step)
        self._add: Callable[[], None] = self._optimizer.clip_and_accumulate
        self._optimizer.clip_and_accumulate = self._clip_and_accumulate
        self._prepare: Callable[..., bool] = self._optimizer.pre_step
        self._optimizer.pre_step = self._pre_step

    def attach(self, step: Callable[[], None]) -> None:
        """Call this once for each logical step, where Opacus would draw its noise."""
        self._optimizer.add_noise = step

    def check(self) -> None:
        """Raise if the settings or the parameters have changed."""
        self._pinned.check(Pinned.of(self._optimizer))
        check_params(self.params, self._optimizer.original_optimizer)

    def gradients(self) -> list[torch.Tensor]:
        """The sums, where Opacus keeps them.

        Raises:
            ValueError: a parameter has none.
        """
        return [_summed(param) for param in self.params]

    def hand_over(self, grads: Sequence[torch.Tensor], batches: int = 1) -> None:
        """Give the optimizer its noisy gradients, in its types; the next batch begins.

        Opacus divides them itself, also by the number of backward passes, which are more than the
        batches where a batch was taken in slices.
        """
        passes = self._optimizer.accumulated_iterations if self._mean else batches
        for param, grad in zip(self.params, grads, strict=True):
            noisy = grad if passes == batches else grad * (passes / batches)
            param.grad = noisy.view_as(param).to(param.dtype)
        self._handed_over()

    def own_noise(self) -> None:
        """Let Opacus draw its own normals and hand over."""
        self._own_noise()
        self._handed_over()

    def check_loss(self, loss: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> None:
        """Raise unless a loss is a mean or a sum over examples, as ``make_private`` was told."""
        if self._mode == "ew":
            raise ValueError(
                "check_loss needs gradients of a whole batch, which grad_sample_mode='ew' does not "
                "take; use 'hooks' to check the loss"
            )
        hooks: Any = self._wrapped.module
        enabled = getattr(hooks, "hooks_enabled", False)
        hooks.hooks_enabled = False
        try:
            with self._calls.unwatched():
                check_loss(self._model, loss, batch, mean=self._mean)
        finally:
            hooks.hooks_enabled = enabled
        self._calls.loss.close()

    def close(self) -> None:
        """Leave model and optimizer alone from now on."""
        self._closed = True
        self.drop()
        self._calls.close()
        self._added_up.close()
        self._packed.close()
        if self._mode in ("hooks", "functorch"):
            self._wrapped.module.remove_hooks()

    def undo(self) -> None:
        """Leave the model and the optimizer to another run, as this one does not begin."""
        self.close()
        self._guard.remove()

    def drop(self) -> None:
        """Forget the sums and the signals for physical batches: the logical batch starts again."""
        self.examples = self.left_out = 0
        self._handing = False
        self._calls.forget()
        self._packed.forget()
        owners.stops(self._optimizer.original_optimizer)
        self._forget_activations()
        self._optimizer._step_skip_queue.clear()  # pyright: ignore[reportPrivateUsage]
        self._optimizer._is_last_step_skipped = False
        for param in self.params:
            param.summed_grad = None  # type: ignore[attr-defined]
            param.grad = None
            if hasattr(param, "grad_sample"):
                param.grad_sample = None  # type: ignore[attr-defined]

    def _handed_over(self) -> None:
        self.examples = self.left_out = 0
        for param in self.params:  # scripts read the sums until the next batch
            _MARK(param.summed_grad)  # type: ignore[attr-defined]
        self._calls.forget()
        self._handing = True

    def _own_step(self, optimizer: Any, *_: Any) -> None:
        """Before each step of the user's optimizer.

        Raises:
            ValueError: it is no step of the wrapper that ``make_private`` returned, which clips the
                gradients and adds the noise.
        """
        if self._closed:
            raise ValueError(CLOSED)
        if owners.inside(optimizer):
            return
        if not self._handing:
            self.drop()
            raise ValueError(
                "optimizer.step() must be that of the optimizer that make_private returned, got "
                "one of the optimizer inside, whose gradients are neither clipped nor noisy: use "
                "the returned one. Nothing was released"
            )
        self._handing = False
        owners.steps(self._optimizer.original_optimizer)

    def _forget_activations(self) -> None:
        """What Opacus's hooks keep of a forward pass whose backward pass does not come."""
        for part in self._model.modules():
            if hasattr(part, "activations"):
                part.activations = []  # type: ignore[assignment]
            if hasattr(part, "max_batch_len"):
                del part.max_batch_len
        for param in self.params:
            if hasattr(param, "_forward_counter"):
                param._forward_counter = 0  # type: ignore[attr-defined]
            if hasattr(param, "_current_grad_sample"):
                del param._current_grad_sample  # type: ignore[attr-defined]

    def _pre_step(self, *given: Any, **named: Any) -> bool:
        if self._closed:
            raise ValueError(CLOSED)
        if self._calls.twice:
            self.drop()
            raise ValueError(CALLED_TWICE)
        queue: list[bool] = self._optimizer._step_skip_queue  # pyright: ignore[reportPrivateUsage]
        if self._sampler.signals and not queue:
            self.drop()
            raise ValueError(REPEATED)
        self._check_used()
        self._check_added_up()
        self._packed.restore(self.params)
        return self._prepare(*given, **named)

    def _clip_and_accumulate(self) -> None:
        """Add what the last backward pass left to the sums, all of it or nothing.

        Where a part was added, as when memory ends, the loop must not add the same rows once more.
        """
        try:
            self._accumulate()
        except BaseException:
            self.drop()
            raise

    def _accumulate(self) -> None:
        for param in self.params:  # also where zero_grad was interrupted, or was not called
            if hasattr(getattr(param, "summed_grad", None), "_processed"):
                param.summed_grad = None  # type: ignore[attr-defined]
        self._leave_out()
        grads: list[torch.Tensor] = self._optimizer.grad_samples
        kinds = {part.dtype for part in (*grads, *self.params)}
        if self._optimizer.generator is not None and kinds == {torch.float32}:
            self._add()
        else:
            self._clip_here(grads)
        self.examples += len(grads[0])
        if self._exact and self.examples > MOST_EXAMPLES:
            raise ValueError(
                f"a batch must have at most {MOST_EXAMPLES} examples in secure_mode, got more, "
                "whose sum float64 would round: nothing was released. Use smaller batches"
            )

    def _leave_out(self) -> None:
        """Let every example whose gradient is not finite count as zero.

        Nothing waits for a GPU here: there all gradients are passed over once more instead.
        """
        bad = ~finite_rows(self._optimizer.grad_samples)
        if looks_free(bad) and not bad.any():
            return
        self.left_out = self.left_out + bad.sum()
        for param in self.params:
            sample: Any = param
            _CHECK(sample.grad_sample)
            if isinstance(sample.grad_sample, list):  # of several backward passes
                some = cast(list[torch.Tensor], sample.grad_sample)
                rows = bad.split([len(each) for each in some])
                sample.grad_sample = [clear_(g, r) for g, r in zip(some, rows, strict=True)]
            else:
                sample.grad_sample = clear_(sample.grad_sample, bad)

    def _check_used(self) -> None:
        """Raise if a parameter has no gradients of single examples."""
        unused = [p for p in self.params if getattr(p, "grad_sample", None) is None]
        if not unused:
            return
        if len(unused) == len(self.params):
            self.drop()
            raise ValueError(
                "optimizer.step() must come after loss.backward() on a batch, got no gradients at "
                "all; call backward, also for an empty batch"
            )
        self.drop()
        names = {id(param): name for name, param in self._model.named_parameters()}
        name = names.get(id(unused[0]), "?")
        raise ValueError(
            f"every trained parameter must take part in the loss, got none of {name!r} at this "
            "step; freeze what is not used (requires_grad_(False)) before make_private, or take "
            "grad_sample_mode='one_pass', where it counts as zero: nothing was released"
        )

    def _check_added_up(self) -> None:
        """Raise if Opacus's gradients of single examples are not those of torch."""
        name = self._added_up.wrong()
        if name is None:
            return
        self.drop()
        raise ValueError(
            f"the gradients of single examples must add up to torch's gradient of a batch, but "
            f"those of Opacus for {name!r} do not: use a parameter in its own layer alone, leave "
            "penalties on weights to the optimizer's weight_decay, give a layer all that it needs "
            "as one positional tensor, and do not change what it does after make_private; or take "
            "grad_sample_mode='one_pass': nothing was released"
        )

    def _clip_here(self, grads: Sequence[torch.Tensor]) -> None:
        find = wide_factors if self._exact else clip_factors
        clips = getattr(self._optimizer, "max_grad_norms", None)
        if clips is None:
            factors = [find(grads, self._optimizer.max_grad_norm)] * len(grads)
        else:
            factors = [find([g], c) for g, c in zip(grads, clips, strict=True)]
        unit = grid(self.clip_norm)
        for param, grad, factor in zip(self._optimizer.params, grads, factors, strict=True):
            sample: Any = param
            _CHECK(sample.grad_sample)
            total = grid_sum(grad, factor, unit) if self._exact else clipped_sum(grad, factor)
            sample.summed_grad = total if sample.summed_grad is None else sample.summed_grad + total
            _MARK(sample.grad_sample)


def wrap(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    plan: Plan,
    world_size: int,
    options: Options,
) -> Wrapped:
    """Opacus's objects for a plan; the loader has the plan's batches already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        engine = opacus.PrivacyEngine()
    returned: Any = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=plan.noise_multiplier,
        poisson_sampling=False,
        max_grad_norm=options.max_grad_norm,
        batch_first=options.batch_first,
        loss_reduction=options.loss_reduction,
        clipping=options.clipping,
        noise_generator=options.noise_generator,
        grad_sample_mode=options.grad_sample_mode,
        wrap_model=options.wrap_model,
    )
    wrapped, private = returned[0], returned[1]
    if not options.joins:
        wrapped.forbid_grad_accumulation()
    private.attach_step_hook(lambda _: None)  # the step counts, not Opacus's accountant
    # Opacus computes this as int(N·(1/b)), which rounding can make one less, and 0.
    private.expected_batch_size = plan.divisor / world_size
    return Wrapped(returned, private)


def check_free(module: nn.Module) -> None:
    """Raise if a model has the hooks of a run that was not closed."""
    inside = getattr(module, "_module", module)
    if hasattr(inside, "autograd_grad_sample_hooks"):
        raise ValueError(
            "module must be of no other run in Opacus's modes, got one whose hooks are still "
            "there; call close() of the engine before, or make the model again"
        )


def is_valid(module: nn.Module) -> bool:
    """Whether Opacus can take gradients of single examples through the module."""
    return ModuleValidator.is_valid(module)


def validate(module: nn.Module) -> None:
    """As ``is_valid``, but raises with the reason, such as BatchNorm.

    Raises:
        UnsupportedModuleError: Opacus's own type.
    """
    errors = ModuleValidator.validate(module, strict=False)
    if not errors:
        return
    mixing = [
        f"{name or 'the model itself'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if isinstance(part, MIXING)
    ]
    if not mixing:
        raise UnsupportedModuleError(errors)
    raise UnsupportedModuleError(
        f"module must treat the examples of a batch apart, got BatchNorm in {', '.join(mixing)}, "
        "which mixes them, so that clipping bounds no example's share; call "
        "PrivacyEngine.get_compatible_module(model), which puts GroupNorm in its place, before the "
        "optimizer is made"
    )


def compatible(module: nn.Module) -> nn.Module:
    """A copy of the module with the parts replaced that cannot be private."""
    return opacus.PrivacyEngine.get_compatible_module(module)


def keeps_or_mixes(part: nn.Module) -> bool:
    """Whether a layer in training mode mixes examples, or keeps statistics of them."""
    return isinstance(part, MIXING) or bool(getattr(part, "track_running_stats", False))


def _summed(param: nn.Parameter) -> torch.Tensor:
    grad: Any = param.summed_grad  # type: ignore[attr-defined]
    if grad is None:
        raise ValueError(
            "every parameter must have a gradient at each step, got one without; call "
            "loss.backward() first, also for an empty batch, and freeze unused parameters "
            "before make_private"
        )
    _CHECK(grad)
    return grad
