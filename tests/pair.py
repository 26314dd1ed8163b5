"""Two ranks on gloo that do not always agree: ``pair.py FOLDER CASE...``.

Each case is a run of two processes, one case after the other in one folder, as one resume after the
other. A rank writes FOLDER/CASE.RANK: what it was refused with, or the steps that it has taken.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from forked import on_ranks
from torch import nn
from torch.utils.data import DataLoader, Subset
from training import dataset, model, private

from corrnoise.torch import PrivacyEngine


def begin(folder: Path, mode: str = "one_pass", publishes: Any = "steps", **options: Any):
    engine = PrivacyEngine(key=folder / "key", ledger=folder / "ledger", publishes=publishes)
    net = nn.parallel.DistributedDataParallel(model())
    return engine, *private(engine, net=net, grad_sample_mode=mode, **options)


def train(run: Any, steps: int) -> int:
    engine, net, optimizer, batches = run
    while engine.steps_taken < steps:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            if engine.steps_taken == steps:
                break
    return engine.steps_taken


def order(rank: int, folder: Path) -> int:
    """Each rank shuffles the dataset by a seed of its own."""
    mixed = torch.randperm(60, generator=torch.Generator().manual_seed(rank)).tolist()
    return train(begin(folder, data_loader=DataLoader(Subset(dataset(), mixed), batch_size=10)), 2)


def clip(rank: int, folder: Path) -> int:
    return train(begin(folder, max_grad_norm=1.0 + rank), 2)


def damaged(rank: int, folder: Path) -> int:
    """The ledger of one rank is none."""
    if rank == 1:
        (folder / "ledger.rank1").write_text("a letter")
    return train(begin(folder), 2)


def saved(rank: int, folder: Path, **options: Any) -> int:
    """Rank 0 alone saves after step 5."""
    run = begin(folder, **options)
    train(run, 5)
    if rank == 0:
        run[0].save_checkpoint(path=folder / "checkpoint", module=run[1], optimizer=run[2])
    return train(run, 8)


def loaded(rank: int, folder: Path, *, by_all: bool = True, **options: Any) -> int:
    run = begin(folder, **options)
    if by_all or rank == 0:
        run[0].load_checkpoint(path=folder / "checkpoint", module=run[1], optimizer=run[2])
    return train(run, 10)


CASES = {
    "order": order,
    "clip": clip,
    "damaged": damaged,
    "saved": saved,
    "loaded": loaded,
    "loaded by one": lambda rank, folder: loaded(rank, folder, by_all=False),
    "published": lambda rank, folder: saved(rank, folder, publishes="checkpoints"),
    "continued": lambda rank, folder: loaded(rank, folder, publishes="checkpoints"),
    "saved with a state": lambda rank, folder: saved(rank, folder, mechanism="blt"),
    "loaded with a state": lambda rank, folder: loaded(rank, folder, mechanism="blt"),
}


def work(rank: int, folder: Path, case: str) -> str:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        return str(CASES[case](rank, folder))
    except ValueError as refused:
        return str(refused)


def main() -> None:
    folder = Path(sys.argv[1])
    for case in sys.argv[2:]:

        def write(rank: int, case: str = case) -> None:
            (folder / f"{case}.{rank}").write_text(work(rank, folder, case))

        if not on_ranks(2, write):
            sys.exit(f"a rank of {case!r} failed")


if __name__ == "__main__":
    main()
