"""The record of a run is read as it was written, or refused in one line."""

import json
import random

import pages
import pytest

from corrnoise.records import Record, Run, Statement


@pytest.fixture(scope="module")
def run():
    plan = pages.fixed()
    records = (Record(4, 1.5, 0.7, 0.8, 0.5), Record(8, None, float("nan"), None, None))
    settings = {"learning_rate": 0.1, "seed": 0}
    return Run("mine", plan, Statement.of(plan, clip_norm=1.0), records, {}, {}, settings, 1.25)


def test_a_run_is_equal_after_json(run):
    again = Run.from_json(run.to_json())
    assert repr(again) == repr(run)  # a NaN is not equal to itself
    assert again.to_json() == run.to_json()
    assert Run.from_dict(run.to_dict()).statement == run.statement


def test_a_damaged_file_is_refused_or_says_the_same(run):
    """ε with one other digit would pass for that of a run."""
    whole, dice, read = run.to_json().encode(), random.Random(0), 0
    for _ in range(600):
        data = bytearray(whole)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        try:
            found = Run.from_json(bytes(data).decode())
        except ValueError as refused:
            assert "\n" not in str(refused)  # noqa: PT017
        else:
            read += 1
            assert repr(found) == repr(run)
    assert read < 30
    for size in range(0, len(whole), 97):
        with pytest.raises(ValueError, match="a run must be JSON"):
            Run.from_json(whole[:size].decode())


def test_another_epsilon_is_refused(run):
    text = run.to_json()
    changed = text.replace('"epsilon": 4', '"epsilon": 3')
    assert changed != text
    with pytest.raises(ValueError, match="does not fit its sha256"):
        Run.from_json(changed)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("label",), 1, "label of a run must be a string"),
        (("plan",), None, "plan must be"),
        (("statement",), [], "a statement must be a JSON object"),
        (("statement", "epsilon"), "4", "epsilon of a statement must be a number"),
        (("statement", "steps_taken"), 4.5, "steps_taken of a statement must be an integer"),
        (("statement", "clip_norm"), "1", "clip_norm of a statement must be a number or null"),
        (("statement", "sensitivity_exact"), 1, "sensitivity_exact of a statement must be true"),
        (("statement", "versions"), {"a": 1}, "versions of a statement must be an object of str"),
        (("statement", "kind"), "magic", "kind of a statement must be one of"),
        (("statement", "extra"), 1, "statement must have no field 'extra'"),
        (("records",), {}, "records must be a list"),
        (("records", 0), 3, "record must be a JSON object"),
        (("records", 0, "step"), True, "step of a record must be an integer"),
        (("records", 0, "extra"), 1, "record must have no field 'extra'"),
        (("data",), None, "data of a run must be a JSON object"),
        (("settings",), [1], "settings of a run must be a JSON object"),
        (("seconds",), -1, "seconds of a run"),
        (("extra",), 1, "run must have no field 'extra'"),
    ],
)
def test_a_wrong_field_is_named(run, path, value, words):
    data = json.loads(run.to_json())
    del data["sha256"]
    at = data
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with pytest.raises(ValueError, match=words) as caught:
        Run.from_dict(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["run", "statement", "record"])
def test_every_field_is_needed(run, what):
    def part(data):
        return {"run": data, "statement": data["statement"], "record": data["records"][0]}[what]

    for name in list(part(run.to_dict())):
        if name in ("truncation", "num_parameters", "exact_release"):
            continue
        data = json.loads(json.dumps(run.to_dict()))
        del part(data)[name]
        with pytest.raises(ValueError, match=name):
            Run.from_dict(data)
