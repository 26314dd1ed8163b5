"""Several rows of a batch for each example: its views, whose gradients are averaged, then clipped.

With K rows an example, one after the other, the gradient of example i is the sum of those of its
rows, since the loss is a mean over all rows already. A sum of outer products over T positions in
each of K rows is one over K·T positions,

    Σ_v Σ_t l_vt r_vtᵀ = Σ_s l_s r_sᵀ        ‖·‖² = Σ_{s,s'} (l_s·l_s')(r_s·r_s'),

so nearly all parts are regrouped by a change of shape and keep their way of computing norms.
"""

from __future__ import annotations

from torch import Tensor

from corrnoise.torch.clipping.parts import Direct, Factors, Norms, Outer, Part, Rows, squared


def grouped(part: Part, views: int) -> Part:
    """The same gradients with every ``views`` rows as one example.

    Args:
        part: of all rows, those of one example one after the other.
        views: K.
    """
    if views == 1:
        return part
    if isinstance(part, Direct):
        return Direct(_summed(part.each(), views))
    if isinstance(part, Outer):
        return Outer(_joined(part.left, views), _joined(part.right, views), part.shape)
    if isinstance(part, Rows):
        return Rows(_joined(part.index, views), _joined(part.values, views), part.shape)
    return part.joined(views) or _Grouped(part, views)


class _Grouped(Part):
    """Any other part: gradients of rows for the norms, and its own way for the sum.

    Args:
        part: of all rows.
        views: K.
    """

    def __init__(self, part: Part, views: int) -> None:
        self._part, self._views = part, views

    def each(self) -> Tensor:
        """The gradient of every example."""
        return _summed(self._part.each(), self._views)

    def norms(self) -> Norms:
        """For each example; (Σ R)² over its rows is at most K·Σ R²."""
        rows = self._part.norms()
        spread = _summed(rows.spread, self._views) * self._views
        squares = squared(self.each().flatten(1))[:, None]
        return Norms(squares, spread, rows.rounding, 2 * self._views * max(1, rows.terms))

    def weighted(self, factors: Factors) -> Tensor:
        """The sum over examples, each with its factor."""
        return self._part.weighted(Factors(factors.values.repeat_interleave(self._views)))


def _summed(rows: Tensor, views: int) -> Tensor:
    return rows.unflatten(0, (-1, views)).sum(1)


def _joined(rows: Tensor, views: int) -> Tensor:
    """(K·examples, positions, …) as (examples, K·positions, …)."""
    return rows.reshape(rows.shape[0] // views, views * rows.shape[1], *rows.shape[2:])
