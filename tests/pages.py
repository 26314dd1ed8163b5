"""Plans and runs to report on: real plans, and courses that are only as real as a layout needs."""

from __future__ import annotations

from functools import cache

import corrnoise as cn
from corrnoise.records.run import Record, Run
from corrnoise.records.statement import Statement

SETTING = {"num_examples": 1437, "batch_size": 64, "epochs": 5, "epsilon": 4.0, "delta": 1e-5}
HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


@cache
def fixed() -> cn.Plan:
    families = ["dp_sgd", "bsr", "bisr", "band_inv_mf", "blt"]
    return cn.plan(
        **SETTING, momentum=0.9, sampling="fixed", mechanisms=families, num_parameters=650
    )


@cache
def certified() -> cn.Plan:
    small = SETTING | {"num_examples": 120, "batch_size": 20, "epochs": 3}
    return cn.plan(**small, momentum=0.9, mechanisms=["dp_sgd", "bisr"], samples=20_000)


@cache
def poisson() -> cn.Plan:
    small = SETTING | {"num_examples": 120, "batch_size": 20, "epochs": 3}
    return cn.plan(**small, sampling="poisson", mechanisms=["dp_sgd", "bisr"])


@cache
def dense() -> cn.Plan:
    small = SETTING | {"num_examples": 60, "batch_size": 10, "epochs": 2}
    return cn.plan(**small, sampling="fixed", mechanisms=["dense"], memory=None)


@cache
def with_dp_sgd(plan: cn.Plan) -> cn.Plan:
    """DP-SGD at the same budget, as a plan that nothing was searched for."""
    c = plan.calibration
    found = cn.calibrate(
        cn.mechanisms.dp_sgd(c.mechanism.workload),
        c.participation,
        epsilon=c.epsilon,
        delta=c.delta,
        sampling=c.sampling,
        samples=20_000,
    )
    return cn.Plan(num_examples=plan.num_examples, batch_size=plan.batch_size, calibration=found)


@cache
def run(plan: cn.Plan, label: str, best: float, *, epochs: int | None = None) -> Run:
    b, most = plan.participation.min_sep, plan.participation.max_participations
    epochs = epochs or most
    records = tuple(
        Record(
            step=b * i,
            epsilon=plan.calibration.spent(b * i, samples=10_000),
            loss=2.3 - 0.35 * i * best,
            test_loss=2.3 - 0.33 * i * best,
            test_accuracy=best * i / (i + 0.4),
        )
        for i in range(1, epochs + 1)
    )
    spent = {} if epochs == most else {"steps_taken": b * epochs, "epsilon": records[-1].epsilon}
    return Run(
        label=label,
        plan=plan,
        statement=Statement.of(plan, clip_norm=1.5, key_fingerprint="3f9a12bc", **spent),
        records=records,
        data={"name": "digits", "num_train": 1437, "num_test": 360, "num_classes": 10},
        model={"name": "linear", "num_parameters": 650},
        settings={"learning_rate": 0.05, "seed": 7, "device": "cpu"},
        seconds=12.34,
    )


def compared(plan: cn.Plan) -> list[Run]:
    return [run(plan, "Correlated", 0.93), run(with_dp_sgd(plan), "DP-SGD", 0.81)]
