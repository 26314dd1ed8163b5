"""Adam and AdamW for private gradients: their denominators are corrected for the noise.

Adam divides by the root of the second moment v̂, which contains the whole noise of a step.
Correlated noise is large at each step and cancels over many steps, so the steps of torch's Adam are
ten times too small, or more. The part m of v̂ that comes from the noise is known, with its standard
deviation s. It is replaced by e², where e is the standard deviation of independent noise that would
move the weights as far:

    v̂ ← e² + max(r, v̂ - m - 3s)

Here r is the excess of v̂ over m in the mean over the tensor, in which the noise varies little. With
independent noise e² = m, and the step is that of torch's Adam without the fluctuation of the noise;
without noise it is exactly torch's. See docs/adam.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from corrnoise.torch.gradient_noise import Array, GradientNoise

_REFUSED = {
    "amsgrad": "the largest second moment would be that of the largest noise",
    "differentiable": "gradients do not flow through a private step",
}
# Optimizers that divide by second moments and have no betas.
_DIVIDING = ("RMSprop", "Adagrad", "Adadelta", "Adafactor")
# Standard deviations by which the second moment must exceed the noise's to count as signal.
_SURE = 3.0


@runtime_checkable
class KnowsNoise(Protocol):
    """An optimizer that uses the known distribution of the noise in its gradients."""

    def know_noise(self, noise: GradientNoise) -> None:
        """``make_private`` calls this once, with the noise of the run."""
        ...


def introduce(optimizer: torch.optim.Optimizer, noise: GradientNoise) -> None:
    """Tell an optimizer about the noise, or warn if its second moments would contain the noise."""
    if isinstance(optimizer, KnowsNoise):
        optimizer.know_noise(noise)
        return
    name = type(optimizer).__name__
    divides = "betas" in optimizer.param_groups[0] or name in _DIVIDING
    if divides and not noise.mechanism.independent:
        ours = "AdamW" if "W" in name else "Adam"
        alike = "has the same arguments and " if "Adam" in name and name not in _DIVIDING else ""
        warnings.warn(
            f"{name} divides by a second moment that contains the whole noise of a step, which is "
            "large where noise is correlated: its steps will be ten times too small, and more; use "
            f"corrnoise.torch.{ours}, which {alike}knows the noise, or mechanism='dp_sgd'",
            stacklevel=5,
        )


@dataclass(frozen=True)
class _Known:
    """What is known about the noise for a pair of betas.

    Attributes:
        mean: what the noise adds to the second moment after each step, m.
        sure: three standard deviations of that, 3s; an excess beyond it comes from a gradient.
        put: what replaces the noise in the denominator, e².
    """

    mean: Array
    sure: Array
    put: float

    def replace_noise(self, below: list[Tensor], count: int) -> None:
        """Replace the noise in bias-corrected second moments after ``count`` steps, in place.

        All tensors have one dtype and device.
        """
        at = min(count, len(self.mean)) - 1
        mean, sure = float(self.mean[at]), float(self.sure[at])
        sizes = [max(tensor.numel(), 1) for tensor in below]
        # Values are at least 0, so that the norm of order 1 is the sum. No coordinate counts for
        # more than noise could make of it: what stands out is taken by itself below.
        capped = _foreach("clamp_max")(below, mean + sure)
        exact = torch.promote_types(below[0].dtype, torch.float32)
        pooled = _foreach("norm")(capped, 1, dtype=exact)  # over all shards of a tensor
        pooled = _foreach("mul")(pooled, [1.0 / size for size in sizes])
        pooled = _foreach("sub")(pooled, [mean + sure / math.sqrt(size) for size in sizes])
        pooled = _foreach("clamp_min")(pooled, 0.0)
        _foreach("sub_")(below, mean + sure)
        for tensor, least in zip(below, pooled, strict=True):
            tensor.clamp_min_(least.to(tensor.dtype))
        _foreach("add_")(below, self.put)


class _Aware:
    """The step that ``Adam`` and ``AdamW`` share."""

    _noise: GradientNoise | None = None

    def know_noise(self, noise: GradientNoise) -> None:
        """Use this noise from now on; ``make_private`` calls it."""
        self._noise = noise
        self._known: dict[tuple[float, float], _Known] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in torch.

        Raises:
            ValueError: amsgrad is set, whose largest second moment would be the largest noise, or
                differentiable steps are.
        """
        cast(Any, super()).add_param_group(param_group)
        for name, reason in _REFUSED.items():
            if param_group.get(name):
                raise ValueError(f"{name} must be False, got True: {reason}; drop it")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, as torch's Adam does.

        Args:
            closure: a function that computes the loss again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = cast(torch.optim.Optimizer, self)
        for group in own.param_groups:
            at: dict[Any, list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = own.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["step"] += 1
                key = (int(state["step"]), param.device, param.dtype)
                at.setdefault(key, []).append(param)
            for (count, _, _), params in at.items():
                self._update(group, params, [own.state[param] for param in params], count)
        return loss

    def _update(
        self, group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]], count: int
    ) -> None:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        grads = [cast(Tensor, param.grad) for param in params]
        firsts = [state["exp_avg"] for state in states]
        seconds = [state["exp_avg_sq"] for state in states]
        if group["maximize"]:
            grads = list(_foreach("neg")(grads))
        if decay and (isinstance(self, torch.optim.AdamW) or group.get("decoupled_weight_decay")):
            _foreach("mul_")(params, 1.0 - rate * decay)
        elif decay:
            grads = list(_foreach("add")(grads, params, alpha=decay))
        _foreach("lerp_")(firsts, grads, 1.0 - beta1)
        _foreach("mul_")(seconds, beta2)
        _foreach("addcmul_")(seconds, grads, grads, 1.0 - beta2)
        below = _foreach("div")(seconds, 1.0 - beta2**count)
        known = self._about(beta1, beta2)
        if known is not None:
            known.replace_noise(list(below), count)
        _foreach("sqrt_")(below)
        _foreach("add_")(below, float(group["eps"]))
        _foreach("addcdiv_")(params, firsts, below, -rate / (1.0 - beta1**count))

    def _about(self, beta1: float, beta2: float) -> _Known | None:
        noise = self._noise
        if noise is None:
            return None
        if (beta1, beta2) not in self._known:
            self._known[beta1, beta2] = _Known(
                noise.second_moment(beta2),
                _SURE * noise.deviations(beta2),
                noise.independent(beta1) ** 2,
            )
        return self._known[beta1, beta2]


class Adam(_Aware, torch.optim.Adam):
    """``torch.optim.Adam`` for private gradients, with the same arguments and states.

    Its denominator is corrected for the noise of the run, which ``make_private`` passes to it (see
    the module's docstring). Without ``make_private`` it is torch's Adam. The privacy of the run
    does not depend on the optimizer.

    Args:
        params: as in torch.
        lr: as in torch.
        betas: as in torch; the first one is the momentum that the noise is planned for.
        eps: as in torch; with noise it has little effect.
        weight_decay: as in torch: added to the gradient after the noise.
        amsgrad: must be ``False``.
        options: torch's other options. The step always uses operations on lists of tensors.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = Adam(model.parameters(), lr=1e-3)  # then pass it to make_private
    >>> optimizer.defaults["betas"]
    (0.9, 0.999)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class AdamW(_Aware, torch.optim.AdamW):
    """``torch.optim.AdamW`` for private gradients, with the same arguments and states.

    Its denominator is corrected for the noise of the run, which ``make_private`` passes to it (see
    the module's docstring). Without ``make_private`` it is torch's AdamW. The privacy of the run
    does not depend on the optimizer.

    Args:
        params: as in torch.
        lr: as in torch.
        betas: as in torch; the first one is the momentum that the noise is planned for.
        eps: as in torch; with noise it has little effect.
        weight_decay: as in torch: decoupled from the gradient.
        amsgrad: must be ``False``.
        options: torch's other options. The step always uses operations on lists of tensors.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


def _foreach(name: str) -> Any:
    """An operation on lists of tensors, in a few launches; torch has no public name for them."""
    return getattr(torch, f"_foreach_{name}")
