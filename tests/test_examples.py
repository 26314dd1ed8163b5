"""The examples run as they stand, and show what they claim."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from training import loader, model, train

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["opacus_stock", "opacus_corrnoise", "without_opacus"])
def test_examples_train(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus has some of its own
        accuracy = load(name).main(epochs=2)
    assert accuracy > 0.3  # chance is 0.1


def test_only_the_import_and_two_arguments_change():
    stock, ours = ((EXAMPLES / f"opacus_{n}.py").read_text() for n in ("stock", "corrnoise"))
    changed = [
        line
        for line in difflib.ndiff(stock.splitlines(), ours.splitlines())
        if line[0] in "+-" and line[2:].strip()
    ]
    assert [re.sub(r"\s+", " ", line) for line in changed] == [
        "- from opacus import PrivacyEngine",
        "+ from corrnoise.torch import PrivacyEngine",
        '+ mechanism="bisr",',
        '+ sampling="balls-in-bins",',
    ]


def test_the_readme_shows_the_table_that_the_script_wrote():
    root = EXAMPLES.parent
    spec = importlib.util.spec_from_file_location("digits", root / "benchmarks" / "digits.py")
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    result = json.loads((root / "benchmarks" / "digits.json").read_text())
    assert digits.table(result) in (root / "README.md").read_text()
    means = {row["method"]: row["mean"] for row in result["rows"]}
    for batches in ("fixed batches", "balls-in-bins"):
        assert means[f"BISR p = 4, {batches}"] > means[f"DP-SGD, {batches}"]


def test_the_five_lines_of_the_readme_run():
    text = (EXAMPLES.parent / "README.md").read_text()
    start = text.index("    from corrnoise.torch import PrivacyEngine")
    lines = text[start : text.index("\n\nHandwritten digits")]
    net = model()
    scope = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        "data_loader": loader(),
    }
    exec(textwrap.dedent(lines), scope)
    train(scope["model"], scope["optimizer"], scope["data_loader"], steps=2)


def test_the_loop_without_opacus_is_short():
    assert len((EXAMPLES / "without_opacus.py").read_text().splitlines()) <= 48
