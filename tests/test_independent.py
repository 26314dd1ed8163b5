"""The verifier that does not import corrnoise agrees with every golden number."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import oracles
import pytest

import corrnoise as cn
from corrnoise import mechanisms, workloads

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "verify_independently.py"
_SPEC = importlib.util.spec_from_file_location("verify_independently", SCRIPT)
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)

NOISE = json.loads((ROOT / "tests" / "golden" / "noise_multipliers.json").read_text())
RMSE = json.loads((ROOT / "tests" / "golden" / "rmse.json").read_text())
PARTS = {"CIFAR-10": cn.Participation(980, 98, 10), "IMDB": cn.Participation(490, 49, 10)}
WORKLOADS = {
    "CIFAR-10": workloads.sgd(980, momentum=0.9, decay=0.9999),
    "IMDB": workloads.sgd(490, momentum=0.95, decay=0.99999),
}
CASES = [(d, s, m) for d in PARTS for s in NOISE[d] for m in NOISE[d][s]]


@lru_cache
def built(dataset, family):
    made = mechanisms.build(
        family, WORKLOADS[dataset], PARTS[dataset], 4 if family != "dp_sgd" else None
    )
    return json.loads(made.to_json())


def half_unit(value):
    """Half a unit of the last digit that a golden number is given to."""
    return 0.5 * 10.0 ** -len(str(value).partition(".")[2])


def test_it_imports_nothing_of_ours():
    imported = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported == {
        "__future__", "argparse", "itertools", "json", "math", "mpmath", "numpy", "scipy", "sys"
    }  # fmt: skip
    assert len(SCRIPT.read_text().splitlines()) < 300


@pytest.mark.parametrize(("dataset", "family"), [(d, m) for d, s, m in CASES if s == "fixed"])
def test_golden_noise_of_fixed_batches(dataset, family):
    """δ at the golden noise, and at half a unit of its last digit less and more."""
    wanted, part = NOISE[dataset]["fixed"][family], PARTS[dataset]
    C = tool.strategy(built(dataset, family))
    lower, upper = tool.sensitivity(C, part.min_sep, part.max_participations)
    assert lower == pytest.approx(upper, rel=1e-9)
    half = half_unit(wanted)
    assert tool.fixed_delta(9.0, upper / (wanted + half)) <= 1e-5
    assert tool.fixed_delta(9.0, lower / (wanted - half)) >= 1e-5


@pytest.mark.parametrize("family", list(NOISE["CIFAR-10"]["balls-in-bins"]))
def test_golden_noise_of_balls_in_bins(family):
    """Plain draws cannot tell the golden δ from 1e-5, nor ours at an ε where δ is large.

    Each interval fails with probability 1e-3: ten of them raise a false alarm in 1 % of seeds.
    """
    wanted, part = NOISE["CIFAR-10"]["balls-in-bins"][family], PARTS["CIFAR-10"]
    data = built("CIFAR-10", family)
    C = tool.strategy(data)
    low, high = tool.bins_delta(9.0, wanted, C, part.min_sep, 200_000)
    assert low <= 1e-5 <= high
    mechanism = cn.Mechanism.from_dict(data)
    epsilon = 3.0
    found = cn.account(
        mechanism, part, noise_multiplier=wanted, epsilon=epsilon, sampling="balls-in-bins",
        samples=20_000, failure_probability=1e-3,
    )  # fmt: skip
    low, high = tool.bins_delta(epsilon, wanted, C, part.min_sep, 100_000)
    assert low < found.delta  # a certified bound of what lies in the interval
    assert high - low < 0.2 * low
    # Half the noise is refuted.
    assert tool.bins_delta(9.0, wanted / 2.0, C, part.min_sep, 20_000)[0] > 1e-5


def golden_rmse():
    """Every golden RMSE: workload, participation, family, its number, and whether it is a limit."""
    for row in RMSE["prefix_sum"] + RMSE["sgd"]:
        n, k = row["n"], row["k"]
        part = cn.Participation(n, n // k, k)
        a = workloads.sgd(n, momentum=row.get("momentum", 0.0), decay=row.get("decay", 1.0))
        for name, value in row.items():
            if name == "band_inv_mf":
                for bands, limit in value.items():
                    yield a, part, name, int(bands), limit
            elif name not in ("n", "k", "decay", "momentum"):
                yield a, part, name, None, value


@pytest.mark.parametrize(
    ("a", "part", "name", "bands", "golden"),
    list(golden_rmse()),
    ids=lambda value: repr(value) if isinstance(value, cn.Workload) else None,
)
def test_golden_errors(a, part, name, bands, golden):
    """To the digits that it is given in; the families that need a search have upper limits."""
    n, b, k = part.num_steps, part.min_sep, part.max_participations
    made = {
        "bsr": lambda: mechanisms.bsr(a, num_bands=b),
        "bisr_4": lambda: mechanisms.bisr(a, num_bands=4),
        "bisr_best": lambda: mechanisms.bisr(a, part, num_bands="best"),
        "band_mf": lambda: mechanisms.band_mf(a, part, num_bands=b),
        "blt_4": lambda: mechanisms.blt(a, part, num_buffers=4),
        "dense": lambda: mechanisms.dense(a, part),
        "band_inv_mf": lambda: mechanisms.band_inv_mf(a, part, num_bands=bands),
    }[name]()
    data = json.loads(made.to_json())
    C = tool.strategy(data)
    lower, upper = tool.sensitivity(C, b, k)
    if name == "dense":
        error = np.linalg.norm(np.tril(np.ones((n, n))) @ np.linalg.inv(C)) / math.sqrt(n)
    else:
        error = tool.decoder_rms(data)
    assert lower * error <= made.rmse(part) * (1.0 + 1e-9)
    assert upper * error <= golden + half_unit(golden) * 1.01
    # Ours is never below the second bracket's attained value, and hardly above its bound.
    assert made.rmse(part) <= upper * error * (1.0 + 1e-5)
    if name in ("bsr", "bisr_4"):
        assert lower * error >= golden - half_unit(golden) * 1.01


@pytest.mark.parametrize(("n", "b", "k"), [(9, 3, 3), (10, 2, 4), (8, 8, 1), (11, 4, 2)])
def test_sensitivity_by_brute_force(n, b, k):
    random = np.random.default_rng(n)
    c = np.abs(random.normal(size=n))
    low, high = tool.sensitivity(c, b, k)
    exact = oracles.sensitivity(oracles.matrix(c), b, k)
    assert low <= exact * (1 + 1e-12)
    assert exact <= high * (1 + 1e-12)
    dense = np.tril(random.normal(size=(n, n)))
    assert tool.sensitivity(dense, b, k)[1] == pytest.approx(oracles.sensitivity(dense, b, k))
    assert sorted(map(tuple, tool.patterns(n, b, k))) == sorted(oracles.patterns(n, b, k))
    assert tool.count_patterns(n, b, k) == len(oracles.patterns(n, b, k))


def test_sensitivity_bracket_without_all_patterns(monkeypatch):
    """The pairwise bound of a general matrix is never below the enumeration."""
    random = np.random.default_rng(1)
    for n, b, k in ((9, 3, 3), (10, 2, 4), (11, 4, 2)):
        dense = np.tril(random.normal(size=(n, n)))
        exact = tool.sensitivity(dense, b, k)[1]
        with monkeypatch.context() as patch:
            patch.setattr(tool, "FEW_PATTERNS", 0)
            assert tool.sensitivity(dense, b, k)[1] >= exact * (1 - 1e-12)


@pytest.mark.parametrize("sampling", ["poisson", "cyclic-poisson"])
def test_poisson_prices_agree(sampling):
    """Our bound is never below the lower value, and hardly above the upper one."""
    part = cn.Participation(98, 49, 2)
    a = workloads.prefix_sum(98)
    m = mechanisms.dp_sgd(a) if sampling == "poisson" else mechanisms.bsr(a, num_bands=4)
    for sigma in (0.8, 2.0):
        found = cn.account(m, part, noise_multiplier=sigma, delta=1e-6, sampling=sampling)
        low, high, _ = tool.price(json.loads(found.to_json()), 0, 0)
        assert low <= 1e-6 <= high * 1.03
        assert high < 1.1 * low


def test_one_poisson_step_is_the_closed_form():
    """One step: δ(ε) = P(L > ε) - e^ε Q(L > ε) with one threshold."""
    from scipy.stats import norm

    sigma, q, epsilon = 1.1, 0.2, 0.7
    x = sigma**2 * math.log((math.exp(epsilon) - 1 + q) / q) + 0.5
    out, within = norm.sf(x / sigma), norm.sf((x - 1) / sigma)
    remove = (1 - q) * out + q * within - math.exp(epsilon) * out
    low, high = tool.poisson_delta(epsilon, sigma, q, 1)
    assert low <= remove <= high
    assert high - low < 0.02 * high


def test_the_script_answers_with_an_exit_code(tmp_path, capsys):
    plan = cn.plan(
        num_examples=100, batch_size=10, epochs=2, epsilon=4, delta=1e-4, sampling="fixed"
    )
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert tool.main([str(path)]) == 0
    assert "agrees" in capsys.readouterr().out
    path.write_text(plan.to_json().replace('"epsilon": 4.0', '"epsilon": 3.9'))
    assert tool.main([str(path)]) == 1
    assert "DISAGREES" in capsys.readouterr().out
