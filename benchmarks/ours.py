"""Measure one corrnoise mechanism: ``python ours.py CASE N`` prints lines of JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cases
from worker import emit, peak_mib, timed, warm

if TYPE_CHECKING:
    import corrnoise as cn

# Beyond this the first call is the warm one too: what it imports is a small part of it.
REPEAT_UNDER_S = 8.0


def builder(case: str, workload: cn.Workload, participation: cn.Participation) -> Callable[[], Any]:
    from corrnoise import mechanisms as m

    b = participation.min_sep
    return {
        cases.BAND_MF: lambda: m.band_mf(workload, participation, num_bands=b),
        cases.BAND_INV_MF: lambda: m.band_inv_mf(workload, participation, num_bands=4),
        cases.BAND_INV_MF_WIDE: lambda: m.band_inv_mf(workload, participation, num_bands=64),
        cases.BLT: lambda: m.blt(workload, participation, num_buffers=4),
        cases.BISR_BEST: lambda: m.bisr(workload, participation, num_bands="best"),
        cases.BISR: lambda: m.bisr(workload, num_bands=4),
        cases.BSR: lambda: m.bsr(workload, num_bands=b),
        cases.DENSE: lambda: m.dense(workload, participation),
    }[case]


def main(case: str, n: int) -> None:
    """Time the import, the first call, further calls and the pricing."""
    cn, import_s = timed(_library)
    k = cases.MAX_PARTICIPATIONS
    participation = cn.Participation(n, n // k, k)
    build = builder(case, cn.workloads.prefix_sum(n), participation)
    mechanism, first_s = timed(build)
    warm_s = warm(build, first_s) if first_s < REPEAT_UNDER_S else first_s
    # What the library imports only when first needed is no part of the price.
    cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(k)).rmse(cn.Participation(k, 1, k))
    rmse, price_s = timed(lambda: mechanism.rmse(participation))
    emit(
        import_s=import_s,
        first_s=first_s,
        warm_s=warm_s,
        price_s=price_s,
        rmse=rmse,
        gap=mechanism.sensitivity(participation).gap,
        peak_mib=peak_mib(),
    )


def _library() -> Any:
    import corrnoise

    return corrnoise


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
