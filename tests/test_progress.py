"""The progress bar, its parts, and silence where nobody looks."""

import io
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrnoise import _progress

CLEARED = re.compile(r"\r {45,}\r")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(_progress, "sys", SimpleNamespace(stderr=stream, modules={}))
    return stream


def cleared(stream):
    """Whether the last thing that a bar did was to cover all of it with spaces."""
    *_, last, covered, end = stream.getvalue().split("\r")
    return covered.isspace() and len(covered) == len(last) and not end


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    found = Clock()
    monkeypatch.setattr(_progress, "time", found)
    return found


@pytest.fixture
def impatient(monkeypatch):
    """A bar is shown at once."""
    monkeypatch.setattr(_progress, "_PATIENCE", 0.0)


def test_silence_where_nobody_looks(impatient, monkeypatch):
    stream = io.StringIO()
    system = SimpleNamespace(stderr=stream, modules={})
    monkeypatch.setattr(_progress, "sys", system)
    for seen in (False, True):
        with _progress.Bar("planning") as bar:
            bar(1, 2)
            bar(2, 2)
        assert bool(stream.getvalue()) is seen
        system.modules["ipykernel"] = None  # a notebook


def test_a_bar_is_shown_when_the_work_takes_long(terminal, clock):
    with _progress.Bar("planning") as bar:
        bar(1, 4)
        clock.now += 0.9
        bar(1, 4)
        assert terminal.getvalue() == ""
        clock.now += 1.2
        bar(2, 4)
        shown = terminal.getvalue()
        assert shown.startswith("\rplanning ")
        assert shown.endswith(" 50 % 2 s")
        assert shown.count("█") == shown.count("·") == 20
        bar(3, 4)
        assert " 75 %" in terminal.getvalue()
    assert cleared(terminal)


def test_a_short_task_shows_nothing(terminal, clock):
    with _progress.Bar() as bar:
        for done in range(5):
            bar(done, 4)
    assert terminal.getvalue() == ""


def test_a_finished_bar_is_cleared_once(impatient, terminal):
    with _progress.Bar() as bar:
        bar(1, 2)
        bar(2, 2)
        assert " 50 %" in terminal.getvalue()
        assert cleared(terminal)
    assert len(CLEARED.findall(terminal.getvalue())) == 1


def test_a_bar_is_cleared_when_the_work_fails(impatient, terminal):
    def fail():
        with _progress.Bar() as bar:
            bar(1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert " 50 %" in terminal.getvalue()
    assert cleared(terminal)


@given(st.integers(0, 50), st.integers(0, 50))
def test_a_bar_has_one_width(done, total):
    stream = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_progress, "sys", SimpleNamespace(stderr=stream, modules={}))
        patch.setattr(_progress, "_PATIENCE", 0.0)
        done = min(done, total)
        _progress.Bar()(done, total)
    (line,) = re.findall(r"\r([█·]*) +(\d+) % 0 s", stream.getvalue())
    assert len(line[0]) == 40
    assert 0 <= int(line[1]) <= 100


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), max_size=8), st.data())
def test_shares_never_go_back_and_end_at_the_whole(parts, data):
    seen = []
    total = sum(units for units, _ in parts)
    share = _progress.Share(lambda *pair: seen.append(pair), total)
    for units, steps in parts:
        if data.draw(st.booleans()):  # with progress of its own
            inner = share.part(units)
            for done in range(1, data.draw(st.integers(0, steps)) + 1):
                inner(done, steps)
        share.advance(units)
    share.finish()
    assert [whole for _, whole in seen] == [total] * len(seen)
    shown = [done for done, _ in seen]
    assert shown == sorted(shown)
    assert shown[-1] == total
    assert max(shown) <= total


def test_a_share_that_is_not_needed_is_finished_all_the_same():
    seen = []
    share = _progress.Share(lambda *pair: seen.append(pair), 10)
    share.advance(3)
    share.finish()
    assert seen == [(3, 10), (10, 10)]
    silent = _progress.Share(None, 10)
    silent.advance(3)
    silent.part(4)(1, 2)
    silent.finish()


def test_what_the_argument_stands_for():
    assert _progress.resolve(None) is None
    assert _progress.resolve(False) is None
    assert isinstance(_progress.resolve(True), _progress.Bar)
    assert _progress.resolve(print) is print


def test_tracked_items_are_counted_when_they_are_done():
    seen = []
    for item in _progress.tracked("abc", lambda *pair: seen.append(pair)):
        assert len(seen) == "abc".index(item)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert list(_progress.tracked("abc", None)) == ["a", "b", "c"]
