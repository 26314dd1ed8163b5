"""JAX needs Python 3.11: where it is not installed, its tests are left out, and this is said."""

import importlib.util

import pytest

MISSING = importlib.util.find_spec("jax") is None
REASON = "jax is not installed"
collect_ignore_glob = ["src/corrnoise/jax/*", "tests/test_jax_*.py"] if MISSING else []


def pytest_collection_modifyitems(items):
    """Skip the cases of JAX's pages and public names."""
    for item in items if MISSING else ():
        case = getattr(item, "callspec", None)
        if case is not None and any("jax" in str(value) for value in case.params.values()):
            item.add_marker(pytest.mark.skip(reason=REASON))


def pytest_terminal_summary(terminalreporter):
    """Say what did not run."""
    if MISSING:
        terminalreporter.write_line(f"JAX tests did not run: {REASON}; it needs Python 3.11")
