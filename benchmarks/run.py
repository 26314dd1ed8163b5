"""Time and error of every mechanism beside jax-privacy 2.0.0, and how the cost grows with n.

python benchmarks/run.py [--quick] [--limit SECONDS] [--out FILE]

Every case runs in a process of its own. jax-privacy is installed under build/ by the first run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import cases
import corrnoise as cn
import environment
import report
import targets
from measurement import Measurement, run
from pricing import price
from results import Results
from worker import SHORT_S

HERE = Path(__file__).resolve().parent
OURS_LIMIT_S = 300.0
# Fixed costs fade as n grows, so the next step up costs rather more than the last one.
MARGIN = 0.75
NOT_RUN = "not run"


def measure_ours(results: Results, selected: tuple[cases.Case, ...]) -> None:
    """Every mechanism of ours at every size."""
    for case in selected:
        for n in case.sizes:
            results.ours[case.name, n] = _steady(case.name, n)
            _progress(f"corrnoise {case.name}", results.ours[case.name, n])


def _steady(name: str, n: int) -> Measurement:
    """One measurement; of short ones that a target rests on, the least of three."""
    command = [sys.executable, str(HERE / "ours.py"), name, str(n)]
    found, _ = run(name, n, command, OURS_LIMIT_S)
    for _ in range(2 if n == cases.COMPARED_AT and (found.cold_s or SHORT_S) < SHORT_S else 0):
        found = min(found, run(name, n, command, OURS_LIMIT_S)[0], key=_cold)
    return found


def _cold(found: Measurement) -> float:
    return math.inf if found.cold_s is None else found.cold_s


def measure_theirs(
    results: Results, selected: tuple[cases.Case, ...], python: Path, limit_s: float, quick: bool
) -> None:
    """Every rival, size by size, until one runs over the limit or is sure to."""
    repeat_under_s = 8.0 if quick else limit_s / 5
    for case in selected:
        for rival in case.rivals:
            before: list[Measurement] = []
            for n in (n for n in case.sizes if n <= rival.largest):
                found = _expected(rival.name, n, before, limit_s)
                if found is None:
                    command = [str(python), str(HERE / "theirs.py"), rival.name, str(n)]
                    rests = not quick and n == cases.COMPARED_AT  # a target rests on it
                    command.append(str(limit_s / 2 if rests else repeat_under_s))
                    found, answer = run(rival.name, n, command, limit_s)
                    if found.failure is None:
                        found = _priced(found, answer)
                        results.machine.update(answer["versions"])
                before.append(found)
                results.theirs[rival.name, n] = found
                _progress(f"jax-privacy {rival.name}", found)


def _expected(
    name: str, n: int, before: Sequence[Measurement], limit_s: float
) -> Measurement | None:
    """Why not to try this size: the last one failed, or the growth so far leads over the limit."""
    if not before:
        return None
    if before[-1].failure:
        return Measurement(name, n, failure=NOT_RUN)
    times = [m.first_s for m in before if m.first_s]
    if len(times) < 2:
        return None
    expected = times[-1] * max(times[-1] / times[-2], 1.0)
    if expected < MARGIN * limit_s:
        return None
    return Measurement(name, n, failure=NOT_RUN)


def _priced(found: Measurement, answer: dict[str, object]) -> Measurement:
    n, k = found.num_steps, cases.MAX_PARTICIPATIONS
    try:
        return replace(found, **price(answer, cn.Participation(n, n // k, k)))
    except ValueError as error:
        return replace(found, failure=f"no valid answer: {str(error)[:60]}")


def import_seconds(repeats: int = 5) -> float:
    """``import corrnoise`` in a fresh interpreter, less the start of a bare one: medians."""

    def median(code: str) -> float:
        times: list[float] = []
        for _ in range(repeats):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return median("import corrnoise") - median("pass")


def machine() -> dict[str, str]:
    """Where this ran."""
    return {
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in ("corrnoise", "numpy", "scipy")},
    }


def _progress(what: str, found: Measurement) -> None:
    took = found.failure or f"{found.first_s:.3g} s"
    print(f"  {what}, n = {found.num_steps:,}: {took}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the JSON where asked."""
    parser = argparse.ArgumentParser(description="Time and error beside jax-privacy 2.0.0.")
    parser.add_argument("--quick", action="store_true", help="n up to 4096 only")
    parser.add_argument("--out", type=Path, help="write the results as JSON to this file")
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds for each case of jax-privacy"
    )
    options = parser.parse_args(arguments)
    selected = cases.selected(options.quick)
    start = time.perf_counter()
    results = Results(machine=machine(), import_s=import_seconds())
    python = environment.interpreter()
    measure_ours(results, selected)
    measure_theirs(results, selected, python, options.limit, options.quick)
    print("  ".join(f"{key} {value}" for key, value in results.machine.items()), end="\n\n")
    print(report.comparison(results, selected))
    print(report.growth(results, selected))
    print(report.memory(results))
    print(targets.table(results))
    print(f"measured in {time.perf_counter() - start:.0f} s")
    if options.out:
        data = results.to_dict() | {"targets": [asdict(t) for t in targets.targets(results)]}
        options.out.write_text(json.dumps(data, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
