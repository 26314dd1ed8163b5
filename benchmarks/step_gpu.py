"""A whole private training step over a plain one, and over stock Opacus, on one GPU.

    PYTHONPATH=src python benchmarks/step_gpu.py [--only WORD] [--rounds N] [--table FILE]

For each model: plain training, stock Opacus (per-example gradients by hooks, and ghost clipping),
and our engine with one backward pass and ChaCha20 BISR p = 4 noise, called in an ordinary loop and
as one captured function. All of them stand side by side and take turns, round by round; a time is
the median of CUDA events around forward, backward, clipping, noise and the optimizer's step, with
the batch on the device already. Memory is the peak since the variant was built, less what was there
before it. Products are TF32 unless said. With OUT set, step_gpu.json is written there; --table
prints the committed JSON as Markdown.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import os
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from step_models import CASES, Case, loss
from step_table import table

STEPS = 4000  # planned; more than are taken
HERE = Path(__file__).parent
Step = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--without", nargs="*", default=[], help="variants to leave out")
    parser.add_argument("--table", type=Path, help="print this JSON file as Markdown, and stop")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.table.read_text())))
        return
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    found: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "date": datetime.date.today().isoformat(),
        "rounds": given.rounds,
        "models": {},
    }
    for case in (case for case in CASES if given.only in case.name):
        found["models"][case.name] = measure(case, given.rounds, given.without)
        out = Path(os.environ.get("OUT", ".")) / "step_gpu.json"
        out.write_text(json.dumps(found, indent=1))
    print(table(found))


def measure(case: Case, rounds: int, without: list[str]) -> dict[str, Any]:
    """Times and memory of every variant of one model."""
    torch.manual_seed(0)
    base = case.build().cuda()
    data = TensorDataset(*(part.cuda() for part in case.examples(2 * case.batch)))
    variants: dict[str, Step] = {}
    memory: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name, build in VARIANTS.items():
        if name in without:
            continue
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            step = build(case, copy.deepcopy(base).train(), data)
            for _ in range(5):
                step()
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            variants[name] = step
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:300]
            if name.startswith("ours"):
                traceback.print_exc()
        step = None
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        order = list(variants) if turn % 2 else list(reversed(variants))
        for name in order:
            times[name].append(variants[name]())
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        ratio = value / medians["plain"]
        print(
            f"{case.name}: {name} {value:.2f} ms, {ratio:.3f}, {memory[name]:.2f} GiB", flush=True
        )
    for name, error in errors.items():
        print(f"{case.name}: {name} failed: {error}", flush=True)
    return {
        "goal": case.goal,
        "milliseconds": medians,
        "spread": {name: [min(v), max(v)] for name, v in times.items()},
        "gibibytes": memory,
        "errors": errors,
    }


def plain(case: Case, model: nn.Module, data: TensorDataset) -> Step:
    return _loop(
        case, model, _optimizer(model), DataLoader(data, batch_size=case.batch), loss(case)
    )


def opacus_hooks(case: Case, model: nn.Module, data: TensorDataset) -> Step:
    return _opacus(case, model, data, "hooks")


def opacus_ghost(case: Case, model: nn.Module, data: TensorDataset) -> Step:
    return _opacus(case, model, data, "ghost")


def ours(case: Case, model: nn.Module, data: TensorDataset) -> Step:
    _, found = _private(case, model, data)
    return _loop(case, *found, loss(case))


def ours_captured(case: Case, model: nn.Module, data: TensorDataset) -> Step:
    engine, (model, _, loader) = _private(case, model, data)
    criterion = loss(case)

    def whole(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=case.low):
            found = model(x)
        return criterion(found.float() if case.low else found, y)

    function = engine.step_function(whole, size=case.batch)
    batches = _forever(loader)

    def step() -> float:
        batch = next(batches)
        return _timed(lambda: function(*batch))

    return step


VARIANTS = {
    "plain": plain,
    "Opacus, hooks": opacus_hooks,
    "Opacus, ghost": opacus_ghost,
    "ours": ours,
    "ours, captured": ours_captured,
}


def _private(case: Case, model: nn.Module, data: TensorDataset) -> Any:
    from corrnoise.torch import PrivacyEngine

    engine = PrivacyEngine(data_fingerprint="a benchmark")
    return engine, engine.make_private(
        module=model,
        optimizer=_optimizer(model),
        data_loader=DataLoader(data, batch_size=case.batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=STEPS // 2,
        mechanism="bisr",
        num_bands=4,
        sampling="fixed",
        grad_sample_mode="one_pass",
    )


def _opacus(case: Case, model: nn.Module, data: TensorDataset, mode: str) -> Step:
    import opacus

    criterion = loss(case)
    more = {"criterion": _Module(criterion)} if mode == "ghost" else {}
    made = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=_optimizer(model),
        data_loader=DataLoader(data, batch_size=case.batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **more,
    )
    return _loop(case, made[0], made[1], made[-1], made[2] if mode == "ghost" else criterion)


class _Module(nn.Module):
    """A loss as Opacus's ghost clipping wants it: with a ``reduction``."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.reduction = function, "mean"

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.reduction == "mean":
            return self.function(output, target)
        found = nn.functional.cross_entropy(output, target, reduction="none")
        return found if found.dim() == 1 else found.mean(1)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(trained, lr=1e-4, momentum=0.9)


def _loop(case: Case, model: Any, optimizer: Any, loader: Any, criterion: Any) -> Step:
    batches = _forever(loader)

    def whole(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=case.low):
            found = model(x)
        criterion(found.float() if case.low else found, y).backward()
        optimizer.step()

    def step() -> float:
        batch = next(batches)
        return _timed(lambda: whole(*batch))

    return step


def _forever(loader: Any) -> Any:
    while True:
        yield from loader


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


if __name__ == "__main__":
    main()
