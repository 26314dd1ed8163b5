"""Every file carries a format, and a reader refuses every other one in one clear line."""

import json

import numpy as np
import pages
import pytest

import corrnoise as cn
from corrnoise import _formats
from corrnoise.noise import CorrelatedNoise, Key
from corrnoise.planning import Plan
from corrnoise.records import Ledger, Run, Statement
from corrnoise.records.ledger import _code_of, _line, read_entries

KEY = Key.from_bytes(bytes(range(32)))
HEADER = {"run_id": "a", "key_fingerprint": "f"}
OTHERS = [0, 2, -1, None, "1", 1.5, [1]]


def noise():
    workload = cn.workloads.prefix_sum(8)
    return CorrelatedNoise(cn.mechanisms.bsr(workload, num_bands=3), KEY)


def state():
    made = noise()
    made.add_([np.zeros(5, np.float32)], 0, 1.0)
    return made.state_dict()


def run():
    plan = pages.fixed()
    return Run("a", plan, Statement.of(plan, clip_norm=1.0), (), {}, {}, {}, 1.0)


WRITTEN = {
    "plan": (lambda: pages.fixed().to_dict(), Plan.from_dict),
    "run": (lambda: run().to_dict(), Run.from_dict),
    "statement": (lambda: Statement.of(pages.fixed()).to_dict(), Statement.from_dict),
    "noise state": (state, lambda data: noise().load_state_dict(data)),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_written_carries_the_format_and_is_read(kind):
    make, read = WRITTEN[kind]
    data = make()
    assert data["format"] == _formats.FORMATS[kind] == 1
    assert next(iter(data)) == "format"
    read(data)


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("kind", WRITTEN)
def test_another_format_is_refused(kind, version):
    make, read = WRITTEN[kind]
    data = make()
    without = {name: value for name, value in data.items() if name != "format"}
    for wrong in ({**data, "format": version}, without):
        with pytest.raises(ValueError, match="format") as caught:
            read(wrong)
        assert "\n" not in str(caught.value)
        assert "must" in str(caught.value)


@pytest.mark.parametrize("data", [[], "plan", 1, None])
def test_what_is_no_object_is_refused(data):
    for read in (Plan.from_dict, Run.from_dict, Statement.from_dict):
        with pytest.raises(ValueError, match=r"a \w+ must be a JSON object, got"):
            read(data)


def chained(*entries):
    """The bytes of a ledger with these entries, its codes right."""
    found, code = b"", ""
    for entry in entries:
        line = _line(entry, code, b"")
        found, code = found + line, _code_of(line)
    return found


@pytest.mark.parametrize("version", OTHERS)
def test_a_ledger_of_another_format_is_refused_and_left_alone(tmp_path, version):
    path = tmp_path / "ledger"
    ledger = Ledger(HEADER, path)
    ledger.record(0, "0000")
    ledger.close()
    header, *entries = read_entries(path)
    assert header["format"] == _formats.FORMATS["ledger"] == 1
    header["format"] = version
    path.write_bytes(chained(header, *entries))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="the format of a ledger must be 1") as caught:
        Ledger(HEADER, path)
    assert repr(version) in str(caught.value)
    assert path.read_bytes() == before


def test_a_ledger_of_the_version_before_formats_is_refused(tmp_path):
    path = tmp_path / "ledger"
    path.write_bytes(chained({"ledger_version": 1, **HEADER}, {"step": 0, "gradient": "0000"}))
    with pytest.raises(ValueError, match=r"the format of a ledger must be 1.*got None"):
        Ledger(HEADER, path)


def test_the_message_says_which_version_is_running_and_what_to_do():
    with pytest.raises(ValueError, match="got 7; read it with the version that wrote it") as caught:
        _formats.opened("plan", {"format": 7})
    assert f"corrnoise {cn.__version__}" in str(caught.value)


def test_stamped_and_opened_are_inverse():
    fields = {"a": 1, "b": [2]}
    for kind, version in _formats.FORMATS.items():
        stamped = _formats.stamped(kind, fields)
        assert stamped == {"format": version, **fields}
        assert _formats.opened(kind, json.loads(json.dumps(stamped))) == fields
    assert fields == {"a": 1, "b": [2]}
