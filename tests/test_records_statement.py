import dataclasses
import json
import math

import pages
from hypothesis import given
from hypothesis import strategies as st

from corrnoise._rounding import rounded_up
from corrnoise.noise import truncation
from corrnoise.records import Statement


@given(st.floats(1e-12, 1e6), st.integers(2, 6))
def test_what_is_quoted_is_never_less_than_what_holds(value: float, digits: int):
    shown = float(rounded_up(value, digits))
    assert shown >= value * (1 - 1e-12)
    assert shown <= value * (1 + 1.001 * 10.0 ** (1 - digits))


def test_a_rounding_error_does_not_cost_a_digit():
    assert rounded_up(9.000000000000002) == "9"
    assert rounded_up(9.00001) == "9.0001"


def test_a_plan_promises_what_a_run_of_it_would():
    plan = pages.fixed()
    text = Statement.of(plan).to_text()
    assert text.startswith("Training by this plan is (4, 1e-05)-differentially private.")
    assert "none released yet" in text
    assert "left to the run" in text
    run = Statement.of(plan, clip_norm=1.5)
    assert run.to_text().startswith("This training is (4, 1e-05)-differentially private.")
    assert "115 of 115 released" in run.to_text()


def test_it_comes_back_from_json():
    for statement in (Statement.of(pages.fixed()), Statement.of(pages.fixed(), clip_norm=1.5)):
        assert Statement.from_dict(json.loads(statement.to_json())) == statement


def test_the_text_has_every_row_and_caveat():
    statement = Statement.of(pages.fixed(), clip_norm=1.5)
    text = statement.to_text()
    for name, value in statement.rows():
        assert any(line.split() == f"{name} {value}".split() for line in text.splitlines())
    assert " ".join(statement.caveats.split()) in " ".join(text.split())


def test_what_lies_beyond_the_normals_is_named_or_added():
    plan = pages.fixed()
    small = Statement.of(plan, clip_norm=1.5, num_parameters=10**8)
    tau = truncation(plan.num_steps, 10**8)
    assert small.truncation is not None
    assert (1 + math.exp(4)) * tau <= small.truncation <= (1 + math.exp(4)) * tau * (1 + 1e-12)
    assert small.truncation < 1e-3 * small.delta
    assert small.delta == 1e-5
    row = dict(small.rows())["Normals"]
    assert row.startswith("untruncated to 12 standard deviations; what lies beyond adds at most ")
    assert row.endswith(" to δ")
    assert float(row.split()[-3]) >= small.truncation
    assert "untruncated" not in small.caveats
    assert Statement.from_dict(json.loads(small.to_json())) == small
    large = Statement.of(plan, clip_norm=1.5, num_parameters=10**8, delta=1e-17)
    assert large.truncation == small.truncation
    assert large.delta >= 1e-17 + small.truncation
    assert "which includes it" in dict(large.rows())["Normals"]
    assert float(large.headline.split(", ")[1].split(")")[0]) >= large.delta


def test_it_uses_the_larger_epsilon_and_does_not_overflow():
    plan = pages.fixed()
    early = Statement.of(plan, clip_norm=1.5, num_parameters=10**8, epsilon=0.1, steps_taken=1)
    assert early.truncation == Statement.of(plan, num_parameters=10**8).truncation
    vast = Statement.of(plan, clip_norm=1.5, num_parameters=10**8, epsilon=1e6)
    assert vast.truncation == vast.delta == 1.0


def test_unknown_normals_are_an_assumption():
    statement = Statement.of(pages.fixed(), clip_norm=1.5)
    assert statement.truncation is None
    assert "Normals" not in dict(statement.rows())
    assert "untruncated normals" in statement.caveats
    before = {
        k: v for k, v in statement.to_dict().items() if k not in ("truncation", "num_parameters")
    }
    assert Statement.from_dict(before) == statement  # a file from before these fields


def test_it_says_of_participation_what_the_sampling_does():
    fixed = dict(Statement.of(pages.fixed(), clip_norm=1.0).rows())
    assert fixed["Participation"] == "at most 5 times (k), at least 23 steps (b) apart"
    assert fixed["Sensitivity of C"].endswith(("exact", "upper bound"))
    plan = pages.poisson()
    statement = Statement.of(plan, clip_norm=1.0)
    rows = dict(statement.rows())
    assert rows["Participation"] == "in each step with probability 1/6 (1/b), any number of times"
    assert "Sensitivity of C" not in rows  # ε does not follow from it
    assert "at most 3 times" not in statement.to_text()
    assert plan.participation.max_participations == 3


def test_the_source_of_the_noise_is_that_of_the_plan():
    for rounds in (8, 20):
        plan = dataclasses.replace(pages.fixed(), rounds=rounds)
        assert Statement.of(plan).noise_source == f"ChaCha{rounds} keystream, Box-Muller"
        exact = Statement.of(plan, exact_release=True).noise_source
        assert exact == f"ChaCha{rounds} keystream, real normals by Box-Muller, rounded once"
