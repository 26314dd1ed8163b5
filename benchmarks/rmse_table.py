"""Print the certified error of every mechanism as a Markdown table: ``make table``."""

from __future__ import annotations

import corrnoise as cn
from corrnoise._rounding import rounded_up

SETTINGS = ((256, 4), (1024, 4), (1024, 16), (4096, 4), (16384, 4), (16384, 16))
LARGEST_DENSE = 256
HEADER = (
    "workload",
    "n",
    "k",
    "bsr p=b",
    "bisr p=4",
    "bisr best",
    "band_mf p=b",
    "band_inv_mf p=4",
    "band_inv_mf p=16",
    "band_inv_mf p=64",
    "blt d=4",
    "dense",
    "lower bound",
)


class Gaps:
    """The sensitivities that are upper bounds, by how much they may be too large."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def cell(
        self,
        mechanism: cn.Mechanism,
        participation: cn.Participation,
        extra: str = "",
    ) -> str:
        """The certified rmse; with an asterisk, and remembered, where it is an upper bound."""
        sens = mechanism.sensitivity(participation)
        value = f"{mechanism.rmse(participation):.3f}"
        if not sens.exact:
            k = participation.max_participations
            self.found.append(f"{mechanism!r} with k = {k}: {rounded_up(100 * sens.gap, 2)} %")
            value += "*"
        return value + extra


def row(
    label: str, workload: cn.Workload, participation: cn.Participation, gaps: Gaps
) -> list[str]:
    """One line of the table."""
    n, b = participation.num_steps, participation.min_sep
    m = cn.mechanisms
    best = m.bisr(workload, participation, num_bands="best")

    def cell(mechanism: cn.Mechanism, extra: str = "") -> str:
        return gaps.cell(mechanism, participation, extra)

    return [
        label,
        f"{n:,}",
        str(participation.max_participations),
        cell(m.bsr(workload, num_bands=b)),
        cell(m.bisr(workload, num_bands=4)),
        cell(best, f" (p={best.noising_bands})"),
        cell(m.band_mf(workload, participation, num_bands=b)),
        *(cell(m.band_inv_mf(workload, participation, num_bands=p)) for p in (4, 16, 64)),
        cell(m.blt(workload, participation, num_buffers=4)),
        cell(m.dense(workload, participation)) if n <= LARGEST_DENSE else "",
        f"{cn.lower_bound(workload, participation):.3f}",
    ]


def main() -> None:
    """Print the table, and what its asterisks stand for."""
    gaps = Gaps()
    print("| " + " | ".join(HEADER) + " |")
    print("|---" + "|---:" * (len(HEADER) - 1) + "|", flush=True)
    runs = [("prefix sum", cn.workloads.prefix_sum(n), k) for n, k in SETTINGS]
    runs.append(("momentum 0.9", cn.workloads.sgd(1024, momentum=0.9), 4))
    runs.append(("decay 0.999", cn.workloads.sgd(1024, decay=0.999), 4))
    for label, workload, k in runs:
        n = workload.num_steps
        cells = row(label, workload, cn.Participation(n, n // k, k), gaps)
        print("| " + " | ".join(cells) + " |", flush=True)
    print()
    if gaps.found:
        print("\\* the sensitivity is a certified upper bound; at most this much of it is slack:")
        print("\n".join(f"- {line}" for line in gaps.found))
    else:
        print("Every sensitivity in the table is exact.")


if __name__ == "__main__":
    main()
