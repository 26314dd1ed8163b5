import os
import sys
from pathlib import Path

import pytest

# The tests run one worker per core; threads on top would only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent))

try:
    from hypothesis import settings
except ImportError:  # the GPU tests have no properties, and run where Hypothesis is not installed
    pass
else:
    # Deterministic: a failure is a failure for everyone.
    settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
    settings.load_profile("repeatable")


@pytest.fixture
def all_digits(monkeypatch):
    """Sums that can be compared in all digits: clip factors count no additions at their worst."""
    from corrnoise.torch.clipping.parts import Norms

    monkeypatch.setattr(Norms, "lost", property(lambda self: self.rounding.factors))
    monkeypatch.setattr(Norms, "missed", 2.0**-23)


def pytest_terminal_summary(terminalreporter):
    """Say in the last lines what did not run for want of a browser or a GPU."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for what, sign in (
        ("browser tests", "chromium and chromedriver are not installed"),
        ("browser tests", "selenium is not installed"),
        ("GPU tests", "CUDA"),
    ):
        count = sum(sign in reason for reason in reasons)
        if count:
            terminalreporter.write_line(f"{what} did not run: {count} skipped ({sign})")
