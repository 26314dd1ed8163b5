import json

import pages
from hypothesis import given
from hypothesis import strategies as st

from corrnoise._rounding import rounded_up
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
