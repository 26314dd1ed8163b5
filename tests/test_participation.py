import pytest

from corrnoise import Participation


@pytest.mark.parametrize(
    ("n", "b", "k"), [(1, 1, 1), (10, 3, 4), (10, 3, 1), (980, 98, 10), (7, 7, 1), (5, 1, 5)]
)
def test_valid(n, b, k):
    participation = Participation(n, b, k)
    pattern = participation.pattern
    assert len(pattern) == k
    assert pattern[-1] < n
    assert Participation.from_dict(participation.to_dict()) == participation


@pytest.mark.parametrize(
    ("n", "b", "k", "message"),
    [
        (0, 1, 1, "num_steps must be at least 1, got 0"),
        (10, 0, 1, r"min_sep must be in \[1, 10\], got 0"),
        (10, 11, 1, r"min_sep must be in \[1, 10\], got 11"),
        (10, 3, 0, r"max_participations must be in \[1, 4\], got 0"),
        (10, 3, 5, "got 5; num_steps=10 has room for 4 participations 3 steps apart"),
        (10.0, 3, 1, "num_steps must be an integer"),
        (float("nan"), 3, 1, "num_steps must be an integer"),
    ],
)
def test_bad_input(n, b, k, message):
    with pytest.raises(ValueError, match=message):
        Participation(n, b, k)
