"""What must hold for every small run: any workload, family, size, budget, key and table."""

import dataclasses
import itertools
import json
import math
from decimal import Decimal

import mpmath
import numpy as np
import oracles
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import corrnoise as cn
from corrnoise import _rounding, _tables
from corrnoise.accounting import Estimate, gaussian
from corrnoise.mechanisms import DenseMechanism, Mechanism, ToeplitzMechanism
from corrnoise.noise import CorrelatedNoise, Key, Scheme
from corrnoise.planning import Alternative, Plan
from corrnoise.samplings import Calibration

# The dense optimum takes seconds beyond this.
LARGEST_DENSE = 10
SAMPLINGS, FAMILIES = cn.samplings.names(), cn.mechanisms.names()

rates = st.one_of(st.sampled_from([0.0, 0.9, 0.999, 1.0]), st.floats(0.0, 1.0))
epsilons = st.floats(0.05, 20.0)
deltas = st.floats(-12.0, -1.0).map(lambda power: 10.0**power)
keys = st.binary(min_size=32, max_size=32).filter(any).map(Key.from_bytes)


@st.composite
def participations(draw, largest=64):
    n = draw(st.integers(1, largest))
    b = draw(st.integers(1, n))
    return cn.Participation(n, b, draw(st.integers(1, -(-n // b))))


@st.composite
def runs(draw, families=FAMILIES):
    """A mechanism of a random family and size, and its participation."""
    family = cn.mechanisms.get(draw(st.sampled_from(families)))
    part = draw(participations(LARGEST_DENSE if family.name == "dense" else 64))
    workload = cn.workloads.sgd(part.num_steps, momentum=draw(rates), decay=draw(rates))
    size = None
    if family.size == "num_buffers":
        size = draw(st.integers(1, min(3, part.num_steps)))
    elif family.size == "num_bands":
        most = part.min_sep if family.name == "dense" else part.num_steps
        size = draw(st.integers(1, min(8, most)))
    return family.build(workload, part, size), part


# Prices of fixed batches.


@given(runs(), epsilons, deltas)
def test_calibrated_noise_is_enough_and_a_millionth_less_is_not(run, epsilon, delta):
    mechanism, part = run
    c = cn.calibrate(mechanism, part, epsilon=epsilon, delta=delta)
    sens = mechanism.sensitivity(part)
    assert c.exact == sens.exact
    with mpmath.workdps(60):
        target, mu = mpmath.mpf(delta), mpmath.mpf(sens.value) / mpmath.mpf(c.noise_multiplier)
        assert oracles.gaussian_delta(epsilon, mu, 60) <= target
        if c.exact:
            less = mpmath.mpf(sens.lower) / (mpmath.mpf(c.noise_multiplier) * (1 - 1e-6))
            assert oracles.gaussian_delta(epsilon, less, 60) > target


@given(runs(), epsilons, deltas)
def test_account_inverts_calibrate_both_ways(run, epsilon, delta):
    mechanism, part = run
    c = cn.calibrate(mechanism, part, epsilon=epsilon, delta=delta)
    by_delta = cn.account(mechanism, part, noise_multiplier=c.noise_multiplier, delta=delta)
    by_epsilon = cn.account(mechanism, part, noise_multiplier=c.noise_multiplier, epsilon=epsilon)
    assert by_delta.epsilon == pytest.approx(epsilon, rel=1e-8)
    assert by_delta.epsilon <= epsilon * (1 + 1e-10)
    assert by_epsilon.delta == pytest.approx(delta, rel=1e-8)
    assert by_epsilon.delta <= delta * (1 + 1e-10)
    assert by_delta.kind == by_epsilon.kind == c.kind


@given(runs(), epsilons, epsilons, deltas, deltas)
def test_a_larger_budget_never_needs_more_noise(run, epsilon, other, delta, other_delta):
    mechanism, part = run
    (low, high), (small, large) = sorted([epsilon, other]), sorted([delta, other_delta])

    def noise(epsilon, delta):
        return cn.calibrate(mechanism, part, epsilon=epsilon, delta=delta).noise_multiplier

    most = noise(low, small)
    for less in (noise(high, small), noise(low, large), noise(high, large)):
        assert less <= most * (1 + 1e-11)  # the rounding toward privacy is 1e-12


@given(runs(), epsilons, deltas)
def test_more_steps_never_spend_less_and_never_more_than_the_whole(run, epsilon, delta):
    mechanism, part = run
    c = cn.calibrate(mechanism, part, epsilon=epsilon, delta=delta)
    steps = sorted({0, 1, *range(0, part.num_steps, 7), part.min_sep, part.num_steps})
    spent = [c.spent(step) for step in steps]
    assert spent[0] == 0.0
    assert spent[-1] == epsilon
    assert max(spent) <= epsilon
    for earlier, later in itertools.pairwise(spent):
        assert later >= earlier * (1 - 1e-9)


# Mechanisms.


@given(runs())
def test_a_mechanism_comes_back_from_json_to_the_last_bit(run):
    mechanism, part = run
    for each in (mechanism, mechanism.in_float32()):
        again = Mechanism.from_json(each.to_json())
        assert again == each
        assert type(again) is type(each)
        assert isinstance(each, DenseMechanism if each.name == "dense" else ToeplitzMechanism)
        assert hash(again) == hash(each)
        assert again.fingerprint == each.fingerprint
        assert again.sensitivity(part) == each.sensitivity(part)
        assert again.to_json() == each.to_json()


@given(runs())
def test_other_coefficients_have_another_fingerprint(run):
    mechanism, _ = run
    data = mechanism.to_dict()
    if isinstance(mechanism, DenseMechanism):
        data["strategy"][0][0] *= 1 + 1e-15
    else:
        factors = data["noising"]["numerator"] or data["noising"]["denominator"]
        assume(factors)
        factors[0][0] *= 1 + 1e-15
    other = Mechanism.from_dict(json.loads(json.dumps(data)))
    assert other != mechanism
    assert other.fingerprint != mechanism.fingerprint


@given(runs(), epsilons, deltas)
def test_what_runs_is_priced_and_rounding_it_again_changes_nothing(run, epsilon, delta):
    mechanism, part = run
    runs_as = mechanism.in_float32()
    assert runs_as.in_float32() == runs_as
    assert runs_as.in_float32().fingerprint == runs_as.fingerprint
    assert CorrelatedNoise(mechanism, Key.from_bytes(bytes(range(32)))).mechanism == runs_as
    bands = [(m.strategy_bands, m.noising_bands) for m in (mechanism, runs_as)]
    # An entry of a dense C may be 0 in float32.
    assert bands[0] == bands[1] or (mechanism.name == "dense" and bands[0] > bands[1])
    sens = runs_as.sensitivity(part).value
    assert sens == pytest.approx(mechanism.sensitivity(part).value, rel=1e-4)
    c = cn.calibrate(runs_as, part, epsilon=epsilon, delta=delta)
    assert c.noise_multiplier == gaussian.noise_multiplier(epsilon, delta, sens)


def test_a_plan_prices_the_mechanism_that_runs():
    plan = real_plan()
    assert plan.mechanism.in_float32() == plan.mechanism
    sens = plan.mechanism.sensitivity(plan.participation).value
    assert plan.noise_multiplier == gaussian.noise_multiplier(plan.epsilon, plan.delta, sens)


# Plans.

labels = st.text(max_size=20)
positive = st.floats(1e-6, 1e6)
schemes = st.builds(
    Scheme,
    st.sampled_from(["regenerate", "lookahead", "ring", "recursion"]),
    st.integers(0, 100),
    positive,
    st.integers(1, 8),
)
alternatives = st.builds(
    Alternative,
    labels,
    st.sampled_from(FAMILIES),
    st.none() | st.integers(1, 1000),
    st.sampled_from(cn.samplings.names()),
    st.none() | positive,
    st.none() | positive,
    st.none() | st.sampled_from(["exact", "bound", "certified", "estimate"]),
    st.none() | schemes,
    st.none() | positive,
    labels,
)
estimates = st.builds(
    Estimate, st.floats(0, 1), st.floats(0, 1), st.just(1e-9), st.integers(1000, 10**6), positive
)


@st.composite
def calibrations(draw):
    """Of any valid sampling; the numbers need not be those of an accountant."""
    mechanism, part = draw(runs(families=("dp_sgd", "bsr", "bisr", "dense")))
    kind = draw(st.sampled_from(["exact", "bound", "certified"]))
    certified = kind == "certified"
    valid = [name for name, why in cn.samplings.objections(mechanism, part).items() if not why]
    return Calibration(
        mechanism,
        part,
        cn.samplings.get(draw(st.sampled_from(valid))),
        draw(positive),
        draw(epsilons),
        draw(deltas),
        kind,
        1e-9 if certified else 0.0,
        draw(epsilons) if certified else None,
        draw(estimates) if certified else None,
    )


@st.composite
def plans(draw):
    considered = tuple(draw(st.lists(alternatives, max_size=4)))
    num_examples = draw(st.integers(1, 10**6))
    return Plan(
        num_examples=num_examples,
        batch_size=draw(st.integers(1, num_examples)),
        calibration=draw(calibrations()),
        lower_bound=draw(st.none() | positive),
        alternatives=considered,
        choice=draw(st.none() | st.integers(0, len(considered) - 1)) if considered else None,
        num_parameters=draw(st.none() | st.integers(1, 10**9)),
        memory=draw(st.integers(0, 100) | positive),
        rounds=draw(st.sampled_from([8, 12, 20])),
    )


def real_plan(**changes):
    setting = {"num_examples": 90, "batch_size": 10, "epochs": 2, "epsilon": 2.0, "delta": 1e-6}
    return cn.plan(**setting | {"sampling": "fixed", "momentum": 0.5} | changes)


def check_round_trip(plan):
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert again.mechanism.fingerprint == plan.mechanism.fingerprint
    assert again.sampling == plan.sampling
    assert again.chosen == plan.chosen
    assert str(again) == str(plan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.batch_size = 1


@given(plans())
def test_a_plan_comes_back_from_json_to_the_last_bit(plan):
    check_round_trip(plan)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mechanisms": ["dense"], "memory": None},
        {"sampling": "balls-in-bins", "mechanisms": ["dp_sgd", "bisr"], "samples": 2000},
    ],
    ids=["fixed", "dense", "certified"],
)
def test_a_plan_of_the_planner_comes_back_too(changes):
    check_round_trip(real_plan(**changes))


@given(plans(), st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just([1]))
@settings(max_examples=20)
def test_a_plan_of_another_format_is_refused_in_one_line(plan, version):
    assume(version != 1 or version is True)
    data = json.loads(plan.to_json())
    data["format"] = version
    for given_data in (data, {k: v for k, v in data.items() if k != "format"}):
        with pytest.raises(ValueError, match="the format of a plan must be 1") as caught:
            Plan.from_json(json.dumps(given_data))
        assert "\n" not in str(caught.value)
        assert cn.__version__ in str(caught.value)


def test_a_plan_without_one_of_its_fields_is_refused():
    whole = json.loads(real_plan().to_json())
    only_read = {"error", "efficiency", "scheme"}
    for name in whole.keys() - only_read:
        with pytest.raises((ValueError, KeyError), match=name):
            Plan.from_dict({k: v for k, v in whole.items() if k != name})
    for name in only_read:
        assert Plan.from_dict({k: v for k, v in whole.items() if k != name}).to_dict() == whole
    for name in whole["calibration"]:
        less = {k: v for k, v in whole["calibration"].items() if k != name}
        with pytest.raises((ValueError, KeyError), match=name):
            Plan.from_dict(whole | {"calibration": less})


# Numbers and tables for people.


@given(st.floats(1e-300, 1e300), st.integers(1, 11))
def test_a_quoted_number_is_not_below_and_at_most_one_unit_above(value, digits):
    for given_value in (value, np.float64(value)):
        shown, exact = Decimal(_rounding.rounded_up(given_value, digits)), Decimal(value)
        assert shown >= exact * (1 - Decimal("1e-12"))
        assert shown - exact <= Decimal(10) ** (exact.adjusted() + 1 - digits)
        assert len(shown.normalize().as_tuple().digits) <= digits


printable = st.characters(exclude_categories=("C", "Z"))
cells = st.text(st.just(" ") | printable, max_size=12)


@given(st.data(), st.integers(1, 5), st.integers(0, 6))
def test_columns_align_for_any_cells(data, columns, rows):
    row = st.lists(cells, min_size=columns, max_size=columns)
    names, body = data.draw(row), data.draw(st.lists(row, min_size=rows, max_size=rows))
    left = data.draw(st.sets(st.integers(0, columns - 1)))
    lines = _tables.text(names, body, left=tuple(left)).split("\n")
    assert len(lines) == rows + 2
    widths = [max(map(len, column)) for column in zip(names, *body, strict=True)]
    starts = [sum(widths[:i]) + 2 * i for i in range(columns)]
    rule = ["-" * width for width in widths]
    for line, expected in zip(lines, [names, rule, *body], strict=True):
        assert line == line.rstrip()
        line = line.ljust(starts[-1] + widths[-1])
        for i, (start, width, cell) in enumerate(zip(starts, widths, expected, strict=True)):
            aligned = cell.ljust(width) if i in left else cell.rjust(width)
            assert line[start : start + width] == aligned
            assert line[start + width : start + width + 2].strip() == ""


# Samplings.


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_sampling_comes_back_from_json(name):
    sampling = cn.samplings.get(name)
    again = cn.samplings.get(json.loads(json.dumps(sampling.to_json())))
    assert again == sampling
    assert type(again) is type(sampling)
    assert str(again) == again.name == name
    assert cn.samplings.get(sampling) is sampling


@st.composite
def drawn(draw, sampling):
    """A valid run of a sampling: the size of its dataset, participation, mechanism and key."""
    part = draw(participations(40))
    n, b = part.num_steps, part.min_sep
    part = cn.Participation(n, b, -(-n // b))
    bands = draw(st.integers(1, min(b, 6))) if sampling == "cyclic-poisson" else 1
    mechanism = cn.mechanisms.bsr(cn.workloads.prefix_sum(n), num_bands=bands)
    assert not cn.samplings.get(sampling).objection(mechanism, part)
    least = b if sampling == "fixed" else 1
    return draw(st.integers(least, least + 60)), part, mechanism, draw(keys)


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("name", SAMPLINGS)
@given(data=st.data())
@settings(max_examples=25)
def test_batches_keep_to_the_participation(name, shuffled, data):
    size, part, mechanism, key = data.draw(drawn(name))
    batches = cn.samplings.get(name).batches(size, part, mechanism, key, shuffled=shuffled)
    steps_of = [[] for _ in range(size)]
    for step in range(part.num_steps):
        batch = batches.indices(step)
        assert batch.dtype == np.int64
        assert len(set(batch.tolist())) == batch.size
        assert ((batch >= 0) & (batch < size)).all()
        assert np.array_equal(batches.indices(step), batch)
        for example in batch.tolist():
            steps_of[example].append(step)
    if name in ("fixed", "balls-in-bins"):
        k, b = part.max_participations, part.min_sep
        for steps in steps_of:
            assert len(steps) <= k
            assert all(later - earlier >= b for earlier, later in itertools.pairwise(steps))
        assert sum(map(len, steps_of[:1])) >= part.num_steps // b
    if name == "cyclic-poisson":  # one example's columns of C never overlap
        for steps in steps_of:
            apart = np.diff(steps)
            assert (apart % mechanism.strategy_bands == 0).all()


def test_fixed_batches_that_break_the_participation_are_refused():
    part = cn.Participation(num_steps=12, min_sep=3, max_participations=2)
    mechanism = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(12))
    with pytest.raises(ValueError, match="max_participations must be at least 4 for fixed batches"):
        cn.samplings.FIXED.batches(30, part, mechanism, Key.generate())


@pytest.mark.parametrize("name", [s for s in SAMPLINGS if cn.samplings.get(s).secret])
@given(data=st.data())
@settings(max_examples=25)
def test_removing_the_last_example_leaves_the_others_where_they_were(name, data):
    size, part, mechanism, key = data.draw(drawn(name))
    sampling = cn.samplings.get(name)
    with_it = sampling.batches(size + 1, part, mechanism, key)
    without = sampling.batches(size, part, mechanism, key)
    for step in range(part.num_steps):
        batch = with_it.indices(step)
        assert batch[batch != size].tolist() == without.indices(step).tolist()


def test_only_fixed_batches_need_no_secret():
    assert [s for s in SAMPLINGS if not cn.samplings.get(s).secret] == ["fixed"]
    assert math.isclose(cn.samplings.FIXED.rate(cn.Participation(12, 3, 4)), 1 / 3)
