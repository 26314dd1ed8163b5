"""The targets for the speed of the library, and whether they hold in this run."""

from __future__ import annotations

from dataclasses import dataclass

import cases
from results import Results, ratio, seconds
from tables import number, titled

# Two optimisers that reach one optimum differ by this much, relative.
SAME = 1e-9
FASTER = 20.0
LONGEST = 2**20


@dataclass(frozen=True)
class Target:
    """One target: ``holds`` is ``None`` where this run did not measure it."""

    target: str
    measured: str
    holds: bool | None


def targets(results: Results) -> list[Target]:
    """All of them."""
    found = [
        _time(results, cases.BAND_INV_MF, 2**14, 1.0),
        _time(results, cases.BAND_INV_MF_WIDE, 2**14, 10.0),
        _time(results, cases.BAND_MF, 2**14, 5.0),
        _time(results, cases.BLT, 2**14, 5.0),
        _time(results, cases.BISR_BEST, LONGEST, 30.0),
        _time(results, cases.BAND_INV_MF, LONGEST, 60.0),
        _memory(results, cases.BISR_BEST),
        _memory(results, cases.BAND_INV_MF),
    ]
    for name, rival in (
        (cases.BAND_MF, cases.BANDED_TOEPLITZ),
        (cases.BAND_INV_MF, cases.LISTING),
    ):
        found += _faster(results, name, rival)
    found.append(_under("import corrnoise under 0.3 s", results.import_s, 0.3, " s"))
    return found


def table(results: Results) -> str:
    """The targets, what was measured and whether they hold."""
    words = {True: "yes", False: "NO", None: "not measured"}
    rows = [[t.target, t.measured, words[t.holds]] for t in targets(results)]
    return titled(
        "targets",
        ["target", "measured", "holds"],
        rows,
        f"Times are warm. rmse no higher: to {SAME:g}, relative.",
    )


def _under(target: str, value: float | None, limit: float, unit: str) -> Target:
    return Target(target, number(value, suffix=unit), None if value is None else value < limit)


def _time(results: Results, name: str, n: int, limit: float) -> Target:
    target = f"{name}, n = {n:,}, under {limit:g} s"
    return _under(target, seconds(results.ours, name, n), limit, " s")


def _memory(results: Results, name: str) -> Target:
    found = results.ours.get((name, LONGEST))
    target = f"{name}, n = {LONGEST:,}, peak memory under 2 GiB"
    return _under(target, found.peak_mib if found else None, 2048.0, " MiB")


def _faster(results: Results, name: str, rival: str) -> list[Target]:
    """The ratio of times, cold and warm, and the errors."""
    key = f"{name}, n = {cases.COMPARED_AT:,}"
    ours, theirs = (
        results.ours.get((name, cases.COMPARED_AT)),
        results.theirs.get((rival, cases.COMPARED_AT)),
    )
    if ours is None or theirs is None:
        return [Target(f"{key}: {FASTER:g}x faster than {rival}", "-", None)]
    found: list[Target] = []
    for word, above, below in (
        ("cold", theirs.cold_s, ours.cold_s),
        ("warm", theirs.warm_s, ours.warm_s),
    ):
        times = ratio(above, below)
        target = f"{key}: {FASTER:g}x faster than {rival}, {word}"
        holds = None if times is None else times >= FASTER
        found.append(Target(target, number(times, suffix="x"), holds))
    if ours.rmse is not None and theirs.rmse is not None:
        measured = f"{number(ours.rmse, 7)} against {number(theirs.rmse, 7)}"
        holds = ours.rmse <= theirs.rmse * (1.0 + SAME)
        found.append(Target(f"{key}: rmse no higher than {rival}", measured, holds))
    return found
