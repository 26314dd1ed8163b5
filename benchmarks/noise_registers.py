"""Registers, warps and spills of the noise kernels, read from their machine code.

    PYTHONPATH=src python benchmarks/noise_registers.py [--rounds 20] [--block 128] [--num-warps 4]
                                                        [--registers 56] [kernel ...]

The kernels are compiled and not run, for the GPU of this machine, or for compute capability 9.0
where there is none. Needs torch and Triton for NVIDIA, which brings the compiler and cuobjdump.
``warps`` is how many the registers leave room for on a multiprocessor with 65,536 of them.
Instructions and spills (loads and stores of registers that went to memory) are listed apart for the
first pass and for the refined pass, which one program in 16,000 calls for each draw.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import corrnoise as cn
from corrnoise.noise import Key, NoiseStream
from corrnoise.noise.backends.triton_backend import TritonBackend, Tuning
from corrnoise.noise.filtering.filters import Filter

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
REGISTERS = 65_536  # of a multiprocessor
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)


class Hopper:
    """Enough of a driver to compile for, with no device behind it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Usage(NamedTuple):
    """What one compiled kernel uses; a pair of counts is of the first and of the refined pass."""

    registers: int
    warps: int
    instructions: tuple[int, int]
    spills: tuple[int, int]


def usage(cubin: bytes, num_warps: int) -> Usage:
    """Read the machine code of one kernel; what it calls follows its own code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources, code = (
            subprocess.run([TOOL, option, file.name], capture_output=True, text=True, check=True)
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = re.search(r"REG:(\d+)", resources.stdout)
    assert found, resources.stdout
    registers = int(found[1])
    lines = [(int(at, 16), text) for at, text in LINE.findall(code.stdout)]
    called = [int(at, 16) for at in re.findall(r"CALL\.REL\S* 0x([0-9a-f]+)", code.stdout)]
    end = min(called, default=1 << 62)
    passes = [text for at, text in lines if at < end], [text for at, text in lines if at >= end]
    quarter = REGISTERS // 4 // (32 * (-(-registers // 8) * 8))  # of the schedulers, in eights
    return Usage(
        registers,
        min(64, 4 * quarter, 32 * num_warps) // num_warps * num_warps,
        (len(passes[0]), len(passes[1])),
        (_spills(passes[0]), _spills(passes[1])),
    )


def _spills(instructions: list[str]) -> int:
    return sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in instructions)


def measure(rounds: int, tuning: Tuning, kernels: list[str]) -> dict[str, Usage]:
    """Compile the kernels, by the calls that a run makes, and read each of them."""
    made = list[Usage]()

    def compile_only(kernel: Any, group: Any, **arguments: Any) -> None:
        binary = kernel.warmup(
            group.table, group.owners, num_warps=tuning.num_warps, grid=(1,), **arguments
        )
        made.append(usage(binary.asm["cubin"], tuning.num_warps))

    workload, layout = cn.workloads.prefix_sum(100), ((0, 4096),)
    bisr = Filter.of(cn.mechanisms.bisr(workload, num_bands=16))
    bsr = Filter.of(cn.mechanisms.bsr(workload, num_bands=4))
    state, narrow = torch.zeros(7, 4096), [torch.zeros(4096, dtype=torch.bfloat16)]
    backend = TritonBackend(NoiseStream(Key.generate(), rounds=rounds), "cpu", tuning)
    backend._launch = compile_only
    rows = [bisr.weights(48 + r) for r in range(8)]
    grads = [torch.zeros(4096)]
    calls = {
        "weighted": lambda: backend.add_weighted(grads, layout, 50, rows[0], 1.0),
        "weighted, bfloat16": lambda: backend.add_weighted(narrow, layout, 50, rows[0], 1.0),
        "weighted, far": lambda: backend.add_weighted(grads, ((1 << 40, 4096),), 50, rows[0], 1.0),
        "lookahead, 1 vector": lambda: backend.add_lookahead(
            grads, layout, 48, rows[:2], 0, 1.0, state
        ),
        "lookahead, 7 vectors": lambda: backend.add_lookahead(
            grads, layout, 48, rows, 0, 1.0, state
        ),
        "ring": lambda: backend.add_filtered(grads, layout, 50, bisr.window(2), 1.0, state),
        "recursion": lambda: backend.add_filtered(grads, layout, 50, bsr.sections(50), 1.0, state),
    }
    names = kernels or list(calls)
    if unknown := set(names) - set(calls):
        raise SystemExit(f"kernels must be of {list(calls)}, got {sorted(unknown)}")
    for name in names:
        calls[name]()
    return dict(zip(names, made, strict=True))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Registers and spills of the noise kernels")
    parser.add_argument("kernels", nargs="*", help="rows of the table to compute; default all")
    parser.add_argument("--rounds", type=int, default=20, choices=(8, 12, 20))
    parser.add_argument("--block", type=int, default=Tuning.block)
    parser.add_argument("--num-warps", type=int, default=Tuning.num_warps)
    parser.add_argument("--registers", type=int, default=Tuning.registers, help="0: no limit")
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        driver.set_active(Hopper())
    capability = driver.active.get_current_target().arch
    tuning = Tuning(asked.block, asked.num_warps, registers=asked.registers or None)
    print(f"Triton {triton.__version__}, sm_{capability}, {asked.rounds} rounds, {tuning}\n")
    print("| kernel | registers | warps | instructions | spills |\n|---|---:|---:|---:|---:|")
    for name, found in measure(asked.rounds, tuning, asked.kernels).items():
        instructions, spills = (" + ".join(map(str, p)) for p in (found.instructions, found.spills))
        print(f"| {name} | {found.registers} | {found.warps} | {instructions} | {spills} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
