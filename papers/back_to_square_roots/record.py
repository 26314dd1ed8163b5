"""A result: the numbers of one run, and what made them."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import scipy

from corrnoise import __version__, _files
from corrnoise._progress import Progress

SEED = 0


def measured(
    name: str,
    experiment: ModuleType,
    *,
    smoke: bool,
    progress: Progress | None,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run an experiment, and add to its data what a reader needs to run it again.

    Experiments with ``RESUMES`` keep what is finished in an ``earlier`` result, and say so in
    "kept_from".
    """
    began = time.perf_counter()
    more = {"earlier": earlier} if getattr(experiment, "RESUMES", False) else {}
    data = experiment.run(smoke=smoke, progress=progress, **more)
    return {
        "name": name,
        "title": experiment.TITLE,
        "smoke": smoke,
        "seed": SEED,
        "seconds": round(time.perf_counter() - began, 2),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "corrnoise": __version__,
        "machine": machine(),
        "data": data,
    }


def machine() -> dict[str, Any]:
    """The processor and the versions that the numbers come from; torch's if it was used."""
    torch = sys.modules.get("torch")
    more = {} if torch is None else {"torch": torch.__version__}
    if torch is not None and torch.cuda.is_available():
        more["gpu"] = torch.cuda.get_device_name()
    return {
        **more,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }


def resumed(earlier: dict[str, Any] | None, size: Mapping[str, Any]) -> dict[str, Any]:
    """The data of an earlier result of the same size, with its date as "kept_from"; or nothing."""
    if earlier is None or earlier["data"].get("reduced", True):
        return {}
    data = earlier["data"]
    if any(data[key] != value for key, value in size.items()):
        return {}
    return {**data, "kept_from": data.get("kept_from", earlier["date"])}


def stem(result: dict[str, Any]) -> str:
    """The name of a result's files."""
    return result["name"] + ("-smoke" if result["smoke"] else "")


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write ``results/NAME.json``, one row of data to a line."""
    path = folder / "results" / f"{stem(result)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in result.items() if key != "data"}
    lines = json.dumps(head, indent=1, ensure_ascii=False)[:-2]
    parts = [f'  "{key}": {_lines(value)}' for key, value in result["data"].items()]
    _files.write(path, lines + ',\n "data": {\n' + ",\n".join(parts) + "\n }\n}\n")
    return path


def read(name: str, folder: Path) -> dict[str, Any] | None:
    """The result of a full run, or ``None`` where there is none."""
    path = folder / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _lines(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n   " + ",\n   ".join(json.dumps(row, ensure_ascii=False) for row in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
