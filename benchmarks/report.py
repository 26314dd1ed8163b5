"""The tables of a run: beside jax-privacy, growth, memory."""

from __future__ import annotations

import math

import cases
from results import Results, ratio, seconds
from tables import number, titled

GROWTH = (cases.BAND_MF, cases.BAND_INV_MF, cases.BLT, cases.BISR_BEST)


def comparison(results: Results, selected: tuple[cases.Case, ...]) -> str:
    """Time and error of every mechanism, beside jax-privacy where it has one."""
    rows: list[list[str]] = []
    for case in selected:
        for rival in [rival.name for rival in case.rivals] or [None]:
            sizes = [n for n in case.sizes if rival is None or (rival, n) in results.theirs]
            rows += [_compared(results, case.name, rival, n) for n in sizes]
    return titled(
        "corrnoise beside jax-privacy: prefix sum, k = 4, b = n/k",
        [
            "mechanism",
            "n",
            "cold s",
            "warm s",
            "price s",
            "rmse",
            "jax-privacy",
            "its cold s",
            "its warm s",
            "its rmse",
            "cold ratio",
            "warm ratio",
            "rmse ratio",
        ],
        rows,
        "cold: import and first call in a fresh process (at n = 4,096 the least of 3 processes"
        "\nwhere under 2 s). warm: a later call, the least of 3 where the first took under 2 s;"
        "\nours is the first itself where that took over 8 s. price: certifying the result again."
        "\nratios: theirs / ours, above 1 is in our favour. Both rmse with our certified"
        "\nsensitivity; * where it is an upper bound. not run: its last size failed, or its growth"
        "\nleads past the time limit.",
    )


def _compared(results: Results, name: str, rival: str | None, n: int) -> list[str]:
    ours = results.ours[name, n]
    left = [
        name,
        f"{n:,}",
        ours.failure or number(ours.cold_s),
        number(ours.warm_s),
        number(ours.price_s),
        _rmse(ours.rmse, ours.gap),
    ]
    if rival is None:
        return [*left, "none", *["-"] * 6]
    theirs = results.theirs[rival, n]
    change = ratio(theirs.rmse, ours.rmse)
    return [
        *left,
        rival,
        theirs.failure or number(theirs.cold_s),
        number(theirs.warm_s),
        _rmse(theirs.rmse, theirs.gap),
        number(ratio(theirs.cold_s, ours.cold_s), suffix="x"),
        number(ratio(theirs.warm_s, ours.warm_s), suffix="x"),
        "-" if change is None else f"{change:.6f}",
    ]


def _rmse(rmse: float | None, gap: float | None) -> str:
    return number(rmse, digits=6, suffix="*" if gap else "")


def growth(results: Results, selected: tuple[cases.Case, ...]) -> str:
    """Our time over n, with the exponent between neighbouring sizes."""
    sizes = next(case.sizes for case in selected if case.name == cases.BAND_MF)
    rows: list[list[str]] = []
    for i, n in enumerate(sizes):
        row = [f"{n:,}"]
        for name in GROWTH:
            now = seconds(results.ours, name, n)
            before = seconds(results.ours, name, sizes[i - 1]) if i else None
            change = ratio(now, before)
            exponent = math.log(change, n / sizes[i - 1]) if change else None
            row += [number(now), "-" if exponent is None else f"{exponent:.2f}"]
        rows.append(row)
    header = ["n", *(text for name in GROWTH for text in (f"{name} s", "exponent"))]
    return titled("growth with n: warm time, and its exponent since the row above", header, rows)


def memory(results: Results) -> str:
    """Peak resident memory of our processes at the largest size."""
    n = cases.SIZES[-1]
    rows = [
        [name, f"{n:,}", number(found.peak_mib, digits=4), "2,048"]
        for name in (cases.BISR_BEST, cases.BAND_INV_MF, cases.BAND_MF, cases.BLT)
        if (found := results.ours.get((name, n)))
    ]
    header = ["mechanism", "n", "peak MiB", "limit MiB"]
    return titled("peak memory of the whole process", header, rows) if rows else ""
