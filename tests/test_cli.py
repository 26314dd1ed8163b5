import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from importlib import metadata

import pytest
import typer

import corrnoise as cn
from corrnoise import planning
from corrnoise._progress import Bar
from corrnoise.apps.cli import main
from corrnoise.apps.cli.app import app

COMMANDS = {c.callback.__name__: c.callback for c in app.registered_commands}
EXAMPLES = [
    line.strip()
    for callback in COMMANDS.values()
    for line in callback.__doc__.splitlines()
    if line.strip().startswith("corrnoise ")
]
RUN = "--num-examples 600 --batch-size 50 --epochs 4 --epsilon 3 --delta 1e-6"
TRAIN = "train --data digits --batch-size 288 --mechanism bisr --num-bands 4 --sampling fixed"
BUDGET = "--epsilon 1 --delta 0.1"
HUGE = "1" + "0" * 400


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(line):
        status = main(shlex.split(line))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def process(line, **env):
    return subprocess.run(
        [sys.executable, "-m", "corrnoise", *shlex.split(line)],
        capture_output=True,
        text=True,
        env=os.environ | env,
        check=False,
    )


def on_a_terminal(line, **env):
    """What a process writes to a terminal."""
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "corrnoise", *shlex.split(line)]
    child = subprocess.Popen(
        words, stdout=follower, stderr=subprocess.DEVNULL, env=os.environ | {"TERM": "xterm"} | env
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # the child has closed its end
            break
        if not part:
            break
        seen += part
    os.close(leader)
    assert child.wait() == 0
    return seen.decode()


# Every command


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the examples of verify and audit read: plan.json, the folder run, and run.key."""
    folder = tmp_path_factory.mktemp("made")
    plan = "--epochs 2 --batch-size 360 --epsilon 8 --delta 1e-4 --mechanism bisr --sampling fixed"
    said = io.StringIO()  # the same for every test that asks for this, and not for the first alone
    with contextlib.redirect_stderr(said):
        status = main(shlex.split(f"train --data digits {plan} --out {folder / 'run'} --json"))
    assert status == 0, said.getvalue()
    found = json.loads((folder / "run" / "run.json").read_text())
    (folder / "plan.json").write_text(json.dumps(found["plan"]))
    return folder


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_in_the_help_runs(run, line, tmp_path, request, capsys):
    if line.startswith(("corrnoise verify", "corrnoise audit")):
        shutil.copytree(request.getfixturevalue("made"), tmp_path, dirs_exist_ok=True)
        capsys.readouterr()  # of a run that was made just now
    status, out, err = run(line.removeprefix("corrnoise "))
    assert (status, err) == (0, "")
    assert out.strip()
    assert "\x1b" not in out
    if "--json" in line:
        json.loads(out)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples_and_json(run, name):
    status, out, err = run(f"{name} --help")
    assert (status, err) == (0, "")
    assert f"\n    corrnoise {name} " in out
    assert "--json" in out
    assert any("--json" in line for line in EXAMPLES if line.startswith(f"corrnoise {name} "))


def test_the_commands():
    assert {"plan", "compare", "account", "bench"} <= set(COMMANDS)


def test_no_words_are_help(run):
    status, out, _ = run("")
    assert status == 0
    assert "Commands:" in out


def test_version(run):
    assert run("--version") == (0, f"corrnoise {metadata.version('corrnoise')}\n", "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nothing", "No such command"),
        ("plan", "--help"),
        ("plan --epsilon one", "--epsilon"),
        (f"plan {RUN} --seed one", "--seed must be a whole number, got 'one'; write digits alone"),
        (f"plan {RUN} --num-bands 0", "num_bands must be at least 1, got 0\n"),
        ("train --num-bands 0", "num_bands must be at least 1, got 0\n"),
        (
            "account --mechanism bisr --num-bands 0 --num-steps 9 --epsilon 1 --delta 0.1",
            "num_bands must be at least 1, got 0\n",
        ),
        (f"plan {RUN} --delta 1", "delta must be in [1e-100, 1), got 1\n"),
        (f"plan {RUN} --epsilon nan", "epsilon must be in [1e-06, 10000], got nan\n"),
        ("audit .", "plan must be a file, or a folder with run.json, got the folder . without one"),
        (f"plan {RUN} --sampling shuffled", "--sampling"),
        (f"plan {RUN} --colour red", "No such option"),
        (f"plan {RUN} --num-steps 3", "exactly one of epochs and num_steps"),
        (f"plan {RUN} --mechanism adam", "'--mechanism': mechanism must be one of dp_sgd, bsr"),
        (f"plan {RUN} --sampling shuffled", "'--sampling': sampling must be one of fixed, balls"),
        (f"plan {RUN} --memory lots", "neither a number nor 'none'"),
        (f"plan {RUN} --memory -1", "memory must be"),
        (f"plan {RUN} --save nowhere/plan.json", "make the folder first"),
        (f"plan {RUN} --save .", "make the folder first"),
        ("plan --num-examples 6 --batch-size 7 --epochs 1 --epsilon 1 --delta 0.1", "batch_size"),
        ("account --mechanism bisr --num-steps 10 --epsilon 1 --delta 0.1", "num_bands"),
        ("account --mechanism bisr --num-bands few --num-steps 9 --epsilon 1 --delta 0.1", "best"),
        ("account --mechanism dp_sgd --num-steps 10 --epsilon 1", "exactly two"),
        ("account --mechanism dp_sgd --epsilon 1 --delta 0.1", "give num-examples"),
        ("account --mechanism dp_sgd --num-steps 9 --epochs 2 --epsilon 1 --delta 0.1", "give num"),
        (
            "account --mechanism blt --num-bands 4 --num-steps 10 --epsilon 1 --delta 0.1",
            "num-bands must be left out for blt",
        ),
        (
            "account --mechanism bisr --num-bands 4 --num-buffers 4 --num-steps 10 --epsilon 1 "
            "--delta 0.1",
            "num-buffers must be left out for bisr",
        ),
        (
            "account --mechanism dp_sgd --num-steps 9 --min-sep 3 --max-participations 0 "
            "--epsilon 1 --delta 0.1",
            "max_participations must be",
        ),
        (
            "account --mechanism dp_sgd --num-examples 9 --batch-size 3 --epochs 1 --min-sep 3 "
            "--epsilon 1 --delta 0.1",
            "min-sep and max-participations follow",
        ),
        (
            "account --mechanism bisr --num-bands 2 --num-steps 9 --min-sep 3 --epsilon 1 "
            "--delta 0.1 --sampling poisson",
            "cannot be priced",
        ),
        ("compare --num-steps 10 --max-participations 11", "max-participations must be"),
        ("compare --num-steps 10 --values 2;3", "values must be integers"),
        ("compare --num-steps 10 --values 20", "num_bands must be in"),
        ("compare --num-steps 10 --plot errors.doc", "doc"),
        ("bench --num-parameters 0", "num-parameters must be"),
        ("bench --seconds -1", "seconds must be"),
        ("bench --device cuda", "cuda"),
        ("bench --mechanism adam", "mechanism must be one of"),
        ("reproduce fig-nothing", "name must be one of"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, monkeypatch, line, words):
    if "cuda" in line:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, out, err = run(line)
    assert status == 2
    assert out == ""
    assert err.startswith("corrnoise: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("line", "rule", "value", "remedy"),
    [
        ("plan --num-examples 50,000", "a whole number", "50,000", "write 50000"),
        ("plan --num-examples 5e4", "a whole number", "5e4", "write 50000"),
        ("plan --epochs 2.5", "a whole number", "2.5", "write 2 or 3"),
        ("plan --num-parameters 7B", "a whole number", "7B", "write 7000000000"),
        ("plan --num-parameters 1.5m", "a whole number", "1.5m", "write 1500000"),
        ("plan --seed 1e999999", "a whole number", "1e999999", "write digits alone, such as 50000"),
        ("plan --epsilon 9%", "a number", "9%", "write 9 or 0.09"),
        ("plan --epsilon 1,5", "a number", "1,5", "write 1.5"),
        ("plan --epsilon ''", "a number", "", "write it as 0.5 or 1e-5"),
        ("plan --delta 1/50000", "a number", "1/50000", "write 2e-05"),
        ("plan --delta 1/0", "a number", "1/0", "write it as 0.5 or 1e-5"),
        ("train --value-range 1 1/4", "a number", "1/4", "write 0.25"),
        ("audit plan.json --delta 0.1 --delta 5%", "a number", "5%", "write 5 or 0.05"),
    ],
)
def test_what_is_no_number_is_said_with_the_value_and_the_remedy(run, line, rule, value, remedy):
    name = re.findall("--[a-z-]+", line)[-1]
    assert run(line) == (2, "", f"corrnoise: {name} must be {rule}, got '{value}'; {remedy}\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plam", "No such command 'plam'. Did you mean 'plan'? Try: corrnoise --help"),
        (
            "plan --epochs 3 --delta 0.1",
            "these options must be given: --num-examples, --batch-size, --epsilon. "
            "Try: corrnoise plan --help",
        ),
        ("account --num-steps 9", "Missing option '--mechanism'. Try: corrnoise account --help"),
        ("verify", "Missing argument 'folder'. Try: corrnoise verify --help"),
    ],
)
def test_all_missing_options_are_named_at_once(run, line, said):
    assert run(line) == (2, "", f"corrnoise: {said}\n")


def test_what_is_unexpected_is_not_swallowed(run, monkeypatch):
    def broken(**_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(planning, "plan", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        run(f"plan {RUN}")


def test_a_missing_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = run("compare --num-steps 8 --values 2 --plot x.png")
    assert status == 2
    assert err == (
        "corrnoise: matplotlib is needed and not installed: "
        "in a clone of corrnoise, pip install '.[plots]'\n"
    )
    monkeypatch.setitem(sys.modules, "numpy.nonsense", None)
    monkeypatch.setattr(planning, "plan", lambda **_: __import__("numpy.nonsense"))
    with pytest.raises(ModuleNotFoundError):
        run(f"plan {RUN}")


@pytest.mark.parametrize(
    ("module", "line", "extra"),
    [
        ("sklearn.datasets", "train --data digits", "demo"),
        ("matplotlib", "reproduce fig-convergence --smoke", "plots"),
    ],
)
def test_every_missing_library_is_one_line_with_its_extra(run, monkeypatch, module, line, extra):
    monkeypatch.setitem(sys.modules, module, None)
    status, out, err = run(line)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"pip install '.[{extra}]'" in err


def test_new_families_and_samplings_need_no_change_here(run, monkeypatch):
    family = dataclasses.replace(cn.mechanisms.get("bisr"), name="mine", label="Mine")
    monkeypatch.setitem(cn.mechanisms.registry._KNOWN, "mine", family)
    sampling = type("Mine", (type(cn.samplings.FIXED),), {"name": "my-batches"})()
    monkeypatch.setitem(cn.samplings.sampling._KNOWN, "my-batches", sampling)
    for command in ("plan", "account", "train"):
        words = "".join(run(f"{command} --help")[1].split())
        assert "blt,dense,mine." in words
        assert "cyclic-poisson,my-batches." in words
    status, out, _ = run(f"plan {RUN} --mechanism mine --num-bands 4 --sampling my-batches")
    assert status == 0
    assert "mine p=4 (chosen)" in out
    assert "my-batches: 48 steps" in out
    line = "account --mechanism mine --num-bands 4 --num-steps 40 --sampling my-batches"
    assert run(f"{line} --epsilon 2 --delta 1e-5")[0] == 0
    data = json.loads(run("compare --num-steps 16 --values 2,4 --json")[1])
    assert data["rmse"]["mine"] == data["rmse"]["bisr"]


def test_numbers_to_copy_are_rounded_up(run):
    line = "account --mechanism dp_sgd --num-steps 40 --min-sep 10"
    for given in ("--epsilon 2 --delta 1e-5", "--noise-multiplier 2 --delta 1e-5"):
        exact = json.loads(run(f"{line} {given} --json")[1])
        rows = run(f"{line} {given}")[1].splitlines()
        shown = dict(re.split("  +", row, maxsplit=1) for row in rows)
        for name in ("epsilon", "delta", "noise multiplier"):
            value = exact[name.replace(" ", "_")]
            assert value * (1 - 1e-12) <= float(shown[name]) <= value * (1 + 1e-5)


def test_a_file_that_is_no_plan_is_refused(run, tmp_path):
    texts = (b"{}", b'{"format": 1}', b"[]", b"null", b"no JSON", b"", b"[" * 100_000, b"1" * 5000)
    for text in (*texts, bytes(range(256))):
        (tmp_path / "plan.json").write_bytes(text)
        status, out, err = run("train --data digits --plan plan.json")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "plan must be a file that `corrnoise plan --save` wrote" in err
    for path, words in ((".", "Is a directory"), ("nowhere", "No such file")):
        status, out, err = run(f"train --data digits --plan {path}")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_an_edited_plan_is_refused_before_the_data_is_loaded(run, tmp_path, monkeypatch):
    plan = cn.plan(
        num_examples=1437, batch_size=288, epochs=1, epsilon=3, delta=1e-4, sampling="fixed",
        mechanisms=["bisr"],
    )  # fmt: skip
    monkeypatch.setattr("corrnoise.apps.datasets.load", lambda *_, **__: 1 / 0)
    for field, value in (("noise_multiplier", 0.001), ("epsilon", 0.001), ("kind", "magic")):
        data = plan.to_dict()
        data["calibration"][field] = value
        (tmp_path / "plan.json").write_text(json.dumps(data))
        status, out, err = run("train --data digits --plan plan.json")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert field in err


# Hostile values


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *[
            (f"{TRAIN} --epochs 1 --device {device}", "device must be")
            for device in ("tpu", "meta", "cuda", "cuda:99", "cpu:-1", "xla", "mps", "''", "'a b'")
        ],
        *[
            (f"{TRAIN} --epochs 1 --{name} {value}", name.replace("-", "_"))
            for name in ("learning-rate", "clip-norm")
            for value in ("1e308", "1e38", "1e-320", "nan", "inf", "-1", "0")
        ],
        (f"{TRAIN} --epochs 1 --seed {HUGE}", "seed must be in"),
        (f"{TRAIN} --epochs 1 --seed -1", "seed must be in"),
        (f"{TRAIN} --epochs 100000000", "num_steps must be at most 10,000,000"),
        (f"{TRAIN} --epochs {HUGE}", "num_steps must be at most 10,000,000"),
        (f"{TRAIN} --epochs 1 --epsilon 1e308", "epsilon must be in"),
        (f"{TRAIN} --epochs 1 --delta 1e-308", "delta must be in"),
        *[
            (f"plan --num-examples 600 --batch-size 50 --epsilon 3 --delta 1e-6 {more}", words)
            for more, words in (
                ("--epochs 100000000", "num_steps must be at most 10,000,000"),
                (f"--epochs {HUGE}", "num_steps must be at most 10,000,000"),
                ("--num-steps 1000000000000", "num_steps must be at most 10,000,000"),
                (f"--num-steps {HUGE}", "num_steps must be at most 10,000,000"),
                ("--epochs 4 --sampling fixed --momentum 1e308", "momentum must be"),
                ("--epochs 4 --failure-probability 1e308", "failure_probability must be"),
                ("--epochs 4 --samples 1000000000", "samples must be in"),
                (f"--epochs 4 --samples {HUGE}", "samples must be in"),
                ("--epochs 4 --seed -1", "seed must be"),
                ("--epochs 4 --memory nan", "memory must be"),
                (f"--epochs 4 --num-bands {HUGE}", "num_bands must be in"),
            )
        ],
        *[
            (f"plan --num-examples 600 --batch-size 50 --epochs 4 {more}", words)
            for more, words in (
                ("--epsilon 1e308 --delta 1e-6", "epsilon must be in"),
                ("--epsilon 1e7 --delta 1e-6 --sampling poisson", "epsilon must be in"),
                ("--epsilon nan --delta 1e-6", "epsilon must be"),
                ("--epsilon 1 --delta 1e-320", "delta must be in"),
                ("--epsilon 1 --delta inf", "delta must be"),
            )
        ],
        (f"plan --num-examples {HUGE} --batch-size 1 --epochs 1 {BUDGET}", "num_steps must be at"),
        (f"plan --num-examples 1000000000 --batch-size 1 --epochs 1 {BUDGET}", "num_steps must be"),
        (f"account --mechanism dp_sgd --num-steps {HUGE} {BUDGET}", "num_steps must be at most"),
        (f"account --mechanism dp_sgd --num-steps 20000000 {BUDGET}", "num_steps must be at most"),
        (f"account --mechanism dp_sgd --num-steps 9 --min-sep {HUGE} {BUDGET}", "min_sep must be"),
        (f"account --mechanism bisr --num-bands {HUGE} --num-steps 9 {BUDGET}", "num_bands must"),
        (f"account --mechanism blt --num-buffers {HUGE} --num-steps 9 {BUDGET}", "num_buffers"),
        (f"account --mechanism dense --num-steps 1000000 {BUDGET}", "num_steps must be in"),
        *[
            (
                f"account --mechanism dp_sgd --num-steps 9 --delta 0.1 --noise-multiplier {noise} "
                f"--sampling {sampling}",
                "noise_multiplier must be",
            )
            for noise in ("1e308", "1e-308", "nan", "0", "-1")
            for sampling in ("fixed", "poisson", "balls-in-bins")
        ],
        ("bench --num-parameters 1000000000000", "num-parameters must be in"),
        (f"bench --num-parameters {HUGE}", "num-parameters must be in"),
        ("bench --seconds 1e308", "seconds must be in"),
        ("bench --seconds nan", "seconds must be"),
        (f"bench --num-steps {HUGE} --max-participations 1", "num_steps must be at most"),
        (f"compare --num-steps {HUGE}", "num_steps must be at most"),
        (f"compare --against steps --values 4,{HUGE}", "num_steps must be at most"),
        (f"compare --num-steps 48 --values {'9' * 5000}", "values must be integers"),
        ("compare --num-steps 48 --values ''", "values must be integers"),
    ],
    ids=lambda value: value.replace(HUGE, "HUGE")[:100],
)
def test_hostile_values_are_one_line_at_once(run, monkeypatch, line, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    start = time.monotonic()
    status, out, err = run(line)
    assert time.monotonic() - start < 30  # on a busy machine; imports take most of it
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("corrnoise: ")
    assert len(err) < 500
    assert words in err


def test_a_want_of_memory_or_disk_is_one_line(run, monkeypatch):
    for error, words in (
        (MemoryError("Unable to allocate 187. GiB"), "not enough memory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OverflowError("the coefficients of C grow beyond float64"), "the coefficients of C grow"),
    ):

        def failing(error=error, **_):
            raise error

        monkeypatch.setattr(planning, "plan", failing)
        status, out, err = run(f"plan {RUN}")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_a_command_needs_typer(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "corrnoise.apps.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    status, _, err = run("--help")
    assert (status, err.count("\n")) == (2, 1)
    assert "pip install '.[cli]'" in err


@pytest.mark.parametrize(
    ("line", "public"),
    [
        ("plan --num-examples 600 --batch-size 50 --epochs 4 --epsilon 3", True),
        ("account --num-examples 600 --batch-size 50 --epochs 4 --epsilon 3", True),
        ("account --num-steps 48 --min-sep 12 --epsilon 3", False),  # n is not known
    ],
)
def test_a_delta_that_is_too_large_for_the_data_is_warned_of(run, line, public):
    line += " --mechanism dp_sgd --sampling fixed"
    warned = "corrnoise: warning: delta=0.01 is not below 1/600, one over the number of examples"
    status, out, err = run(f"{line} --delta 0.01")
    assert status == 0
    assert out
    assert err.startswith(warned) is public
    assert err.count("\n") == public
    assert run(f"{line} --delta 0.001")[2] == ""


# plan


def test_plan_prints_what_from_json_reads(run, tmp_path):
    """The CIFAR-10 command of the manual, with fewer draws."""
    line = (
        "plan --num-examples 50000 --batch-size 512 --epochs 10 --epsilon 9 --delta 1e-5 "
        "--momentum 0.9 --decay 0.9999 --sampling balls-in-bins --json --samples 20000 "
        "--mechanism bisr --mechanism band_inv_mf --num-bands 4 --save plan.json"
    )
    status, out, err = run(line)
    assert (status, err) == (0, "")
    plan = cn.Plan.from_json(out)
    assert plan.participation == cn.Participation(980, 98, 10)
    assert plan == cn.plan(
        num_examples=50_000,
        batch_size=512,
        epochs=10,
        epsilon=9,
        delta=1e-5,
        momentum=0.9,
        decay=0.9999,
        sampling="balls-in-bins",
        samples=20_000,
        mechanisms=["bisr", "band_inv_mf"],
        num_bands=4,
    )
    assert cn.Plan.from_json((tmp_path / "plan.json").read_text()) == plan
    assert json.loads(out)["error"] == plan.error


def test_plan_shows_its_alternatives(run):
    _, out, _ = run(f"plan {RUN} --sampling poisson --memory none")
    assert "C correlates the noise of different steps" in out
    assert "(3, 1e-06)-DP, bound" in out


# account


def test_account_goes_all_three_ways(run):
    where = "account --mechanism bsr --num-bands 4 --num-steps 48 --min-sep 12 --json"
    noise = json.loads(run(f"{where} --epsilon 2 --delta 1e-5")[1])["noise_multiplier"]
    epsilon = json.loads(run(f"{where} --noise-multiplier {noise} --delta 1e-5")[1])["epsilon"]
    delta = json.loads(run(f"{where} --noise-multiplier {noise} --epsilon 2")[1])["delta"]
    assert epsilon == pytest.approx(2, rel=1e-9)
    assert delta == pytest.approx(1e-5, rel=1e-9)


def test_account_prices_what_runs(run):
    line = "account --mechanism bisr --num-bands best --num-steps 48 --min-sep 12 --momentum 0.5"
    data = json.loads(run(f"{line} --epsilon 2 --delta 1e-5 --json")[1])
    error = data.pop("error")
    found = cn.Calibration.from_dict(data)
    assert error == found.error
    noise = cn.noise.CorrelatedNoise(found.mechanism)
    assert noise.mechanism == found.mechanism
    assert found.participation == cn.Participation(48, 12, 4)


def test_account_of_a_dataset_and_of_blt(run):
    line = "account --mechanism blt --num-buffers 2 --num-examples 60 --batch-size 5 --num-steps 30"
    status, out, _ = run(f"{line} --epsilon 2 --delta 1e-5")
    assert status == 0
    assert "30 steps; each example at most 3 times (k), at least 12 steps (b) apart; fixed" in out


def test_account_says_of_participation_what_the_sampling_does(run):
    line = "account --mechanism dp_sgd --num-steps 40 --min-sep 10 --epsilon 1 --delta 1e-5"
    _, out, _ = run(f"{line} --sampling poisson")
    assert "each example in each step with probability 1/10 (1/b), any number of times" in out
    assert "apart" not in out


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("account --mechanism dense --num-steps 8 --epsilon 2 --delta 1e-5", "optimising dense"),
        ("compare --mechanism dense --num-steps 8 --values 8", "comparing"),
    ],
)
def test_the_iterations_of_a_mechanism_that_is_optimised_are_drawn(monkeypatch, line, title):
    monkeypatch.setattr("corrnoise._progress._PATIENCE", 0.0)
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(shlex.split(line)) == 0
    drawn = re.findall(f"{title} .*? (\\d+) %", screen.getvalue())
    assert drawn[0] == "0"
    assert drawn[-1] == "100"
    assert len(drawn) > 10
    assert [int(each) for each in drawn] == sorted(int(each) for each in drawn)


def test_account_says_what_is_certain(run):
    line = "account --num-steps 40 --min-sep 10 --sampling balls-in-bins --epsilon 2 --delta 1e-5"
    _, out, _ = run(f"{line} --mechanism bisr --num-bands 4 --samples 50000")
    assert "certified (failure probability 1e-09)" in out
    assert "with certainty" in out
    _, out, _ = run(f"{line} --mechanism dp_sgd")  # priced with no draws
    assert "certified" not in out


# compare


def test_compare_against_bands(run):
    line = "compare --num-steps 48 --min-sep 12 --momentum 0.5 --values 2,12 --mechanism bsr"
    data = json.loads(run(f"{line} --mechanism blt --mechanism dp_sgd --json")[1])
    part, w = cn.Participation(48, 12, 4), cn.workloads.sgd(48, momentum=0.5)
    assert data["values"] == [2, 12]
    assert data["rmse"]["bsr"] == [cn.mechanisms.bsr(w, num_bands=p).rmse(part) for p in (2, 12)]
    assert data["rmse"]["blt"] == [cn.mechanisms.blt(w, part, num_buffers=4).rmse(part)] * 2
    assert data["lower_bound"] == [cn.lower_bound(w, part)] * 2


def test_compare_against_steps(run):
    line = "compare --against steps --num-steps 40 --max-participations 4 --mechanism bisr --json"
    data = json.loads(run(f"{line} --num-bands 8")[1])
    assert data["values"] == [4, 8, 16, 32, 40]
    w, part = cn.workloads.prefix_sum(40), cn.Participation(40, 10, 4)
    assert data["rmse"]["bisr"][-1] == cn.mechanisms.bisr(w, num_bands=8).rmse(part)
    assert data["participations"][0] == {"num_steps": 4, "min_sep": 1, "max_participations": 4}


def test_compare_draws(run, tmp_path):
    line = "compare --num-steps 16 --values 2,4 --mechanism bsr --mechanism bisr --plot errors.png"
    assert run(line)[0] == 0
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


# bench


def test_bench_times_what_it_says(run):
    line = "bench --num-parameters 5000 --num-steps 24 --max-participations 2 --seconds 0.01"
    data = json.loads(run(f"{line} --device cpu --json")[1])
    rows = {row["mechanism"]: row for row in data["rows"]}
    banded = {f"{name} p=4" for name in ("bisr", "bifr", "band_inv_mf", "bsr", "band_mf")}
    assert set(rows) == {"dp_sgd", "lambda_cgd", *banded, "blt d=4"}
    assert all(row["step_seconds"] > 0 and row["build_seconds"] > 0 for row in data["rows"])
    for row in data["rows"]:
        assert row["relative"] == row["step_seconds"] / data["independent_seconds"]["cpu"]
    assert rows["bisr p=4"]["bytes_per_parameter"] == 0
    assert rows["bsr p=4"]["bytes_per_parameter"] == 12


# The terminal


def test_a_real_process():
    done = process(f"plan {RUN} --sampling fixed --json")
    assert (done.returncode, done.stderr) == (0, "")
    plan = cn.Plan.from_json(done.stdout)
    assert plan.epsilon == 3
    refused = process("plan")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.count("\n") == 1


def test_no_colours_in_a_pipe():
    for line in ("compare --num-steps 8 --values 2", "plan --help", "nothing"):
        done = process(line, FORCE_COLOR="1", GITHUB_ACTIONS="true")
        assert "\x1b" not in done.stdout + done.stderr


def test_the_chosen_row_is_bold_on_a_terminal_unless_told_not_to():
    line = f"plan {RUN} --sampling fixed --mechanism bisr --num-bands 4"
    (bold,) = re.findall("\x1b\\[1m(.*?)\x1b\\[0m", on_a_terminal(line, NO_COLOR=""))
    assert bold.startswith("bisr p=4 (chosen) ")
    assert "\x1b" not in on_a_terminal(line, NO_COLOR="1")


@pytest.mark.parametrize("width", [60, 100])
def test_long_lines_are_folded_on_a_terminal_alone(width):
    line = f"plan {RUN} --sampling fixed --mechanism blt --mechanism bisr --num-bands 4"
    shown = on_a_terminal(line, NO_COLOR="1", COLUMNS=str(width)).splitlines()
    head = shown[: shown.index("")]
    assert all(len(each) <= width and each[11] == " " for each in head)
    whole = process(line, COLUMNS=str(width)).stdout.splitlines()
    assert len(head) > whole.index("")
    assert " ".join(" ".join(head).split()) == " ".join(" ".join(whole[: whole.index("")]).split())
    assert max(map(len, shown)) <= width < max(map(len, whole))
    if width == 100:  # there is room for the table and its reasons in two lines
        assert any(each.startswith(" " * 50) for each in shown)


@pytest.mark.parametrize("width", [60, 80])
def test_columns_without_room_are_below_their_row(width):
    line = "compare --num-steps 64 --max-participations 4 --values 2,8"
    shown = on_a_terminal(line, NO_COLOR="1", COLUMNS=str(width)).splitlines()
    head = next(i for i, each in enumerate(shown) if each.startswith("bands"))
    whole = process(line, COLUMNS=str(width)).stdout.splitlines()
    assert max(map(len, shown)) <= width < max(map(len, whole))
    assert len(shown[head:]) == 2 * len(whole)
    for i, row in enumerate(whole):
        above, below = shown[head + 2 * i : head + 2 * i + 2]
        assert above.split() + below.split() == row.split()
        assert below.startswith("    ")


def test_a_bar_is_no_longer_than_the_terminal(monkeypatch):
    for width in (10, 40, 200):
        screen = _Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("COLUMNS", str(width))
        Bar("training", at_once=True)(1, 2)
        assert len(screen.getvalue()) <= max(width, len("training   50 % 0 s") + 1)
        assert ("█" in screen.getvalue()) == (width >= 40)


def test_completion_knows_the_choices():
    for words, expected in (
        ("corrnoise ", "account"),
        ("corrnoise account --sampling ", "balls-in-bins"),
        ("corrnoise compare --mechanism ", "band_inv_mf"),
    ):
        done = process(
            "",
            _CORRNOISE_COMPLETE="complete_bash",
            COMP_WORDS=words,
            COMP_CWORD=str(len(words.split())),
        )
        assert expected in done.stdout


def test_help_needs_nothing_heavy():
    code = (
        "import sys; from corrnoise.apps.cli import main; status = main(['--help']); "
        "print([m for m in ('scipy', 'torch', 'matplotlib', 'dp_accounting') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_drawn_on_a_terminal_after_a_second(monkeypatch):
    for patience, drawn in ((0.0, True), (60.0, False)):
        screen = _Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr("corrnoise._progress._PATIENCE", patience)
        with Bar("working") as show:
            show(1, 3)
            show(3, 3)
        assert ("working" in screen.getvalue()) == drawn


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_bar_is_drawn_at_once_on_a_terminal(monkeypatch, command):
    def asked(**options):
        assert ("planning" in sys.stderr.getvalue()) is drawn
        raise ValueError("enough")

    monkeypatch.setattr(planning, "plan", asked)
    line = f"plan {RUN}" if command == "plan" else f"{FEW} --delta 1e-4"
    for screen, more, drawn in (
        (_Terminal(), [], True),
        (_Terminal(), ["--json"], False),
        (io.StringIO(), [], False),
    ):
        monkeypatch.setattr(sys, "stderr", screen)
        assert main([*shlex.split(line), *more]) == 2
        assert screen.getvalue().endswith("corrnoise: enough\n")
        assert bool(re.search("\r +\rcorrnoise", screen.getvalue())) is drawn


def test_the_base_of_usage_errors_is_what_we_take_it_for():
    from corrnoise.apps.cli.app import _USAGE_ERROR

    assert _USAGE_ERROR.__name__ == "UsageError"
    assert issubclass(typer.BadParameter, _USAGE_ERROR)


def test_a_comparison_follows_the_plan_of_the_file(tmp_path, capsys):
    plan = cn.plan(
        num_examples=1437, batch_size=288, epochs=1, epsilon=8, delta=1e-4, momentum=0.5,
        sampling="fixed", mechanisms=["bisr"],
    )  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    words = ["train", "--data", "digits", "--plan", str(path), "--compare", "--json"]
    assert main(words) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["label"] for run in runs] == ["bisr", "dp_sgd-poisson"]
    for run in runs:
        assert cn.Plan.from_dict(run["plan"]).mechanism.workload.momentum == 0.5
    assert main([*words, "--key", str(tmp_path / "key")]) == 2
    assert "each of the runs has its own" in capsys.readouterr().err


# train


def test_options_that_a_plan_decides_are_refused_by_name(run, tmp_path, monkeypatch):
    monkeypatch.setattr("corrnoise.apps.datasets.load", lambda *_, **__: 1 / 0)
    every = {
        "epsilon": "3", "delta": "1e-4", "epochs": "7", "batch-size": "64", "momentum": "0.9",
        "decay": "1", "sampling": "fixed", "mechanism": "dp_sgd", "num-bands": "4", "memory": "0",
    }  # fmt: skip
    for name, value in every.items():
        status, out, err = run(f"train --plan p.json --{name} {value}")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"--{name} must be left out with --plan, which decides it" in err
    _, _, err = run("train --plan p.json --epsilon 3 --epochs 7 --mechanism dp_sgd --seed 1")
    assert (
        "--epsilon, --epochs, --mechanism must be left out with --plan, which decides them" in err
    )


FEW = "train --data digits --epochs 1 --batch-size 360 --epsilon 8 --mechanism bisr --num-bands 4"


def test_keys_of_a_comparison_are_beside_the_folder_and_found_again(run, tmp_path):
    line = f"{FEW} --delta 1e-4 --sampling fixed --compare --out out --json"
    status, first, err = run(line)
    assert (status, err) == (0, "")
    assert not list((tmp_path / "out").rglob("*.key"))
    names = {"out-bisr.key", "out-dp_sgd-poisson.key"}
    assert {path.name for path in tmp_path.glob("*.key")} == names
    status, again, err = run(line)  # resumed: nothing is released twice
    assert (status, err) == (0, "")
    ids = [[each["statement"]["run_id"] for each in json.loads(t)["runs"]] for t in (first, again)]
    assert ids[0] == ids[1]
    keys = " ".join(f"--key {name}" for name in sorted(names))
    assert run(f"verify out {keys}")[0] == 0
    status, _, err = run(f"{line} --seed 3")
    assert status == 2
    assert "differs in settings.seed (was 0, is 3);" in err
    status, _, err = run("verify out/run-bisr.json")
    assert status == 2
    assert "folder must be the folder of a run, got the file out/run-bisr.json; give out" in err
    status, _, err = run("audit out")
    assert (status, err.count("\n")) == (2, 1)
    names = "out/run-bisr.json, out/run-dp_sgd-poisson.json"
    assert f"plan must be one run, got the folder out with 2; give one of {names}" in err


def test_verify_takes_the_run_file_and_audit_the_folder(run, made, monkeypatch):
    monkeypatch.chdir(made)
    assert run("verify run/run.json --key run.key") == run("verify run --key run.key")
    assert run("verify run/run.json")[0] == 0
    status, _, err = run("verify run/statement.txt")
    assert status == 2
    assert "got the file run/statement.txt; give run" in err
    words = "--canaries 200 --delta 0.1 --json"
    found = run(f"audit run {words}")
    assert found == run(f"audit run/run.json {words}")
    assert found[0] == 0


def test_a_run_without_a_folder_warns_of_nothing_that_its_user_did(run, monkeypatch):
    import torch

    from corrnoise.torch import seeds

    torch.seed()  # as in a fresh process
    monkeypatch.setattr(seeds, "_said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, out, err = run(f"{FEW} --delta 1e-4 --sampling fixed --json")
    assert (status, err) == (0, "")
    assert json.loads(out)["runs"]


def test_a_model_is_refused_before_the_plan_is_made(run, monkeypatch, tmp_path):
    monkeypatch.setattr(planning, "plan", lambda **_: 1 / 0)
    status, out, err = run("train --data digits --model convnets")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "model must be one of auto, linear, mlp, convnet, got 'convnets'" in err
    (tmp_path / "table.csv").write_text("a,b,class\n" + "1,2,yes\n3,4,no\n" * 20)
    status, out, err = run("train --data table.csv --value-range 0 4 --model convnet")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "got examples of shape (2,); use 'mlp'" in err


def test_after_ctrl_c_one_line_says_what_is_kept_and_it_holds(run, monkeypatch, tmp_path):
    from corrnoise.apps import training

    evaluate, left = training.evaluate, [0]

    def interrupted(*args):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return evaluate(*args)

    monkeypatch.setattr(training, "evaluate", interrupted)
    line = f"{FEW} --delta 1e-4 --sampling fixed".replace("--epochs 1", "--epochs 3")
    said = "corrnoise: interrupted: nothing of the run is kept; with --out the same command would"
    assert run(line) == (130, "", f"{said} go on\n")
    line += " --out out --json"
    said = "corrnoise: interrupted before the first checkpoint; the same command begins out again\n"
    assert run(line) == (130, "", said)
    left[0] = 1
    said = "interrupted; out has a checkpoint after step 4 of 12: the same command goes on from it"
    assert run(line) == (130, "", f"corrnoise: {said}\n")
    left[0] = 2
    status, out, err = run(line)
    assert (status, err) == (0, "")
    (found,) = json.loads(out)["runs"]
    assert [record["step"] for record in found["records"]] == [4, 8, 12]
    assert run("verify out --key out.key")[0] == 0


def test_ctrl_c_in_any_command_is_one_line(run, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "plan", interrupted)
    assert run(f"plan {RUN}") == (130, "", "corrnoise: interrupted\n")


def test_memory_can_be_allowed_where_the_advice_says_so(run):
    line = "train --data digits --epochs 1 --batch-size 360 --epsilon 8 --sampling cyclic-poisson"
    line += " --mechanism bsr --num-bands 2 --json"
    status, _, err = run(line)
    assert status == 2
    assert "allow more memory" in err
    status, out, err = run(f"{line} --memory 1")
    assert (status, err) == (0, "")
    assert json.loads(out)["runs"][0]["plan"]["memory"] == 1
