"""The results of jax_noise.py as a Markdown table, for the documentation."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables

USUAL = "four-warps"  # the layout that the package has


def table(found: dict[str, Any]) -> str:
    """Milliseconds of an update, beside a copy and the kernel for PyTorch."""
    columns = ["p", "ms", "copies of the array", "kernel for PyTorch, ms", "ratio", "temporary"]
    rows = [
        [
            str(row["bands"]), f"{row['ms']:.2f}", f"{row['copies']:.1f}",
            f"{row['torch_ms']:.2f}", f"{row['of_torch']:.2f}", f"{row['temporary_bytes']} bytes",
        ]
        for row in found["rows"]
        if row["variant"] == USUAL
    ]  # fmt: skip
    return _tables.markdown(columns, rows)


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    worst = max(row["worst_error"] for row in found["rows"])
    slowest = max(row["compile_s"] for row in found["rows"] if row["variant"] == USUAL)
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("jax", "torch"))
    return (
        f"{found['size']:,} float32, BISR, nothing stored, all in one run; a normal of the kernel "
        f"is at most {worst:.1e} from its definition among 2^22; compilation takes up to "
        f"{slowest:.1f} s. {found['device']}, {versions}, {found['date'][:10]}."
    )
