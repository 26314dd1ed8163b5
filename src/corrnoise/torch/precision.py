"""Clipping of gradients of single examples: in float32, and never above the clip norm.

Opacus computes norms, factors and products in the type of the gradients. In bfloat16, with a unit
roundoff of 2⁻⁸, a clipped gradient can then be longer than the clip norm C by about 3·2⁻⁸. In
float32 a sum over a large layer can miss a share of 10⁻³ of a norm on the CPU.

Here an example's gradient g, of d elements in all parameters, contributes a·g with
a = min(1, C·(1 - 2⁻²⁰)/(ν + 10⁻⁶)) and ν ≥ ‖g‖. Its norm is at most C for d ≤ 2³³:

- ν² is the sum of ``squared`` over the parameters, each at least what it should be, but for squares
  below 2⁻¹²⁶, which the 10⁻⁶ is more than enough for;
- sums over parameters, the root, the addition and the division are in float64;
- a is rounded to float32, and so is each element of a·g, each with an error of at most 2⁻²⁴; an a
  below 2⁻¹⁰⁰, where float32 soon has fewer bits, counts as 0;
- (1 - 2⁻²⁰)·(1 + 2⁻²⁴)²·(1 + 2⁻⁵⁰) < 1.

Contributions are added in float32, as those of a float32 model are, and the noise is added to that
sum. What the optimizer gets is rounded to the type of the parameter afterwards, which costs no
privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from corrnoise.torch.clipping.products import squared, weighted_sum

_MARGIN = 2.0**-20
LEAST_FACTOR = 2.0**-100
# Elements that are converted at a time.
_CHUNK = 1 << 24


def clip_factors(grads: Sequence[torch.Tensor], clip_norm: float) -> torch.Tensor:
    """The factor a of each example, in float32.

    Args:
        grads: of single examples, (examples, ...) for each parameter that is clipped together.
        clip_norm: C.
    """
    found = _factors(grads, clip_norm, squared)
    return found.masked_fill(found < LEAST_FACTOR, 0.0).float()


def wide_factors(grads: Sequence[torch.Tensor], clip_norm: float) -> torch.Tensor:
    """The same in float64, from norms in float64, before they are rounded."""
    return _factors(grads, clip_norm, lambda rows: rows.double().square().sum(dim=1))


def _factors(
    grads: Sequence[torch.Tensor], clip_norm: float, squares: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    device = grads[0].device
    total = torch.zeros(len(grads[0]), dtype=torch.float64, device=device)
    for grad in grads:
        parts = [squares(rows) for rows in rows_at_a_time(grad)]
        if parts:
            total += torch.cat(parts).to(device)
    return (clip_norm * (1.0 - _MARGIN) / (total.sqrt() + 1e-6)).clamp(max=1.0)


def clipped_sum(grad: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Σ a·g over the examples, in float32, whatever precision matrix products have.

    Args:
        grad: of single examples, (examples, ...) for one parameter.
        factors: a for each example.
    """
    total = torch.zeros(grad.shape[1:].numel(), device=grad.device)
    start = 0
    for rows in rows_at_a_time(grad):
        total += weighted_sum(factors[start : start + len(rows)].to(grad.device), rows)
        start += len(rows)
    return total.view(grad.shape[1:])


def rows_at_a_time(grad: torch.Tensor) -> Sequence[torch.Tensor]:
    """The gradients of some examples at a time, as rows."""
    if len(grad) == 0:
        return ()
    flat = grad.detach().reshape(len(grad), -1)
    return flat.split(max(1, _CHUNK // max(1, flat.shape[1])))
