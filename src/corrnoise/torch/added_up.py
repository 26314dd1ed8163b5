"""Whether Opacus's gradients of single examples add up to torch's own gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corrnoise.torch.calls import ModelCalls

_LOOKS = 3  # physical batches that are looked at
# Of what the norms of the examples add up to: how far sums may be apart.
_FAR = {torch.float32: 1e-2, torch.bfloat16: 0.1}


class AddedUp:
    """Compares Opacus's gradients with torch's at the first batches of a run.

    Opacus computes the gradients of a layer from its positional inputs and a copy of it, and from
    nothing else. A parameter that is used in another way, or a layer that does something else than
    its type, then gets wrong gradients. Autograd knows the right sum.

    Args:
        model: whose parameters are trained.
        params: the trained ones.
        calls: of the model.
        mean: whether the loss is a mean over the examples of a batch, else a sum.
    """

    def __init__(
        self, model: nn.Module, params: Sequence[nn.Parameter], calls: ModelCalls, *, mean: bool
    ) -> None:
        self._params, self._mean, self._calls, self._left = list(params), mean, calls, _LOOKS
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._found: dict[int, tuple[int, Tensor]] = {}
        self._handles = [param.register_hook(self._keeps(param)) for param in params]

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._found.clear()

    def wrong(self) -> str | None:
        """The name of a parameter whose sum in the latest backward pass is not that of torch."""
        if not self._handles:
            return None
        each = [self._compared(param) for param in self._params]
        whole = sum(size**2 for _, size, _ in each) ** 0.5
        # Some gradients, such as those of keys' biases, are nothing but the rounding of others.
        names = (
            self._names.get(id(param), "?")
            for param, (far, size, share) in zip(self._params, each, strict=True)
            if far > share * (size + 0.1 * whole)
        )
        self._found.clear()
        self._left -= 1
        if not self._left:
            self.close()
        return next(names, None)

    def _keeps(self, param: nn.Parameter) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            number = self._calls.number
            if number < 0:
                return
            grad = grad.detach().to_dense() if grad.is_sparse else grad.detach().clone()
            before = self._found.get(id(param))
            if before is not None and before[0] == number:  # a checkpoint inside another one
                grad = grad + before[1]
            self._found[id(param)] = (number, grad)

        return keep

    def _compared(self, param: nn.Parameter) -> tuple[float, float, float]:
        """How far the sums are apart, what the norms add up to, and which share may be far."""
        each: Any = param.grad_sample  # type: ignore[attr-defined]
        each = each[-1] if isinstance(each, list) else each
        share = max(_FAR.get(kind, torch.inf) for kind in (each.dtype, param.dtype))
        if not len(each) or share == torch.inf:  # float16 loses small numbers
            return 0.0, 0.0, 1.0
        rows, count = each.flatten(1).float(), len(each) if self._mean else 1
        far = rows.sum(0) / count
        if id(param) in self._found:
            far = far - self._found[id(param)][1].flatten().float()
        size = torch.linalg.vector_norm(rows, dim=1).sum() / count
        return float(torch.linalg.vector_norm(far)), float(size), share
