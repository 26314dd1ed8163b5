"""Where this process's gradients lie in the flat parameter vector, and which of them it noises.

The noise belongs to the flat vector of all parameters, in the optimizer's order. A process adds the
part that nobody else adds: all of it when it is alone; an equal slice when every rank holds all
parameters and gradients are summed afterwards (DDP); its own shard under FSDP2. So there is no
communication, and the sum is the noise of the unsharded run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of parameter ``index``, which lie at ``offset`` in the flat vector."""

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Placement:
    """What this process adds noise to.

    Attributes:
        pieces: in the order of the parameters; parameters that get nothing here have none.
        num_parameters: the length of the whole flat vector.
        sharded: whether gradients are shards of sums over all ranks.
    """

    pieces: tuple[Piece, ...]
    num_parameters: int
    sharded: bool = False

    def targets(self, grads: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        """Views of the gradients' elements that get noise here, and their offsets."""
        flat = [local(grad).view(-1) for grad in grads]
        return (
            [flat[piece.index][piece.start : piece.stop] for piece in self.pieces],
            [piece.offset for piece in self.pieces],
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that get gradients, in the optimizer's order: that of the flat vector."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def place(params: Sequence[nn.Parameter], *, distributed: bool) -> Placement:
    """The placement of an optimizer's parameters.

    Args:
        params: all of them, in the optimizer's order.
        distributed: whether gradients are summed over ranks after the noise, or shards.

    Raises:
        ValueError: parameters that are sharded in another way than along their first dimension.
    """
    sizes = [param.numel() for param in params]
    total = sum(sizes)
    if not distributed:
        return Placement(_slice(sizes, 0, total), total)
    world = torch.distributed.get_world_size()
    meshes = {param.device_mesh for param in params if isinstance(param, DTensor)}
    if not meshes:
        rank = torch.distributed.get_rank()
        return Placement(_slice(sizes, rank * total // world, (rank + 1) * total // world), total)
    if any(mesh.size() != world for mesh in meshes):
        raise ValueError(
            f"the model must be sharded over all {world} ranks, got a mesh of "
            f"{min(mesh.size() for mesh in meshes)}; sums would be over fewer"
        )
    pieces: list[Piece] = []
    offset = 0
    for index, param in enumerate(params):
        start, stop = _shard(index, param)
        if stop > start:
            pieces.append(Piece(index, 0, stop - start, offset + start))
        offset += sizes[index]
    return Placement(tuple(pieces), total, sharded=True)


def flattened(placement: Placement, sizes: Sequence[int]) -> Placement:
    """The same for gradients that lie one after the other in one flat tensor.

    Args:
        placement: for one gradient for each parameter.
        sizes: of the gradients that this process holds.
    """
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    pieces: list[Piece] = []
    for piece in placement.pieces:
        start, stop = starts[piece.index] + piece.start, starts[piece.index] + piece.stop
        last = pieces[-1] if pieces else None
        if last and last.stop == start and last.offset + last.stop - last.start == piece.offset:
            pieces[-1] = Piece(0, last.start, stop, last.offset)
        else:
            pieces.append(Piece(0, start, stop, piece.offset))
    return dataclasses.replace(placement, pieces=tuple(pieces))


def _slice(sizes: Sequence[int], low: int, high: int) -> tuple[Piece, ...]:
    """The elements [low, high) of the flat vector, parameter by parameter."""
    pieces: list[Piece] = []
    offset = 0
    for index, size in enumerate(sizes):
        start, stop = max(low - offset, 0), min(high - offset, size)
        if start < stop:
            pieces.append(Piece(index, start, stop, offset + start))
        offset += size
    return tuple(pieces)


def _shard(index: int, param: nn.Parameter) -> tuple[int, int]:
    """The elements [start, stop) of the flattened parameter that this rank holds."""
    if not isinstance(param, DTensor):
        raise ValueError(
            f"parameter {index} must be sharded like the others, got a plain tensor of shape "
            f"{tuple(param.shape)}; call fully_shard on the whole model"
        )
    dims = [k for k, where in enumerate(param.placements) if not isinstance(where, Replicate)]
    if len(dims) != 1 or param.placements[dims[0]] != Shard(0):
        raise ValueError(
            f"parameter {index} must be sharded once, along its first dimension, got "
            f"{param.placements}; use fully_shard with its default placement"
        )
    rows = param.shape[0] if param.dim() else 1
    row = param.numel() // rows if rows else 0
    size = -(-rows // param.device_mesh.size(dims[0]))
    first = min(param.device_mesh.get_local_rank(dims[0]) * size, rows)
    last = min(first + size, rows)
    if param.to_local().numel() != (last - first) * row:
        raise ValueError(
            f"parameter {index} must be cut into equal chunks of rows, got a shard of shape "
            f"{tuple(param.to_local().shape)} of {tuple(param.shape)}"
        )
    return first * row, last * row
