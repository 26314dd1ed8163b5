"""Plans from files are claims: every field is validated, and the price is computed again."""

import copy
import dataclasses
import json
import math
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from training import KEY, private, train

import corrnoise as cn
from corrnoise.accounting import Draws, Estimate, certificates, gaussian
from corrnoise.mechanisms import Mechanism
from corrnoise.planning import Plan
from corrnoise.planning.verification import trust
from corrnoise.torch import PrivacyEngine
from corrnoise.torch.plans import check_plan
from corrnoise.torch.processes import Processes

RUN = {"num_examples": 60, "batch_size": 10, "epochs": 3, "epsilon": 4.0, "delta": 1e-3}
NAMES = ["fixed", "dense", "balls-in-bins", "poisson", "cyclic-poisson"]
C = "calibration"


@cache
def honest(name):
    more = {"sampling": name, "momentum": 0.9}
    if name == "dense":
        more = {"sampling": "fixed", "mechanisms": ["dense"], "memory": None}
    if name == "fixed":
        more["mechanisms"] = ["bisr", "dp_sgd"]
    if name == "cyclic-poisson":
        more |= {"mechanisms": ["bsr"], "memory": None}
    if name == "balls-in-bins":
        more |= {"mechanisms": ["bisr", "band_inv_mf"], "samples": 10_000}
    return cn.plan(**RUN | more)


def data_of(name):
    return json.loads(honest(name).to_json())


def edited(name, *changes):
    """A plan's JSON with some values replaced; a path is a tuple of names and indices."""
    data = data_of(name)
    for path, value in changes:
        at = data
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
    return json.dumps(data)


def refused(text, words="must"):
    """The text is refused when it is read or verified, by one line of a ``ValueError``."""
    with pytest.raises(ValueError, match=words) as caught:
        Plan.from_json(text).verified()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 500
    return line


def unread(text, words="must"):
    """The text is refused when it is read."""
    with pytest.raises(ValueError, match=words) as caught:
        Plan.from_json(text)
    assert "\n" not in str(caught.value)


def outcome(make):
    """The plan of a text if it is read and verified; ``None`` if it is refused in one line."""
    try:
        return Plan.from_json(make()).verified()
    except ValueError as problem:
        line = str(problem)
    assert "\n" not in line
    return None


def forget():
    """Draw certificates again, as another process would."""
    certificates._DRAWN.clear()


def check_claim(plan, name):
    """What a plan that was verified states is true."""
    c, before = plan.calibration, honest(name).calibration
    if c.sampling.name == "fixed":
        sens = c.mechanism.sensitivity(c.participation).value
        assert gaussian.delta(c.epsilon, sens / c.noise_multiplier) <= c.delta * (1 + 1e-8)
        assert c.kind != "exact" or c.mechanism.sensitivity(c.participation).exact
        return
    # The certificate is the one that was made, up to rounding, and at most δ.
    assert c.sampling == before.sampling
    assert c.participation == before.participation
    assert c.noise_multiplier == pytest.approx(before.noise_multiplier, rel=1e-8)
    assert c.epsilon >= before.epsilon * (1 - 1e-8)
    assert c.estimate.upper <= c.delta * (1 + 1e-8)
    assert c.failure_probability >= before.failure_probability * (1 - 1e-8)
    new, old = c.mechanism.strategy_coef, before.mechanism.strategy_coef
    np.testing.assert_allclose(new, old, rtol=1e-8, atol=1e-8)


# Honest plans


@pytest.mark.parametrize("name", NAMES)
def test_an_honest_plan_is_verified_and_equal_after_json(name):
    plan = honest(name)
    assert plan.verified() is plan
    forget()
    seen = []
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.verified(lambda *done: seen.append(done)) is again
    assert bool(seen) == plan.sampling.certified  # a certificate shows its progress
    assert again.to_json() == plan.to_json()


@pytest.mark.parametrize("sampling", cn.samplings.names())
@pytest.mark.parametrize("given_name", ["epsilon", "delta"])
def test_what_account_finds_is_verified(sampling, given_name):
    part = cn.Participation(18, 6, 3)
    m = cn.mechanisms.dp_sgd(cn.workloads.sgd(18, momentum=0.9))
    for noise in (0.4, 1.0, 3.0):
        budget = {"epsilon": 1.5} if given_name == "epsilon" else {"delta": 1e-4}
        more = {"samples": 2000, "seed": 7}
        c = cn.account(m, part, noise_multiplier=noise, sampling=sampling, **budget, **more)
        plan = Plan(num_examples=60, batch_size=10, calibration=c)
        forget()
        again = Plan.from_json(plan.to_json())
        assert again == plan
        again.verified()


@given(st.floats(0.05, 20), st.floats(1e-9, 1e-2), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=12)
def test_every_budget_is_verified(epsilon, delta, bands, seed):
    part = cn.Participation(18, 6, 3)
    m = cn.mechanisms.bisr(cn.workloads.sgd(18, momentum=0.5), num_bands=bands).in_float32()
    for sampling in ("fixed", "balls-in-bins"):
        c = cn.calibrate(
            m, part, epsilon=epsilon, delta=delta, sampling=sampling, samples=1000, seed=seed
        )
        plan = Plan(num_examples=60, batch_size=10, calibration=c)
        forget()
        Plan.from_json(plan.to_json()).verified()


def test_a_later_attempt_is_verified_too():
    """The draws of every attempt can be repeated, and count with their failure probability."""
    found = set()
    part = cn.Participation(18, 6, 3)
    m = cn.mechanisms.bisr(cn.workloads.prefix_sum(18), num_bands=2)
    for seed in range(12):
        budget = {"epsilon": 1.0, "delta": 1e-6, "samples": 20_000, "seed": seed}
        c = cn.calibrate(m, part, sampling="balls-in-bins", **budget)
        if c.estimate is None or c.estimate.attempt in found:
            continue
        found.add(c.estimate.attempt)
        assert c.estimate.whole_failure_probability == pytest.approx(1e-9, rel=1e-12)
        forget()
        Plan.from_json(Plan(60, 10, c).to_json()).verified()
        with pytest.raises(ValueError, match="failure_probability must be at least"):
            Plan(60, 10, dataclasses.replace(c, failure_probability=0.9e-9)).verified()
    assert min(found) == 1 < max(found)


def test_a_certificate_of_adding_an_example_is_verified():
    """Two steps in two bins with much noise: adding is the worse direction."""
    part = cn.Participation(2, 2, 1)
    m = cn.mechanisms.bisr(cn.workloads.prefix_sum(2), num_bands=2)
    directions = set()
    for noise in (0.3, 0.6, 1.0, 3.0):
        for epsilon in (0.0, 0.01, 0.3):
            c = cn.account(
                m, part, noise_multiplier=noise, epsilon=epsilon, sampling="balls-in-bins",
                samples=200_000,
            )  # fmt: skip
            directions.add(c.estimate.direction if c.estimate else None)
            forget()
            Plan.from_json(Plan(60, 30, c).to_json()).verified()
    assert "add" in directions


@pytest.mark.parametrize("rate", [0.0, 0.001])
def test_a_bound_of_balls_in_bins_is_verified_without_draws(monkeypatch, rate):
    """A price that no draws certify is a bound, and less noise is refused."""

    def drawn(*_, **__):
        raise AssertionError("draws were taken")

    part = cn.Participation(60, 30, 2)
    m = cn.mechanisms.lambda_cgd(cn.workloads.prefix_sum(60), rate=rate)
    budget = {"epsilon": 0.5, "delta": 1e-7, "sampling": "balls-in-bins", "samples": 1000}
    c = cn.calibrate(m, part, **budget)
    assert (c.kind, c.epsilon_without_sampling) == ("bound", 0.5)
    monkeypatch.setattr(certificates.balls_in_bins, "estimates", drawn)
    Plan.from_json(Plan(60, 2, c).to_json()).verified()
    for change in (
        {"noise_multiplier": 0.995 * c.noise_multiplier}, {"epsilon": 0.49}, {"delta": 0.95e-7},
        {"kind": "exact"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"epsilon must be|kind must be"):
            Plan(60, 2, dataclasses.replace(c, **change)).verified()


# What is not a plan


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", "true", "1", '"plan"', "no JSON", "{", "[" * 100_000, "NaN", "\x00",
     '{"format": 1}', '{"format": 1, "calibration": {}}', '{"a":' * 100_000, "9" * 5000],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_what_is_no_plan_is_refused(text):
    unread(text)
    with pytest.raises(ValueError, match="mechanism"):
        Mechanism.from_json(text)


@pytest.mark.parametrize("what", [None, 1, b"\xff\xfe\x00", b"\xf0\x28", object()])
def test_what_is_no_text_is_refused(what):
    with pytest.raises(ValueError, match="a plan must be"):
        Plan.from_json(what)


@pytest.mark.parametrize("name", ["fixed", "balls-in-bins"])
def test_a_truncated_plan_is_refused(name):
    text = honest(name).to_json()
    for length in random.Random(0).sample(range(len(text)), 60):
        unread(text[:length])


def test_a_field_that_is_given_twice_is_refused():
    text = honest("fixed").to_json()
    twice = text.replace('"noise_multiplier":', '"noise_multiplier": 9.0, "noise_multiplier":', 1)
    unread(twice, "'noise_multiplier' is given twice")


# Fields

NAN, INF, HUGE = math.nan, math.inf, 10**400
NUMBERS = [NAN, INF, -INF, HUGE, -HUGE, "4", None, True, [4.0], {}]
BAD = [
    *[((C, "noise_multiplier"), value, "noise_multiplier") for value in (*NUMBERS, 0.0, -1.0)],
    *[((C, "epsilon"), value, "epsilon") for value in (*NUMBERS, -1.0)],
    *[((C, "delta"), value, "delta") for value in (*NUMBERS, -1.0, 0.0, 2.0)],
    *[((C, "failure_probability"), value, "failure_probability") for value in (NAN, -1, 1e-9, "")],
    *[((C, "kind"), value, "kind") for value in ("magic", "estimate", None, 1, ["exact"], {})],
    ((C, "kind"), "certified", "failure_probability"),
    *[((C, "sampling"), value, "sampling") for value in ("poisson", "cyclic-poisson", "magic", None,
      1, [], {}, {"name": "fixed", "rate": 2}, {"name": "fixed", "name2": "x"}, ["fixed"])],
    *[((C, "num_steps"), value, "num_steps") for value in (17, 19, 0, -1, 18.0, "18", 10**12)],
    *[((C, "min_sep"), value, "min_sep") for value in (0, 19, 6.5, None, HUGE)],
    *[((C, "max_participations"), value, "max_participations") for value in (0, 4, NAN, "3")],
    ((C, "epsilon_without_sampling"), NAN, "epsilon_without_sampling"),
    ((C, "epsilon_without_sampling"), -1.0, "epsilon_without_sampling"),
    ((C, "estimate"), {}, "estimate"),
    ((C, "estimate"), [], "estimate"),
    ((C, "unit"), "user", "unit"),
    ((C, "neighbours"), "none", "neighbours"),
    ((C, "extra"), 1, "'extra'"),
    ((C,), None, "calibration"),
    ((C,), [], "calibration"),
    ((C, "mechanism"), None, "mechanism"),
    ((C, "mechanism"), {}, "kind"),
    ((C, "mechanism", "kind"), "magic", "kind of a mechanism"),
    ((C, "mechanism", "kind"), ["toeplitz"], "kind of a mechanism"),
    ((C, "mechanism", "kind"), "dense", "strategy"),
    *[((C, "mechanism", "name"), value, "name of a mechanism") for value in (
      "../up", "/etc", "", "a b", "x" * 100, None, 1, "a\nb")],
    ((C, "mechanism", "extra"), 1, "'extra'"),
    ((C, "mechanism", "optimization"), {}, "optimization"),
    ((C, "mechanism", "optimization"), 1, "optimization"),
    ((C, "mechanism", "workload"), None, "workload"),
    ((C, "mechanism", "workload"), {}, "num_steps"),
    *[((C, "mechanism", "workload", "num_steps"), value, "num_steps") for value in (
      0, 17, 10**12, HUGE, 1.5, None)],
    *[((C, "mechanism", "workload", "momentum"), value, "momentum") for value in (
      2.0, NAN, -1, HUGE, None, True)],
    ((C, "mechanism", "workload", "series"), {}, "workload"),
    ((C, "mechanism", "noising"), None, "series"),
    ((C, "mechanism", "noising"), {"numerator": []}, "denominator"),
    *[((C, "mechanism", "noising", "numerator"), value, "numerator") for value in (
      None, 1, "x", [1.0], [[]], [["1"]], [[None]], [[0.0]], [[-1.0]], [[NAN]], [[INF]], [[HUGE]],
      [[1.0, True]], [[[1.0]]], {}, [[1.0]] * 101)],
    *[((C, "mechanism", "noising", "numerator"), value, "beyond|range|finite") for value in (
      [[1.0, -1e5]], [[1e-300]], [[1e300]], [[1.0, 1e308]])],
    ((C, "mechanism", "noising", "denominator"), [[1.0, 1e40]], "beyond|range|finite"),
    *[(("num_examples",), value, "num_examples") for value in (0, 9, "60", None, 1e2, NAN)],
    *[(("batch_size",), value, "batch_size") for value in (0, 61, "10", None, HUGE)],
    *[(("memory",), value, "memory") for value in (-1, NAN, INF, HUGE, None, "0", True)],
    *[(("rounds",), value, "rounds") for value in (0, 7, None, "20", [20], True)],
    *[(("choice",), value, "choice") for value in (-1, 1000, "0", 0.5, True)],
    *[(("lower_bound",), value, "lower_bound") for value in (-1, NAN, "1", HUGE)],
    *[(("num_parameters",), value, "num_parameters") for value in (0, -1, 1.5, "1")],
    *[(("alternatives",), value, "alternative") for value in (None, 1, {}, [1], [None], [{}])],
    *[(("alternatives", 0, "label"), value, "label") for value in (None, 1)],
    *[(("alternatives", 0, "kind"), value, "kind") for value in ("magic", 1)],
    *[(("alternatives", 0, "error"), value, "error") for value in (NAN, -1, "1", HUGE)],
    *[(("alternatives", 0, "num_bands"), value, "num_bands") for value in (0, 1.5, "4")],
    *[(("alternatives", 0, "scheme"), value, "scheme") for value in ({}, 1, [])],
    (("alternatives", 0, "scheme", "kind"), "magic", "kind of a scheme"),
    (("alternatives", 0, "scheme", "num_vectors"), -1, "num_vectors"),
    (("alternatives", 0, "scheme", "draws_per_step"), NAN, "draws_per_step"),
    (("alternatives", 0, "scheme", "lookahead"), 0, "lookahead"),
    (("alternatives", 0, "extra"), 0, "'extra'"),
    (("extra",), 0, "'extra'"),
    (("format",), 2, "format"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "words"), BAD)
def test_a_wrong_field_is_named(path, value, words):
    unread(edited("fixed", (path, value)), words)


@pytest.mark.parametrize("name", ["fixed", "dense", "balls-in-bins"])
def test_every_field_is_needed(name):
    """All but those that follow from the others and are for readers only."""
    whole = data_of(name)

    def paths(at, so_far=()):
        if isinstance(at, dict):
            for key, value in at.items():
                yield (*so_far, key)
                yield from paths(value, (*so_far, key))

    for path in paths(whole):
        if path[0] in ("error", "efficiency", "scheme"):
            continue
        data = copy.deepcopy(whole)
        at = data
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]
        unread(json.dumps(data), path[-1])


@pytest.mark.parametrize(
    "strategy",
    [[], [[1.0]], "x", None, [[1.0] * 18] * 18, [[0.0] * 18] * 18, [[1.0]] * 18, [[NAN] * 18] * 18],
)
def test_a_strategy_that_is_no_lower_triangular_matrix_is_refused(strategy):
    unread(edited("dense", ((C, "mechanism", "strategy"), strategy)), "strategy")


def test_a_dense_strategy_beyond_floats_is_refused():
    for value in (1e-320, 1e200):
        rows = np.diag([value] * 18).tolist()
        unread(edited("dense", ((C, "mechanism", "strategy"), rows)), "range of floats")


def test_the_parameters_of_a_sampling_have_types(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Twice(type(cn.samplings.FIXED)):
        name = "twice"
        times: int = 2

    monkeypatch.setitem(cn.samplings.sampling._KNOWN, "twice", Twice())
    assert Plan.from_json(edited("fixed", ((C, "sampling"), {"name": "twice", "times": 3})))
    for value in ("3", 3.0, None, True):
        text = edited("fixed", ((C, "sampling"), {"name": "twice", "times": value}))
        unread(text, "times of sampling='twice'")


def test_what_is_read_directly_is_validated_too():
    for read in (
        cn.Calibration.from_dict,
        Mechanism.from_dict,
        cn.Workload.from_dict,
        cn.Participation.from_dict,
        cn.mechanisms.Optimization.from_dict,
        cn.planning.Alternative.from_dict,
        cn.algebra.rational.Rational.from_dict,
    ):
        for data in ({}, [], None, 1, "x", {"num_steps": 1, "x": 2}):
            with pytest.raises(ValueError, match="must"):
                read(data)


def test_a_calibration_made_by_hand_is_validated():
    c = honest("fixed").calibration
    for change in (
        {"noise_multiplier": NAN}, {"noise_multiplier": 0.0}, {"epsilon": -1.0}, {"delta": 0.0},
        {"kind": "magic"}, {"kind": "certified"}, {"failure_probability": 0.1},
        {"participation": cn.Participation(19, 6, 3)}, {"epsilon_without_sampling": -1.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must"):
            dataclasses.replace(c, **change)


# Prices

CERTIFIED = "balls-in-bins"
BOUND = [((C, "kind"), "bound"), ((C, "failure_probability"), 0.0), ((C, "estimate"), None)]


def scaled(name, path, factor):
    data = data_of(name)
    value = data
    for step in path:
        value = value[step]
    return path, value * factor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("field", "factor"),
    [
        ("noise_multiplier", 1e-300),
        ("noise_multiplier", 1e-3),
        ("noise_multiplier", 0.5),
        ("noise_multiplier", 1 - 1e-4),
        ("epsilon", 0.0),
        ("epsilon", 2.5e-4),
        ("epsilon", 0.5),
        ("epsilon", 1 - 1e-3),
        ("delta", 1e-300),
        ("delta", 0.5),
    ],
)
def test_a_plan_that_states_too_little_is_refused(name, field, factor):
    forget()
    assert refused(edited(name, scaled(name, (C, field), factor)))


def test_the_line_says_what_the_noise_gives_and_what_to_do():
    for name in ("fixed", "balls-in-bins", "poisson"):
        line = refused(edited(name, ((C, "noise_multiplier"), 0.001)))
        assert "noise_multiplier=0.001 gives at delta=0.001, or more, got 4" in line
        assert "corrnoise.plan" in line


def test_another_mechanism_at_the_old_noise_is_refused():
    coef = data_of("fixed")[C]["mechanism"]["noising"]["numerator"][0]
    path = (C, "mechanism", "noising", "numerator")
    for name in ("fixed", "balls-in-bins"):
        refused(edited(name, (path, [[0.5 * x for x in coef]])))  # C is twice as large
    refused(edited("fixed", ((C, "mechanism", "noising", "numerator"), [[1.0, -0.999]])))
    # More noise than needed is private, but its ε is not exact, and a certificate is for its noise.
    more = Plan.from_json(edited("fixed", (path, [[2.0 * x for x in coef]])))
    if more.calibration.kind == "exact":
        with pytest.raises(ValueError, match="kind must be 'bound'"):
            more.verified()
    refused(edited("balls-in-bins", (path, [[2.0 * x for x in coef]])))


def test_fewer_participations_at_the_old_noise_are_refused():
    """The sampling itself refuses them where it must; fixed batches are for any k."""
    unread(edited("balls-in-bins", ((C, "max_participations"), 2)), "every bin is used 3 times")
    less = Plan.from_json(edited("fixed", ((C, "max_participations"), 1), ((C, "kind"), "bound")))
    less.verified()  # true as it stands: an example that takes part once is more private
    with pytest.raises(ValueError, match="max_participations must be at least 3"):
        private(PrivacyEngine(key=KEY), plan=less)


def test_a_kind_that_claims_more_is_refused():
    data = data_of(CERTIFIED)
    estimate = (C, "estimate")
    assert data[C]["estimate"]["seed"] == 0
    refused(edited(CERTIFIED, *BOUND), "epsilon must be what|kind must be 'certified'")
    exact = [((C, "kind"), "exact"), *BOUND[1:]]
    refused(edited(CERTIFIED, *exact), "epsilon must be what|kind must be 'certified'")
    unread(edited(CERTIFIED, (estimate, None)), "estimate must be given if and only if")
    refused(edited("poisson", ((C, "kind"), "exact")), "kind must be 'bound'")
    # A sensitivity that is only bounded: negative coefficients in C.
    part = cn.Participation(18, 2, 3)
    noising = cn.algebra.rational.Rational.of([[1.0, 0.9, 0.5, -0.4]])
    m = cn.mechanisms.ToeplitzMechanism("mine", cn.workloads.prefix_sum(18), noising).in_float32()
    assert not m.sensitivity(part).exact
    c = cn.calibrate(m, part, epsilon=4, delta=1e-3)
    assert c.kind == "bound"
    Plan(60, 30, c).verified()
    with pytest.raises(ValueError, match="kind must be 'bound' here, got 'exact'"):
        Plan(60, 30, dataclasses.replace(c, kind="exact")).verified()
    # A larger ε than the noise needs is a bound.
    e = honest("fixed").calibration
    assert e.kind in ("exact", "bound")
    d = cn.calibrate(
        cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(18)), cn.Participation(18, 6, 3),
        epsilon=4, delta=1e-3,
    )  # fmt: skip
    assert d.kind == "exact"
    with pytest.raises(ValueError, match="kind must be 'bound' here, got 'exact': at epsilon=5"):
        Plan(60, 10, dataclasses.replace(d, epsilon=5.0)).verified()
    Plan(60, 10, dataclasses.replace(d, epsilon=5.0, kind="bound")).verified()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("seed", 1, "estimate must be what its seed=1 gives"),
        ("seed", None, "seed must be recorded"),
        ("seed", 10**30, "estimate must be what its seed"),
        ("seed", -1, "seed must be"),
        ("seed", "0", "seed must be"),
        ("attempt", 0, "failure_probability|estimate"),
        ("attempt", 5, "estimate must be|failure_probability"),
        ("attempt", -1, "attempt must be"),
        ("attempt", 10**6, "attempt must be"),
        ("samples", 1000, "estimate must be what|epsilon must be what"),
        ("samples", 999, "samples must be"),
        ("samples", 10**12, "samples must be"),
        ("mean", 0.0, "estimate must be what"),
        ("mean", NAN, "mean must be"),
        ("mean", -1.0, "mean must be"),
        ("standard_error", 0.0, "estimate must be what"),
        ("standard_error", -1.0, "standard_error must be"),
        ("largest", 0.0, "estimate must be what"),
        ("largest", INF, "largest must be"),
        ("direction", "add", "estimate must be what"),
        ("direction", "both", "direction must be"),
        # Twice as much for each certified finalist: the number depends on how many there were.
        (
            "failure_probability",
            0.5,
            r"failure_probability must be at least the certificate's [1-9]",
        ),
        ("failure_probability", 1e-300, "epsilon must be what|estimate must be"),
        ("failure_probability", 0.0, "failure_probability of the estimate"),
        ("extra", 1, "'extra'"),
    ],
)
def test_a_certificate_that_its_draws_do_not_give_is_refused(field, value, words):
    forget()
    text = edited(CERTIFIED, ((C, "estimate", field), value))
    if (field, value) == ("attempt", 0):
        # The same draws: without a search they would have half the failure probability.
        Plan.from_json(text).verified()
    else:
        refused(text, words)


def test_a_smaller_failure_probability_is_refused():
    # The certificates of a planner share it, and the plan states their sum.
    several = {"mechanisms": ["blt"], "memory": 4, "samples": 2000, "sampling": "balls-in-bins"}
    plan = cn.plan(num_examples=600, batch_size=50, epochs=4, epsilon=3, delta=1e-6, **several)
    c = plan.calibration
    assert c.estimate.whole_failure_probability * 3 == pytest.approx(c.failure_probability)
    # As if all three that are allowed had been drawn.
    rivals = [dataclasses.replace(a, kind="certified") for a in plan.alternatives[:3]]
    plan = dataclasses.replace(plan, alternatives=tuple(rivals), choice=None)
    plan.verified()
    less = dataclasses.replace(c, failure_probability=c.failure_probability / 3)
    with pytest.raises(ValueError, match="failure_probability must be at least the certificate's"):
        dataclasses.replace(plan, calibration=less).verified()
    # One certificate was drawn of three that may be: it has a third of the failure probability.
    own = Plan.from_json(edited(CERTIFIED)).calibration.estimate.whole_failure_probability
    for factor in (1e-3, 0.5, 1 - 1e-6):
        text = edited(CERTIFIED, ((C, "failure_probability"), own * factor))
        refused(text, "failure_probability must be at least the certificate's 3.33333e-10")


def test_a_smaller_epsilon_without_sampling_is_refused():
    path = (C, "epsilon_without_sampling")
    for factor in (0.0, 0.5, 0.99):
        refused(edited(CERTIFIED, scaled(CERTIFIED, path, factor)), "epsilon_without_sampling must")
    Plan.from_json(edited(CERTIFIED, scaled(CERTIFIED, path, 1.1))).verified()
    Plan.from_json(edited(CERTIFIED, (path, None))).verified()
    refused(edited("fixed", (path, 1.0)), "epsilon_without_sampling must be at least 4")


def test_a_sampling_that_does_not_fit_the_mechanism_is_refused():
    for name in ("fixed", "dense"):
        for sampling in ("poisson", "cyclic-poisson"):
            unread(edited(name, ((C, "sampling"), sampling)), f"sampling='{sampling}' cannot be")
    # One that fits needs its own price.
    refused(edited("poisson", ((C, "sampling"), "fixed")), "epsilon must be")
    refused(edited("balls-in-bins", *BOUND, ((C, "sampling"), "fixed")), "epsilon must be")
    refused(
        edited("fixed", ((C, "sampling"), "balls-in-bins"), ((C, "kind"), "exact")), "kind must"
    )


# Bit flips, and edits of any field


@pytest.mark.parametrize("name", ["fixed", "balls-in-bins"])
def test_flipped_bits_give_a_true_plan_or_one_line(name):
    text = honest(name).to_json().encode()
    draw = random.Random(150)
    counts = {"refused": 0, "true": 0}
    for _ in range(150):
        flipped = bytearray(text)
        flipped[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
        plan = outcome(lambda: bytes(flipped).decode())  # noqa: B023
        counts["true" if plan else "refused"] += 1
        if plan:
            check_claim(plan, name)
    assert min(counts.values()) > 0  # labels and the like change nothing


def leaves(at, so_far=()):
    if isinstance(at, dict):
        items = at.items()
    elif isinstance(at, list) and so_far[-1] != "alternatives":
        items = enumerate(at)
    else:
        items = ()
    for key, value in items:
        yield (*so_far, key)
        yield from leaves(value, (*so_far, key))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 20)
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["exact", "bound", "certified", "fixed", "balls-in-bins", "poisson"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@given(st.sampled_from(["fixed", "balls-in-bins"]), st.data(), st.integers(1, 2))
@settings(max_examples=300)
def test_edited_fields_give_a_true_plan_or_one_line(name, data, count):
    paths = list(leaves(data_of(name)))
    path = st.sampled_from([p for p in paths if p[0] == C]) | st.sampled_from(paths)
    changes = [(data.draw(path), data.draw(anything)) for _ in range(count)]
    try:
        text = edited(name, *changes)
    except (TypeError, KeyError, IndexError):
        return  # the second path was inside the first one
    if plan := outcome(lambda: text):
        check_claim(plan, name)


@given(st.floats(-300, 300), st.floats(-300, 300), st.sampled_from(["fixed", "balls-in-bins"]))
@example(0.0, 3.0, "fixed")
@settings(max_examples=150)
def test_edited_noise_and_epsilon_give_a_true_plan_or_one_line(noise, epsilon, name):
    changes = ((C, "noise_multiplier"), 10.0**noise), ((C, "epsilon"), 10.0**epsilon)
    if plan := outcome(lambda: edited(name, *changes)):
        check_claim(plan, name)


# Trust


def test_a_plan_of_this_process_needs_no_draws(monkeypatch):
    def drawn(*_, **__):
        raise AssertionError("draws were taken")

    c = cn.calibrate(
        cn.mechanisms.bisr(cn.workloads.prefix_sum(18), num_bands=2), cn.Participation(18, 6, 3),
        epsilon=2, delta=1e-4, sampling="balls-in-bins", samples=20_000,
    )  # fmt: skip
    plan = Plan(60, 10, c)
    monkeypatch.setattr(certificates.balls_in_bins, "estimates", drawn)
    plan.verified()
    forget()
    plan.verified()  # it was verified before
    with pytest.raises(AssertionError, match="draws were taken"):
        Plan.from_json(plan.to_json()).verified()


def test_a_changed_copy_is_not_trusted():
    plan = honest(CERTIFIED)
    plan.verified()
    for change in ({"noise_multiplier": 0.5}, {"epsilon": 1.0}, {"delta": 1e-9}):
        changed = dataclasses.replace(plan.calibration, **change)
        with pytest.raises(ValueError, match=r"epsilon must be|estimate must be"):
            dataclasses.replace(plan, calibration=changed).verified()
    text = plan.to_json()
    trusted = Plan.from_json(edited(CERTIFIED, ((C, "noise_multiplier"), 0.5)))
    trust(trusted)
    trusted.verified()  # ``trust`` is by identity, and is not written down
    assert Plan.from_json(text) == plan
    with pytest.raises(ValueError, match="epsilon must be"):
        Plan.from_json(trusted.to_json()).verified()


def test_an_estimate_says_how_to_repeat_it():
    found = honest(CERTIFIED).calibration.estimate
    draws = Draws.repeating(found, 1e-3, None)
    assert (draws.samples, draws.seed, draws.attempt) == (10_000, 0, found.attempt)
    with pytest.raises(ValueError, match="seed must be recorded"):
        Draws.repeating(Estimate(0.1, 0.01, 1e-9, 1000, 1.0), 1e-3, None)


# The engine


@pytest.mark.parametrize("name", ["fixed", "balls-in-bins"])
@pytest.mark.parametrize(
    "change",
    [("noise_multiplier", 0.001), ("epsilon", 0.001), ("delta", 1e-12)],
    ids=lambda change: change[0],
)
def test_the_engine_refuses_before_a_step_is_taken(name, change, tmp_path):
    field, value = change
    plan = Plan.from_json(edited(name, ((C, field), value)))
    engine = PrivacyEngine(key=tmp_path / "key", ledger=tmp_path / "ledger")
    with pytest.raises(ValueError, match="epsilon must be what noise_multiplier") as caught:
        private(engine, plan=plan)
    assert "\n" not in str(caught.value)
    assert engine.steps_taken == 0
    assert list(tmp_path.iterdir()) == []  # neither key nor ledger was begun


@pytest.mark.parametrize("name", ["fixed", "balls-in-bins"])
def test_an_honest_plan_of_a_file_trains(name):
    forget()
    plan = Plan.from_json(honest(name).to_json())
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(engine, plan=plan)
    train(net, optimizer, batches, steps=18)
    assert engine.plan == honest(name)
    assert engine.get_epsilon(1e-3) == 4.0
    assert engine.steps_taken == 18


class Ranks(Processes):
    """Two processes without a network: the first one's answer is given."""

    def __init__(self, rank, first):
        super().__init__(rank, 2)
        object.__setattr__(self, "first", first)

    def agree(self, make):
        return make() if self.rank == 0 else self.first


def test_only_the_first_process_verifies_and_the_others_have_the_same_plan(monkeypatch):
    from training import loader

    text = honest("fixed").to_json()
    check_plan(Plan.from_json(text), loader(), None, Ranks(0, None))
    monkeypatch.setattr("corrnoise.planning.verification.verify", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check_plan(Plan.from_json(text), loader(), None, Ranks(0, None))
    check_plan(Plan.from_json(text), loader(), None, Ranks(1, text))
    other = Plan.from_json(edited("fixed", ((C, "noise_multiplier"), 0.001)))
    with pytest.raises(ValueError, match="the same in every process"):
        check_plan(other, loader(), None, Ranks(1, text))
