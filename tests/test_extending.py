"""docs/extending.md adds a family and a sampling, one file each; both then work everywhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import corrnoise as cn
from corrnoise import report
from corrnoise.apps.cli import main
from corrnoise.mechanisms import registry as families
from corrnoise.samplings import sampling as samplings

ROOT = Path(__file__).parents[1]
FILE = re.compile(r'^```python title="(\w+\.py)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FILES = dict(FILE.findall((ROOT / "docs" / "extending.md").read_text(encoding="utf-8")))
BUDGET = {"epsilon": 4.0, "delta": 1e-3}


@pytest.fixture
def extended(tmp_path, monkeypatch):
    """The two files of the page, imported; the registries are restored afterwards."""
    for module in (families, samplings):
        monkeypatch.setattr(module, "_KNOWN", dict(module._KNOWN))
    found = {}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name[:-3], tmp_path / name)
        found[name[:-3]] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name[:-3], found[name[:-3]])
        spec.loader.exec_module(found[name[:-3]])
    return found


def test_the_page_has_one_short_file_for_each():
    assert set(FILES) == {"two_band.py", "lottery.py"}
    for text in FILES.values():
        code = [line for line in text.splitlines() if line.strip()]
        assert len(code) <= 45


def test_nothing_in_the_project_names_them():
    found = subprocess.run(
        ["git", "grep", "-lE", "two_band\\b|lottery", "--", "src", "papers", "benchmarks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stderr  # 1: searched, and found nothing
    # ``two_band_rmse`` and ``two_band_bound`` are the paper's lemma.
    assert found.stdout == ""


def test_calibrate_and_account_invert_each_other(extended):
    part = cn.Participation(48, 12, 4)
    m = extended["two_band"].two_band(cn.workloads.sgd(48, momentum=0.9))
    found = cn.calibrate(m, part, sampling="lottery", **BUDGET)
    assert found.kind == "bound"
    assert found.noise_multiplier < cn.calibrate(m, part, **BUDGET).noise_multiplier
    again = cn.account(
        m, part, noise_multiplier=found.noise_multiplier, delta=1e-3, sampling="lottery"
    )
    assert 4.0 * (1 - 1e-4) <= again.epsilon <= 4.0 * (1 + 1e-5)
    spent = [found.spent(steps) for steps in range(0, 49, 6)]
    assert spent == sorted(spent)
    assert (spent[0], spent[-1]) == (0.0, 4.0)


def test_plan_chooses_from_the_family_and_comes_back_from_json(extended):
    plan = cn.plan(
        num_examples=120, batch_size=10, epochs=4, sampling="lottery", momentum=0.9, **BUDGET
    )
    assert "two_band" in {a.label for a in plan.alternatives}
    other = cn.plan(
        num_examples=120,
        batch_size=10,
        epochs=4,
        sampling=extended["lottery"].Lottery(percent=25),
        mechanisms=["two_band"],
        **BUDGET,
    )
    back = cn.Plan.from_json(other.to_json())
    assert back == other
    assert (back.mechanism.name, back.sampling.percent) == ("two_band", 25)
    assert (back.expected_batch, back.divisor) == (2.5, 2)


def test_the_engine_trains_with_both_and_says_so(extended, tmp_path):
    from training import KEY, loader, private, train

    from corrnoise.torch import PrivacyEngine

    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(
        engine,
        target_epsilon=4.0,
        target_delta=1e-3,
        epochs=3,
        mechanism="two_band",
        sampling="lottery",
        data_loader=loader(),
    )
    seen = [len(part) for part in batches.batch_sampler]
    assert 0 < sum(seen) < 60  # about half of the 60 examples were drawn
    train(net, optimizer, batches, steps=18)
    statement = engine.statement()
    assert "a lottery drawn once" in statement.to_text()
    assert "two_band(" in statement.mechanism
    assert statement.epsilon == engine.get_epsilon(1e-3) == 4.0
    page = report.write(tmp_path / "report.html", engine.plan).read_text(encoding="utf-8")
    assert "Two-Band" in page
    assert "a lottery drawn once" in page
    assert report.read(tmp_path / "report.html") == engine.plan


def test_the_command_line_knows_both(extended, capsys):
    run = "--num-examples 120 --batch-size 10 --epochs 4"
    assert main(f"compare {run} --values 2,4 --mechanism two_band --mechanism bisr".split()) == 0
    assert "two_band" in capsys.readouterr().out
    budget = "--epsilon 4 --delta 1e-3 --sampling lottery"
    assert main(f"account --mechanism two_band {run} {budget}".split()) == 0
    assert "lottery" in capsys.readouterr().out
    assert main(f"plan {run} {budget} --mechanism two_band --json".split()) == 0
    assert '"lottery"' in capsys.readouterr().out
    assert main(["plan", "--help"]) == 0
    assert "two_band" in capsys.readouterr().out
