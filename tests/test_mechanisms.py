"""What every mechanism must satisfy, and the table of errors that the library is held to."""

import itertools
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import oracles
import pytest

from corrnoise import Participation, bounds, mechanisms, workloads
from corrnoise.mechanisms import DenseMechanism, Mechanism

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rmse.json").read_text())
ROWS = [
    pytest.param(
        row, id=f"n{row['n']}-k{row['k']}-a{row.get('decay', 1)}-b{row.get('momentum', 0)}"
    )
    for row in GOLDEN["prefix_sum"] + GOLDEN["sgd"]
]

WORKLOADS = {
    "prefix": workloads.prefix_sum(9),
    "momentum": workloads.sgd(9, momentum=0.9),
    "decay": workloads.sgd(9, decay=0.9),
    "both": workloads.sgd(9, momentum=0.5, decay=0.99),
    "equal": workloads.sgd(9, momentum=0.7, decay=0.7),
    "double": workloads.sgd(9, momentum=1.0, decay=1.0),
    "identity": workloads.sgd(9, momentum=0.0, decay=0.0),
    "toeplitz": workloads.toeplitz(np.exp(-np.arange(9) / 4) * (1 + 0.2 * np.cos(np.arange(9)))),
}
PARTICIPATIONS = {
    "b4k3": Participation(9, 4, 3),  # 3·4 > 9: the last epoch is short
    "b3k2": Participation(9, 3, 2),
    "b9k1": Participation(9, 9, 1),
    "b1k9": Participation(9, 1, 9),
}


def build(family, workload, participation):
    b = participation.min_sep
    return {
        "dp_sgd": lambda: mechanisms.dp_sgd(workload),
        "square_root": lambda: mechanisms.square_root(workload),
        "bsr": lambda: mechanisms.bsr(workload, num_bands=3),
        "bisr": lambda: mechanisms.bisr(workload, num_bands=3),
        "bisr_best": lambda: mechanisms.bisr(workload, participation, num_bands="best"),
        "lambda_cgd": lambda: mechanisms.lambda_cgd(workload, participation),
        "bifr": lambda: mechanisms.bifr(workload, participation, num_bands=4),
        "bifr_wide": lambda: mechanisms.bifr(workload, num_bands=7, power=0.8),
        "band_mf": lambda: mechanisms.band_mf(workload, participation, num_bands=b),
        "band_mf_wide": lambda: mechanisms.band_mf(
            workload, participation, num_bands=min(b + 2, 9)
        ),
        "band_inv_mf": lambda: mechanisms.band_inv_mf(workload, participation, num_bands=3),
        "blt": lambda: mechanisms.blt(workload, participation, num_buffers=2),
        "dense": lambda: mechanisms.dense(workload, participation),
        "dense_equal": lambda: mechanisms.dense(workload, participation, equal_columns=True),
    }[family]()


FAMILIES = [
    "dp_sgd",
    "square_root",
    "bsr",
    "bisr",
    "bisr_best",
    "lambda_cgd",
    "bifr",
    "bifr_wide",
    "band_mf",
    "band_mf_wide",
    "band_inv_mf",
    "blt",
    "dense",
    "dense_equal",
]
OPTIMISED = {
    "lambda_cgd",
    "bifr",
    "band_mf",
    "band_mf_wide",
    "band_inv_mf",
    "blt",
    "dense",
    "dense_equal",
}


@pytest.mark.parametrize("participation", PARTICIPATIONS.values(), ids=PARTICIPATIONS)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mechanism_factors_every_workload_under_every_participation(
    family, workload, participation
):
    m = build(family, workload, participation)
    n, b, k = 9, participation.min_sep, participation.max_participations
    A = oracles.matrix(workload.coef)
    if isinstance(m, DenseMechanism):
        B, C, C_inv = m.decoder, m.strategy, m.noising
        assert np.array_equal(C, np.tril(C))
    else:
        B, C, C_inv = map(oracles.matrix, (m.decoder_coef, m.strategy_coef, m.noising_coef))
    scale = np.max(np.abs(C)) * np.max(np.abs(C_inv)) * np.max(np.abs(A))
    np.testing.assert_allclose(B @ C, A, atol=1e-13 * n * scale)
    np.testing.assert_allclose(C @ C_inv, np.eye(n), atol=1e-13 * n * scale)

    upper = oracles.sensitivity(C, b, k)
    found = m.sensitivity(participation)
    assert upper <= found.value * (1 + 1e-9)
    assert found.lower <= upper * (1 + 1e-9)
    if found.exact:
        assert found.value == pytest.approx(upper, rel=1e-9)

    steps = np.linalg.norm(B, axis=1)
    assert m.rmse(participation) == pytest.approx(found.value * np.linalg.norm(B) / math.sqrt(n))
    assert m.rmse(participation, "last") == pytest.approx(found.value * steps[-1])
    assert m.rmse(participation, "max") == pytest.approx(found.value * steps.max())
    np.testing.assert_allclose(m.rmse_per_step(participation), found.value * steps)

    assert bounds.lower_bound(workload, participation) <= m.rmse(participation) * (1 + 1e-9)
    record = m.optimization
    assert (record is not None) == (family in OPTIMISED)
    if record is not None:
        assert record.final <= record.start
        assert record.final == pytest.approx(m.rmse(participation), rel=1e-9)
        assert record.participation == participation

    again = Mechanism.from_json(m.to_json())
    assert type(again) is type(m)
    assert again.rmse(participation) == m.rmse(participation)
    assert again.to_json() == m.to_json()
    assert again == m
    assert repr(m).startswith(m.name)


@pytest.mark.parametrize("row", ROWS)
def test_table_of_errors(row):
    setting = {"n", "k", "decay", "momentum"}
    families = {"bsr", "bisr_4", "bisr_best", "band_mf", "band_inv_mf", "blt_4", "dense"}
    assert row.keys() & families  # and nothing that the test would not look at
    assert not row.keys() - setting - families
    n, k = row["n"], row["k"]
    participation = Participation(n, n // k, k)
    workload = workloads.sgd(n, momentum=row.get("momentum", 0.0), decay=row.get("decay", 1.0))

    def half_unit(value):  # of the last digit that the table gives
        text = repr(value)
        return 0.5 * 10.0 ** -len(text.split(".")[1]) * (1 + 1e-9)

    for key, m in [
        ("bsr", mechanisms.bsr(workload, num_bands=n // k)),
        ("bisr_4", mechanisms.bisr(workload, num_bands=4)),
    ]:
        if key in row:
            assert m.rmse(participation) == pytest.approx(row[key], abs=half_unit(row[key]))
            assert m.sensitivity(participation).exact
    if "bisr_best" in row:
        m = mechanisms.bisr(workload, participation, num_bands="best")
        assert m.rmse(participation) <= row["bisr_best"]
        assert m.sensitivity(participation).exact
    if "band_mf" in row:
        m = mechanisms.band_mf(workload, participation, num_bands=n // k)
        assert m.rmse(participation) <= row["band_mf"]
        assert m.sensitivity(participation).exact
    for p, limit in row.get("band_inv_mf", {}).items():
        m = mechanisms.band_inv_mf(workload, participation, num_bands=int(p))
        found = m.sensitivity(participation)
        assert m.rmse(participation) <= limit
        assert found.exact or found.gap < 1e-3
        assert m.optimization.converged
    if "blt_4" in row:
        m = mechanisms.blt(workload, participation, num_buffers=4)
        assert m.rmse(participation) <= row["blt_4"]
        assert m.sensitivity(participation).exact
    if "dense" in row:
        equal = mechanisms.dense(workload, participation, equal_columns=True)
        free = mechanisms.dense(workload, participation)
        assert equal.rmse(participation) <= row["dense"]
        assert free.rmse(participation) < 0.99 * equal.rmse(participation)
        assert free.sensitivity(participation).exact


@pytest.mark.parametrize(
    ("n", "b", "k", "decay", "momentum"),
    [
        (256, 64, 4, 1, 0),
        (256, 16, 16, 1, 0),
        (256, 16, 16, 1, 0.9),
        (300, 42, 7, 0.99, 0.5),
        (256, 1, 256, 1, 0),
        (256, 256, 1, 1, 0.9),
        (200, 30, 3, 0.999, 0),
        (64, 16, 4, 1, 1),
    ],
)
def test_best_bisr_is_the_best_of_a_full_scan(n, b, k, decay, momentum):
    workload = workloads.sgd(n, momentum=momentum, decay=decay)
    participation = Participation(n, b, k)
    best = mechanisms.bisr(workload, participation, num_bands="best")
    scan = [mechanisms.bisr(workload, num_bands=p).rmse(participation) for p in range(1, n + 1)]
    assert best.rmse(participation) == pytest.approx(min(scan), rel=1e-12)


@pytest.mark.parametrize(
    ("family", "sizes", "share"),
    [
        ("band_inv_mf", (1, 2, 4, 8), 0.5),
        ("band_mf", (1, 8, 64, 128), 0.5),
        ("blt", (1, 2, 3, 4), 0.96),  # its first buffer has most of the gain
    ],
)
def test_more_bands_or_buffers_never_hurt(family, sizes, share):
    participation = Participation(512, 128, 4)
    workload = workloads.sgd(512, momentum=0.5)
    errors = [
        mechanisms.build(family, workload, participation, size).rmse(participation)
        for size in sizes
    ]
    for fewer, more in itertools.pairwise(errors):
        assert more <= fewer * (1 + 1e-9)
    assert errors[-1] < share * errors[0]
    assert errors[-1] < 0.2 * mechanisms.dp_sgd(workload).rmse(participation)


def test_limits():
    participation = Participation(64, 16, 4)
    workload = workloads.prefix_sum(64)
    plain = mechanisms.dp_sgd(workload).rmse(participation)
    for m in (
        mechanisms.bsr(workload, num_bands=1),
        mechanisms.bisr(workload, num_bands=1),
        mechanisms.band_mf(workload, participation, num_bands=1),
        mechanisms.band_inv_mf(workload, participation, num_bands=1),
    ):
        assert m.rmse(participation) == pytest.approx(plain, rel=1e-12)
    whole = mechanisms.square_root(workload).rmse(participation)
    assert mechanisms.bisr(workload, num_bands=64).rmse(participation) == pytest.approx(
        whole, rel=1e-12
    )
    assert mechanisms.bsr(workload, num_bands=64).rmse(participation) == pytest.approx(
        whole, rel=1e-12
    )


def test_two_bands_reach_the_closed_form():
    n = 1024
    once = Participation(n, n, 1)
    m = mechanisms.band_inv_mf(workloads.prefix_sum(n), once, num_bands=2)
    rate = -m.noising_coef[1]
    assert m.rmse(once) == pytest.approx(bounds.two_band_rmse(n, rate), rel=1e-12)
    best = min(bounds.two_band_rmse(n, x) for x in np.linspace(0.9, 1, 2001))
    assert m.rmse(once) <= best <= bounds.two_band_bound(n)


@pytest.mark.parametrize("family", ["band_mf", "band_inv_mf", "blt"])
def test_optimising_the_last_error_improves_it(family):
    n = 256
    participation = Participation(n, 64, 4)
    workload = workloads.prefix_sum(n)
    size = {mechanisms.get(family).size: 4}
    make = partial(getattr(mechanisms, family), workload, participation, **size)
    mean = make()
    last = make(over="last")
    assert last.rmse(participation, "last") < mean.rmse(participation, "last")
    assert mean.rmse(participation) < last.rmse(participation)
    assert last.optimization.final == pytest.approx(last.rmse(participation, "last"))
    worst = make(over="max")
    assert worst.rmse(participation, "max") == pytest.approx(last.rmse(participation, "last"))


def test_dense_optimises_the_largest_error():
    participation = Participation(32, 8, 4)
    workload = workloads.prefix_sum(32)
    mean = mechanisms.dense(workload, participation)
    worst = mechanisms.dense(workload, participation, over="max")
    assert worst.rmse(participation, "max") < mean.rmse(participation, "max")
    assert mean.rmse(participation) < worst.rmse(participation)


@pytest.mark.parametrize(("n", "p"), [(8, 8), (24, 24), (24, 3)])
def test_dense_reaches_the_optimum_of_one_participation(n, p):
    """With X = CᵀC, diag(X) = 1: the fixed point of the dual variables is an oracle."""
    participation, workload = Participation(n, n, 1), workloads.prefix_sum(n)
    m = mechanisms.dense(workload, participation, num_bands=p)
    columns = np.sum(m.strategy**2, axis=0)
    assert columns == pytest.approx(np.full(n, columns[0]), rel=1e-12)
    if p == n:
        # The fixed point of the dual variables, whose value no mechanism is below.
        gram = np.tril(np.ones((n, n)))
        gram = gram.T @ gram
        dual = np.ones(n)
        for _ in range(2000):
            root = np.sqrt(dual)
            values, vectors = np.linalg.eigh(root[:, None] * gram * root)
            half = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
            dual = np.diag(half)
        root = np.sqrt(dual)
        trace = np.sum(np.sqrt(np.maximum(np.linalg.eigvalsh(root[:, None] * gram * root), 0.0)))
        least = trace**2 / np.sum(dual) / n
        assert m.rmse(participation) ** 2 == pytest.approx(least, rel=1e-7)


def test_dense_meets_the_lower_bound_where_that_is_the_optimum():
    participation = Participation(48, 1, 48)
    workload = workloads.prefix_sum(48)
    m = mechanisms.dense(workload, participation)
    assert m.rmse(participation) == pytest.approx(
        bounds.lower_bound(workload, participation), rel=1e-6
    )


def test_equal_columns_have_the_sensitivity_of_k_of_them():
    participation = Participation(40, 10, 4)
    m = mechanisms.dense(workloads.prefix_sum(40), participation, num_bands=5, equal_columns=True)
    np.testing.assert_allclose(np.linalg.norm(m.strategy, axis=0), 1.0, rtol=1e-12)
    assert m.sensitivity(participation).value == pytest.approx(2.0)
    assert np.all(m.strategy[np.subtract.outer(range(40), range(40)) >= 5] == 0)


def test_uncertified_optimum_is_not_taken():
    """At k = 16, p = 64 = b the attained value leads to negative C and would claim 16.52."""
    participation = Participation(1024, 64, 16)
    m = mechanisms.band_inv_mf(workloads.prefix_sum(1024), participation, num_bands=64)
    found = m.sensitivity(participation)
    assert 16.9 < m.rmse(participation) <= 17.01
    assert found.exact or found.gap < 1e-3


def test_long_runs_stay_certified_and_small():
    n = 1 << 18
    participation = Participation(n, n // 4, 4)
    workload = workloads.sgd(n, momentum=0.9, decay=0.99999)
    for m in (
        mechanisms.bisr(workload, num_bands=8),
        mechanisms.band_inv_mf(workload, participation, num_bands=4),
    ):
        assert m.sensitivity(participation).exact
        assert m.rmse(participation) >= bounds.lower_bound(workload, participation)


def test_growing_series_are_refused_not_returned():
    workload = workloads.toeplitz(1.0 + np.arange(2000.0) ** 3)
    with pytest.raises(OverflowError, match="grow beyond float64"):
        mechanisms.bisr(workload, num_bands=3).rmse(Participation(2000, 500, 4))


WORKLOAD, PARTICIPATION = workloads.prefix_sum(8), Participation(8, 4, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mechanisms.bsr(WORKLOAD, num_bands=9),
            r"num_bands must be in \[1, 8\], got 9; lower num_bands or raise",
        ),
        (lambda: mechanisms.bsr(WORKLOAD, num_bands=0), "num_bands must be in"),
        (lambda: mechanisms.bisr(WORKLOAD, num_bands=2.0), "num_bands must be an integer"),
        (lambda: mechanisms.bisr(WORKLOAD, num_bands="all"), "\"best\", got 'all'"),
        (lambda: mechanisms.bisr(WORKLOAD, num_bands="best"), "needs participation="),
        (lambda: mechanisms.band_mf(WORKLOAD, PARTICIPATION, num_bands=9), "num_bands must be in"),
        (
            lambda: mechanisms.band_inv_mf(WORKLOAD, PARTICIPATION, num_bands=-1),
            "num_bands must be in",
        ),
        (
            lambda: mechanisms.band_inv_mf(WORKLOAD, PARTICIPATION, num_bands=2, over="sum"),
            "over must be one of",
        ),
        (lambda: mechanisms.blt(WORKLOAD, PARTICIPATION, num_buffers=0), "num_buffers must be in"),
        (lambda: mechanisms.dense(WORKLOAD, PARTICIPATION, num_bands=5), "num_bands must be in"),
        (
            lambda: mechanisms.dense(WORKLOAD, PARTICIPATION, over="last"),
            "over must be one of mean, max",
        ),
        (
            lambda: mechanisms.dense(workloads.prefix_sum(2000), Participation(2000, 4, 2)),
            "num_steps must be in .*use band_mf",
        ),
        (
            lambda: mechanisms.band_mf(WORKLOAD, Participation(9, 4, 2), num_bands=2),
            "participation.num_steps must be the workload's 8, got 9",
        ),
        (
            lambda: mechanisms.dp_sgd(WORKLOAD).rmse(Participation(9, 4, 2)),
            "participation.num_steps must be the mechanism's 8, got 9",
        ),
        (
            lambda: mechanisms.dp_sgd(WORKLOAD).rmse(PARTICIPATION, "median"),
            "over must be one of",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_values_cannot_be_changed():
    m = mechanisms.bisr(WORKLOAD, num_bands=3)
    with pytest.raises(AttributeError):
        m.name = "other"
    for coef in (m.strategy_coef, m.noising_coef, m.decoder_coef, WORKLOAD.coef):
        with pytest.raises(ValueError, match="read-only"):
            coef[0] = 2.0
    assert isinstance(m, Mechanism)


def test_mechanisms_by_name():
    part, w = Participation(24, 6, 4), workloads.prefix_sum(24)
    for name in mechanisms.names():
        size = None if name in ("dp_sgd", "lambda_cgd", "dense") else 2
        assert mechanisms.build(name, w, part, size).name == name
    assert mechanisms.build("bisr", w, part, "best") == mechanisms.bisr(w, part, num_bands="best")
    assert mechanisms.build("dense", w, part, 3).strategy[4, 1] == 0
    with pytest.raises(ValueError, match="num_bands must be given for bsr"):
        mechanisms.build("bsr", w, part)
    with pytest.raises(ValueError, match="num_buffers must be given for blt"):
        mechanisms.build("blt", w, part)
    with pytest.raises(
        ValueError, match="num_bands must be left out for dp_sgd, which has no size, got 2"
    ):
        mechanisms.build("dp_sgd", w, part, 2)
    with pytest.raises(ValueError, match="mechanism must be one of"):
        mechanisms.build("adam", w, part, 2)
