"""How much lower clip factors are because rounding is counted, on the CPU.

    PYTHONPATH=src python benchmarks/rounding.py [--examples N] [--table FILE]

Clip factors are made from norm + u·R, with the unit u of the products and R of the factors that
they are made of; without rounding they would be made from the norm. For each model this prints by
which share the factors are lower, 1 - norm/(norm + u·R), for the median and the worst of some
examples. Models are randomly initialised, as wide as usual and less deep, and inputs are random.
Norms and R are those of float32 factors, made in the way that a GPU takes; what is rounded is what
an H200 rounds, and in float32 also what a CPU does. Additions count at their worst.
benchmarks/rounding.json is written; --table prints it, or another such file, and computes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from corrnoise.apps import models
from corrnoise.torch.clipping import gram
from corrnoise.torch.clipping.convolution import Convolution
from corrnoise.torch.clipping.parts import Norms, Outer, Part, bound, together
from corrnoise.torch.clipping.products import squared
from corrnoise.torch.clipping.recorder import Recorder
from corrnoise.torch.clipping.rounding import EXACT, SUMS, Rounding, unit
from rounding_table import about, table
from step_models import Classifier, Language, wide_resnet

HERE = Path(__file__).parent
WORDS = 8000
GPU: Any = SimpleNamespace(is_cuda=True)  # where a tensor is
GPT = {
    "n_embd": 768, "n_layer": 2, "n_head": 12, "vocab_size": WORDS, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


def on_a_gpu(kind: torch.dtype, precision: str) -> Rounding:
    """Of products of a type, on Hopper."""
    factor: Any = SimpleNamespace(is_cuda=True, dtype=kind)
    found = Rounding(unit(factor, precision))
    return dataclasses.replace(found, sums=SUMS[9]) if found.cut else found


CPU = "float32 on the CPU"
# Of matrix products, and of convolutions, whose sums are float32 in any case.
KINDS = {
    CPU: (on_a_gpu(torch.float32, "highest"), on_a_gpu(torch.float32, "highest")),
    "float32": (on_a_gpu(torch.float32, "highest"), on_a_gpu(torch.float32, "highest")),
    "TF32": (on_a_gpu(torch.float32, "high"), on_a_gpu(torch.float32, "high")),
    "bfloat16": (on_a_gpu(torch.bfloat16, "high"), on_a_gpu(torch.float32, "high")),
}


def words(length: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(0, WORDS, (count, length))


def pictures(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def labels(output: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(output, torch.randint(0, output.shape[1], (len(output),)))


def next_words(output: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(output[:, :-1].transpose(1, 2), tokens[:, 1:])


def bert() -> nn.Module:
    return Classifier(layers=2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Any]] = {
    "BERT, 2 layers of 768, 128 tokens": (bert, words(128), labels),
    "BERT, 2 layers of 768, 512 tokens": (bert, words(512), labels),
    "GPT-2, 2 layers of 768, 128 tokens": (lambda: Language(**GPT), words(128), next_words),
    "GPT-2, 2 layers of 768, 512 tokens": (lambda: Language(**GPT), words(512), next_words),
    "WRN-10-2": (lambda: wide_resnet(depth=10, widen=2), pictures, labels),
    "the paper's convnet": (lambda: models.build("convnet", (3, 32, 32), 10), pictures, labels),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=16, help="of each model")
    parser.add_argument("--table", type=Path, help="print this JSON file as Markdown, and stop")
    given = parser.parse_args()
    if given.table:
        found = json.loads(given.table.read_text())
        print(f"{table(found)}\n\n{about(found)}")
        return
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "date": datetime.date.today().isoformat(),
        "examples": given.examples,
        "models": {name: lowered(*case, given.examples) for name, case in MODELS.items()},
    }
    (HERE / "rounding.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"{table(found)}\n\n{about(found)}")


def lowered(
    build: Callable[[], nn.Module],
    inputs: Callable[[int], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    count: int,
    at_once: int = 2,
) -> dict[str, dict[str, float]]:
    """By which share the clip factors of a model are lower, for each precision."""
    torch.manual_seed(0)
    model = build().eval()
    recorder = Recorder(model, list(model.parameters()), probe=False)
    shares: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for batch in inputs(count).split(at_once):
        loss(model(batch), batch).backward()
        parts: dict[nn.Parameter, list[Part]] = {}
        for call in recorder.take():
            for name, part in call.make().items():
                parts.setdefault(call.layer.params[name], []).append(part)
        with torch.no_grad():
            whole = [measured(together(some)) for some in parts.values()]
        true = torch.cat([norms.squares for norms, *_ in whole], 1).sum(1).clamp_min(0.0).sqrt()
        for kind, ways in KINDS.items():
            counted = [
                dataclasses.replace(
                    norms,
                    rounding=EXACT if norms.rounding == EXACT else ways[conv],
                    inner=norms.inner if kind == CPU else inner,
                )
                for norms, conv, inner in whole
            ]
            shares[kind].append(1.0 - true / bound(counted))
    recorder.close()
    found = {kind: torch.cat(some) for kind, some in shares.items()}
    return {
        kind: {"median": float(some.median()), "worst": float(some.max())}
        for kind, some in found.items()
    }


def measured(part: Part) -> tuple[Norms, bool, int]:
    """Norms and R as on a GPU, whether they are of a convolution, and ``Norms.inner`` there."""
    if isinstance(part, Convolution):
        squares = squared(part.each().flatten(1))
        norms = Norms.of(squares, part.spread(), KINDS["float32"][1], 2 * part.positions)
        return norms, True, 0
    if isinstance(part, Outer) and gram.pays(*part.left.shape[1:], part.right.shape[2], GPU):
        left, right = part.left, part.right
        inner = gram.inner(left, right)
        norms = Norms(*gram.norms(left, right), KINDS["float32"][0], left.shape[1], inner)
        return norms, False, left.shape[2] + right.shape[2] + 2 * gram.TILE
    norms = part.norms()
    return norms, False, norms.inner


if __name__ == "__main__":
    main()
