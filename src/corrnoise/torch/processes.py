"""One process or many: who this one is, and what all must agree on before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from corrnoise.torch import opacus

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those that train one model.

    Attributes:
        rank: of this one.
        world_size: how many there are.
        sharded: whether the model is an FSDP2 one.
    """

    rank: int = 0
    world_size: int = 1
    sharded: bool = False

    @property
    def distributed(self) -> bool:
        """Whether gradients are summed over processes."""
        return self.world_size > 1 or self.sharded

    @staticmethod
    def of(module: nn.Module) -> Processes:
        """What the wrapper of a model says.

        Raises:
            ValueError: there are several processes or GPUs, and the model has no wrapper that
                the engine knows.
        """
        sharded = isinstance(module, FSDPModule)
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ValueError(
                f"one process must have one GPU, got {len(module.device_ids)} in DataParallel, "
                "which copies the model without its hooks; use DistributedDataParallel"
            )
        if not sharded and unwrapped(module) is module:
            alone = Processes()
            alone.check()
            return alone
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return Processes(rank, world, sharded)

    def check(self) -> None:
        """Raise if there are more processes than the run was made for.

        Lightning, for one, wraps a model later than ``make_private`` sees it. Each process would
        then train on batches and noise of its own, and the plan prices one run.
        """
        found = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if found > self.world_size:
            raise ValueError(
                f"a run on {found} processes must be given its model in DistributedDataParallel "
                f"or fully_shard, got one that is made for {self.world_size}; wrap it before "
                "make_private, or train on one device (with Lightning: devices=1)"
            )

    def gathered(self, value: T) -> list[T]:
        """The value of every process, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def check_step(self, step: int, device: torch.device) -> None:
        """Raise unless all processes take this step: each adds its part of one noise."""
        if self.world_size == 1:
            return
        ends = torch.tensor([step, -step], device=device)
        torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
        last, first = ends.tolist()
        if last != -first:
            raise ValueError(
                f"all {self.world_size} processes must take the same step, got steps {-first} to "
                f"{last}, step {step} in rank {self.rank}, and so parts of different noise for one "
                "sum; load the same checkpoint in every process: nothing was released"
            )

    def each(self, make: Callable[[], T]) -> T:
        """What every process makes by itself; where one of them fails, all of them raise."""
        if self.world_size == 1:
            return make()
        made: list[T] = []
        failed: ValueError | OSError | None = None
        try:
            made.append(make())
        except (ValueError, OSError) as error:
            failed = error
        texts = self.gathered(None if failed is None else str(failed))
        if failed is not None:
            raise failed
        for rank, text in enumerate(texts):
            if text is not None:
                made.clear()  # an open file would stay so as long as the error is kept
                raise ValueError(f"rank {rank} could not begin: {text}")
        return made[0]

    def agree(self, make: Callable[[], T]) -> T:
        """A value that the first process makes and all of them use."""
        if self.world_size == 1:
            return make()
        # An error of the first process must reach the others, which would wait for ever.
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = make()
            except ValueError as error:
                box[1] = str(error)
        torch.distributed.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise ValueError(box[1])
        return box[0]


def unwrapped(module: nn.Module) -> nn.Module:
    """The model in a wrapper for many processes; any other as it is."""
    kinds = (DistributedDataParallel, opacus.DistributedDataParallel)
    return module.module if isinstance(module, kinds) else module  # type: ignore[return-value]
