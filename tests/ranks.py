"""Training on several processes with gloo: ``ranks.py KIND WORLD FOLDER MECHANISM``.

KIND is "ddp", or "ddp-own" or "fsdp-own" for our own clipping, "fsdp-ghost" by Opacus's name, or
"fsdp-own-adamw" for our AdamW too, or "accelerate-own" for what Accelerate prepares. Rank r writes
FOLDER/r.pt: the weights after 20 steps, the noise that it adds at step 5, and ε. The first rank
makes the key, FOLDER/key.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from forked import on_ranks
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training import loader, model, private

from corrnoise.noise import CorrelatedNoise
from corrnoise.torch import AdamW, PrivacyEngine

STEPS = 20
MODES = {
    "ddp": "hooks",
    "ddp-own": "one_pass",
    "accelerate-own": "one_pass",
    "fsdp-ghost": "ghost_fsdp",
    "fsdp-own": "one_pass",
    "fsdp-own-adamw": "one_pass",
    "single": "hooks",
}


def with_adamw(net: nn.Module) -> dict[str, Any]:
    """With noise in which the gradients of a tensor stand out, and those of a coordinate do not."""
    return {"optimizer": AdamW(net.parameters(), lr=0.01), "noise_multiplier": 0.1}


def trained(engine: PrivacyEngine, net: nn.Module, kind: str, mechanism: str, **options: Any):
    """20 of 24 steps; the wrapped model and the optimizer."""
    made = private(
        engine,
        net=net,
        data_loader=loader(shuffle=True),
        epochs=4,
        mechanism=mechanism,
        # Certificates take seconds on each rank: one mechanism is enough for bins.
        sampling="balls-in-bins" if mechanism == "bsr" else "fixed",
        grad_sample_mode=MODES[kind],
        # Pieces of a batch, of which one rank may have none.
        max_physical_batch_size=2 if kind.startswith("fsdp-own") else None,
        **options,
    )
    criterion = made[2] if "ghost" in MODES[kind] else None
    net, optimizer, batches = made[0], made[1], made[-1]
    criterion = criterion or nn.CrossEntropyLoss()
    while True:
        for x, y in batches:
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()
            if engine.steps_taken == STEPS:
                return net, optimizer


def work(kind: str, world: int, rank: int, folder: Path, mechanism: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    net: nn.Module = model()
    options: dict[str, Any] = {}
    if kind == "fsdp-ghost":
        net = FSDP2Wrapper(net, mesh=init_device_mesh("cpu", (world,)))
    elif kind.startswith("fsdp-own"):
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(net[0], mesh=mesh)
        net = fully_shard(net, mesh=mesh)
        if kind == "fsdp-own-adamw":
            options = with_adamw(net)
    elif kind == "accelerate-own":
        from accelerate import Accelerator

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == world
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net, options["optimizer"] = accelerator.prepare(net, optimizer)
    elif kind == "ddp-own":
        net = nn.parallel.DistributedDataParallel(net)
    else:
        net = DifferentiallyPrivateDistributedDataParallel(net)
    engine = PrivacyEngine(key=folder / "key", ledger=folder / "ledger")
    wrapped, optimizer = trained(engine, net, kind, mechanism, **options)
    if MODES[kind] != "hooks":
        zeros = [torch.zeros_like(engine._setup.step.sums.clipper.flat)]
    else:
        zeros = [
            torch.zeros_like(p.to_local() if isinstance(p, DTensor) else p).detach()
            for p in optimizer.params
        ]
    targets, offsets = engine._setup.step._placement.targets(zeros)
    noise = CorrelatedNoise(engine.plan.mechanism, engine.key)
    if noise.scheme.kind == "recursion":
        noise.seek(5)
    if targets:
        noise.add_(targets, 5, 1.0, offsets)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in wrapped.parameters()]
    torch.save(
        {
            "weights": torch.cat([p.detach().reshape(-1) for p in whole]),
            "noise": [(o, t.clone()) for o, t in zip(offsets, targets, strict=True)],
            "epsilon": engine.get_epsilon(engine.plan.delta),
            "fingerprint": engine.key.fingerprint,
        },
        folder / f"{rank}.pt",
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    kind, world, folder, mechanism = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    ended = on_ranks(world, lambda rank: work(kind, world, rank, folder, mechanism))
    sys.exit(0 if ended else 1)


if __name__ == "__main__":
    main()
