"""What one call of a layer adds to the gradient of a parameter, example by example.

A weight's gradient is nearly always a sum of outer products over positions (the rows of a sequence,
the pixels of a picture), so that its norm for one example and the clipped sum over all of them are
computed from the two factors, and the gradient of one example is never stored. With l_t and r_t the
factors at position t,

    ‖Σ_t l_t r_tᵀ‖² = Σ_{t,s} (l_t·l_s)(r_t·r_s)        Σ_i c_i Σ_t l_it r_itᵀ = (c·l)ᵀ r

The first costs T²(O + I) by Gram matrices, or T·O·I by the product itself; the cheaper one is
taken.

Rounding is counted, not hoped for. Matrix units round both factors of a product, by at most a
share u of each, and differently for l and for c·l. What example i adds to the sum as it is
computed has a norm of at most c_i·(norm_i + u·R_i), with R_i = Σ_t ‖l_t‖·‖r_t‖, so every part gives
R as well as the norm. The additions over positions count in u too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corrnoise.torch.clipping import gram
from corrnoise.torch.clipping.products import (
    BLOCK,
    full_precision,
    product,
    scaled,
    squared,
    squared_product,
    weighted_sum,
    wide_product,
)
from corrnoise.torch.clipping.rounding import EXACT, Rounding, matmul_rounding

_MISSED = 2.0**-23  # for the rounding of squared norms, as a share of R²


@dataclass(frozen=True)
class Norms:
    """Of the gradient of one parameter, for each example.

    Attributes:
        squares: (examples, some): what adds up to the squared norms.
        spread: (examples, some): what adds up to R².
        rounding: of the products that they are made of.
        terms: how many products are added up for an entry of the gradient: in the sum, and in the
            norm as well where that is the norm of a gradient of its own.
        inner: how many additions an entry of one Gram matrix times one of the other takes, where
            the norm is made of these.
    """

    squares: Tensor
    spread: Tensor
    rounding: Rounding
    terms: int = 0
    inner: int = 0

    @staticmethod
    def of(
        squares: Tensor, spread: Tensor, rounding: Rounding, terms: int = 0, inner: int = 0
    ) -> Norms:
        """From vectors with a number for each example."""
        return Norms(squares[:, None], spread[:, None], rounding, terms, inner)

    @property
    def lost(self) -> float:
        """u: what rounding changes between the norm and the sum, at most, as a share of R."""
        return self.rounding.factors + self.rounding.added(self.terms)

    @property
    def missed(self) -> float:
        """ω: what the squared norms are too small by, at most, as a share of R²."""
        return _MISSED + self.rounding.added(self.inner)


def bound(norms: Sequence[Norms]) -> Tensor:
    """The most that the norm of what each example adds can be, over all parameters, in float64.

    Args:
        norms: of each parameter.
    """
    squares = torch.cat([some.squares for some in norms], 1).sum(1, dtype=torch.float64)
    lost = torch.zeros_like(squares)
    alike: dict[tuple[float, float], list[Tensor]] = {}
    for some in norms:
        alike.setdefault((some.missed, some.lost), []).append(some.spread)
    for (missed, share), spreads in alike.items():
        spread = torch.cat(spreads, 1).sum(1, dtype=torch.float64)
        squares = squares + missed * spread
        if share > 0.0:  # where it is 0, R may be infinite
            lost = lost + share * share * spread
    return squares.clamp_min(0.0).sqrt() + lost.sqrt()


class Factors:
    """A clip factor for each example.

    Args:
        values: in float32.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._last: tuple[Any, Tensor, Tensor] | None = None

    def times(self, tensor: Tensor) -> Tensor:
        """Every example's row with its factor; the last answer is kept for a layer beside it."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if self._last is not None and self._last[0] == key:
            return self._last[2]
        # On the CPU products are made in float32, so that nothing need be rounded.
        low = tensor.is_cuda and tensor.dtype == torch.bfloat16
        found = scaled(tensor if low else tensor.float(), self.values)
        self._last = (key, tensor, found)
        return found


class Part(ABC):
    """The gradient of one parameter from all calls of its layers, for each example."""

    @abstractmethod
    def norms(self) -> Norms:
        """For each example."""

    @abstractmethod
    def weighted(self, factors: Factors) -> Tensor:
        """The sum over examples, each with its factor, in float32 and in the parameter's shape."""

    @abstractmethod
    def each(self) -> Tensor:
        """The gradient of every example, in float32: (examples, *shape)."""

    def joined(self, views: int) -> Part | None:
        """The same with every ``views`` rows as one example, if the part has its own way."""
        return None


class Direct(Part):
    """The gradient of every example itself, for parameters that are small.

    Args:
        grads: (examples, *shape).
    """

    def __init__(self, grads: Tensor) -> None:
        self._grads = grads.float()

    def each(self) -> Tensor:
        """The gradient of every example."""
        return self._grads

    def norms(self) -> Norms:
        """For each example."""
        squares = squared(self._grads.flatten(1))
        return Norms.of(squares, squares, EXACT)

    def weighted(self, factors: Factors) -> Tensor:
        """The sum over examples, each with its factor."""
        return weighted_sum(factors.values, self._grads)


class Outer(Part):
    """A sum of outer products over positions.

    Args:
        left: (examples, positions, rows of the weight).
        right: (examples, positions, columns of the weight).
        shape: of the weight.
    """

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size) -> None:
        self.left, self.right, self.shape = left, right, shape
        self._grads: Tensor | None = None  # of every example, if they are small

    def each(self) -> Tensor:
        """The gradient of every example."""
        grads = product(self.left.transpose(1, 2), self.right)
        return grads.view(-1, *self.shape)

    def norms(self) -> Norms:
        """For each example."""
        left, right = self.left, self.right
        _, positions, rows = left.shape
        columns = right.shape[2]
        if positions == 1:
            squares = squared_product(left[:, 0], right[:, 0])
            return Norms.of(squares, squares, matmul_rounding(left))
        if gram.pays(positions, rows, columns, left):
            rounding, inner = matmul_rounding(left), gram.inner(left, right)
            return Norms(*gram.norms(left, right), rounding, positions, inner)
        # What is measured is what is added, with no further rounding of factors.
        self._grads = self.each()
        return Direct(self._grads).norms()

    def weighted(self, factors: Factors) -> Tensor:
        """The sum over examples, each with its factor."""
        if self._grads is not None:
            return Direct(self._grads).weighted(factors)
        left, right = self.left, self.right
        if left.shape[2] < right.shape[2]:
            left = factors.times(left)
        else:  # layers beside each other have the same input
            right = factors.times(right)
        return product(left.flatten(0, 1).T, right.flatten(0, 1)).view(self.shape)


class Rows(Part):
    """Gradients of rows of a table: an outer product whose left factor has a single one.

    Args:
        index: (examples, positions), which row.
        values: (examples, positions, columns).
        shape: of the table.
        padding: the row that is not trained by this use of the table, or -1.
    """

    def __init__(self, index: Tensor, values: Tensor, shape: torch.Size, padding: int = -1) -> None:
        self.index, self.shape = index, shape
        # Here and nowhere else: another use of the same table may train that row.
        if padding >= 0:
            values = values.masked_fill((index == padding)[..., None], 0.0)
        self.values = values

    def each(self) -> Tensor:
        """The gradient of every example."""
        table = self.values.new_zeros(len(self.index), *self.shape, dtype=torch.float32)
        index = self.index[..., None].expand_as(self.values)
        return table.scatter_add_(1, index, self.values.float())

    def norms(self) -> Norms:
        """For each example: only equal rows meet."""
        lengths = _lengths(self.values)
        spread = lengths.sum(1).square()
        positions = self.index.shape[1]
        if positions == 1:
            return Norms.of(squared(self.values[:, 0]), spread, EXACT)
        equal = self.index[:, :, None] == self.index[:, None, :]
        products = wide_product(self.values, self.values.transpose(1, 2))
        squares = (products * equal).sum((1, 2), dtype=torch.float64).float()
        return Norms.of(squares, spread, matmul_rounding(self.values), positions, BLOCK)

    def weighted(self, factors: Factors) -> Tensor:
        """The sum over examples, each with its factor."""
        scaled = self.values.float() * factors.values[:, None, None]
        return torch.ops.aten.embedding_dense_backward(scaled, self.index, self.shape[0], -1, False)


class Tied(Part):
    """A table that is also the weight of a linear layer: the usual tied output of language models.

    Args:
        rows: as a table.
        outer: as a weight.
    """

    def __init__(self, rows: Rows, outer: Outer) -> None:
        self.rows, self.outer = rows, outer

    def each(self) -> Tensor:
        """The gradient of every example."""
        return self.rows.each() + self.outer.each()

    def norms(self) -> Norms:
        """For each example, with the products of the two uses.

        The three terms may cancel, so all are made from the same factors, which are not rounded.
        The cross term is never taken from the gradients themselves: R counts in any case.
        """
        left, right = self.outer.left, self.outer.right
        rounding = matmul_rounding(left)  # of the sums, whose factors are rounded
        with full_precision():
            table, (weight, _) = self.rows.norms(), gram.norms(left, right)
            # (1 at index_t)·left_s is left_s[index_t]
            index = self.rows.index[:, None, :].expand(-1, left.shape[1], -1)
            met = left.float().gather(2, index)
            products = wide_product(right, self.rows.values.transpose(1, 2))
        cross = (met * products).sum((1, 2), dtype=torch.float64).float()
        lengths = _lengths(left) * _lengths(right)
        # (R + R')² is at most 2(R² + R'²)
        return Norms(
            torch.cat([table.squares, weight, 2.0 * cross[:, None]], 1),
            2.0 * torch.cat([table.spread, lengths.sum(1, keepdim=True).square()], 1),
            rounding,
            self.rows.index.shape[1] + left.shape[1] + 1,
            gram.inner(left, right),
        )

    def weighted(self, factors: Factors) -> Tensor:
        """The sum over examples, each with its factor."""
        return self.rows.weighted(factors) + self.outer.weighted(factors)


def together(parts: list[Part]) -> Part:
    """All that the calls of one step add to one parameter, as one part.

    Args:
        parts: of the calls, in any order; the examples are the same in all of them.
    """
    if len(parts) == 1:
        return parts[0]
    outers = [part for part in parts if isinstance(part, Outer)]
    tables = [part for part in parts if isinstance(part, Rows)]
    if len(outers) + len(tables) == len(parts):
        outer, table = _joined(outers), _joined_rows(tables)
        if outer is None or table is None:
            one = table if outer is None else outer
            assert one is not None
            return one
        return Tied(table, outer)
    grads = parts[0].each()
    for part in parts[1:]:
        grads = grads + part.each()
    return Direct(grads)


def _lengths(rows: Tensor) -> Tensor:
    """Of every example's row at every position, in float32."""
    return torch.linalg.vector_norm(rows, dim=2, dtype=torch.float32)


def _joined(parts: list[Outer]) -> Outer | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    left = torch.cat([part.left for part in parts], 1)
    return Outer(left, torch.cat([part.right for part in parts], 1), parts[0].shape)


def _joined_rows(parts: list[Rows]) -> Rows | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    index = torch.cat([part.index for part in parts], 1)
    values = torch.cat([part.values for part in parts], 1)
    return Rows(index, values, parts[0].shape)
