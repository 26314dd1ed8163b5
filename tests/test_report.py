import contextlib
import io
import itertools
import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import numpy as np
import pages
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

import corrnoise as cn
from corrnoise import report
from corrnoise.algebra import toeplitz
from corrnoise.report import figures
from corrnoise.report.evidence import Evidence
from corrnoise.report.kit import axes, cells, markup
from corrnoise.report.kit.numbers import number, percent, rounded_up
from corrnoise.report.kit.style import PALETTE
from corrnoise.report.statement import lines

VOID = {"meta", "input", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """The page as a tree, which must be well formed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = self.at = Node("", {}, None)
        self.feed(page)
        assert self.at is self.root, f"<{self.at.name}> is not closed"

    def handle_starttag(self, tag, attrs):
        node = Node(tag, dict(attrs), self.at)
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_endtag(self, tag):
        assert tag == self.at.name, f"</{tag}> within <{self.at.name}>"
        self.at = self.at.parent

    def handle_data(self, data):
        self.at.children.append(data)

    def all(self, name: str, within: str | None = None) -> list["Node"]:
        start = self.root if within is None else self.id(within)
        return [node for node in start.walk() if node.name == name]

    def id(self, name: str) -> "Node":
        (found,) = (node for node in self.root.walk() if node.attrs.get("id") == name)
        return found

    def rows(self, within: str, table: int = 0) -> list[list[str]]:
        found = self.all("table", within)[table]
        return [[cell.text for cell in row.children] for row in found.walk() if row.name == "tr"][
            1:
        ]


class Node:
    def __init__(self, name, attrs, parent):
        self.name, self.attrs, self.parent, self.children = name, attrs, parent, []

    def walk(self):
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def titles(self) -> list[str]:
        return [node.text for node in self.walk() if node.name == "title"]


SUBJECTS = {
    "plan, bound": lambda: {"plan": pages.fixed()},
    "plan, certified": lambda: {"plan": pages.certified()},
    "plan, poisson": lambda: {"plan": pages.poisson()},
    "plan, dense": lambda: {"plan": pages.dense()},
    "plan, by hand": lambda: {"plan": pages.with_dp_sgd(pages.fixed())},
    "runs": lambda: {"runs": pages.compared(pages.fixed())},
    "runs, certified": lambda: {"runs": pages.compared(pages.certified())},
    "run with no record": lambda: {
        "runs": [replace(pages.run(pages.fixed(), "Empty", 0.9), records=())]
    },
}


@cache
def shown(name: str) -> str:
    return report.html(**SUBJECTS[name]())


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_page_is_sound(name: str):
    text = shown(name)
    page = Page(text)
    ids = [node.attrs["id"] for node in page.root.walk() if "id" in node.attrs]
    assert len(ids) == len(set(ids))
    assert len(page.all("h1")) == 1
    levels = [int(node.name[1]) for node in page.root.walk() if node.name in ("h1", "h2", "h3")]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for section in page.all("section"):
        assert page.id(section.attrs["aria-labelledby"]).text
    for table in page.all("table"):
        assert table.children[0].name == "caption"
        assert table.children[0].text
        widths = {len(row.children) for row in table.walk() if row.name == "tr"}
        assert len(widths) == 1
    for drawing in page.all("svg"):
        hidden = drawing.attrs.get("aria-hidden") == "true"
        assert hidden or (drawing.attrs["role"] == "img" and drawing.attrs["aria-label"])
    assert "nan" not in text.split("<main>")[1].split("</main>")[0].replace("nance", "")


@pytest.mark.parametrize("name", SUBJECTS)
def test_it_loads_nothing_and_runs_nothing(name: str):
    text = shown(name)
    page = Page(text)
    for node in page.root.walk():
        assert node.name not in ("img", "link", "iframe", "object", "embed", "a")
        for attribute in node.attrs:
            assert attribute not in ("src", "href", "style", "xlink:href")
            assert not attribute.startswith("on")
    (script,) = page.all("script")
    assert script.attrs["type"] == "application/json"
    for part in ("http://", "https://", "url(", "@import", "//cdn"):
        assert part not in text
    (policy,) = (n for n in page.all("meta") if "http-equiv" in n.attrs)
    assert policy.attrs["http-equiv"] == "Content-Security-Policy"
    assert "default-src 'none'" in policy.attrs["content"]


def test_every_picture_has_data():
    drawn = {"training": 2, "error": 1, "noise": 4, "memory": 1, "spending": 1}
    page = Page(report.html(runs=pages.compared(pages.fixed())))
    for section, count in drawn.items():
        pictures = page.all("svg", section)
        assert len(pictures) == count
        for picture in pictures:
            marks = [n for n in picture.walk() if n.name in ("circle", "rect")]
            assert len(marks) >= 5
            for mark in marks:
                for name in ("cx", "cy", "x", "y", "r", "width", "height"):
                    assert math.isfinite(float(mark.attrs.get(name, "0")))
    plan = Page(report.html(pages.fixed()))
    assert not [node for node in plan.all("section") if node.attrs["id"] == "training"]
    for section in ("error", "noise", "memory", "spending"):
        assert len(plan.all("svg", section)) == drawn[section]


def test_hostile_labels_are_text():
    first, second = pages.compared(pages.fixed())
    first = replace(
        first,
        label=pages.HOSTILE,
        data={"name": pages.HOSTILE, pages.HOSTILE: pages.HOSTILE},
        settings={pages.HOSTILE: pages.HOSTILE},
    )
    text = report.html(runs=[first, second])
    page = Page(text)
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert page.rows("training")[0][0] == pages.HOSTILE
    assert any(pages.HOSTILE in title for title in page.id("training").titles())


def test_hostile_text_is_escaped_exactly_once():
    """Parsing undoes one escape: each piece must then be what was given, wherever it is shown."""
    label, data, model, key, value = (
        f"{name} {pages.HOSTILE} &amp; &lt;b&gt;"
        for name in ("label", "data", "model", "key", "value")
    )
    first, second = pages.compared(pages.fixed())
    hostile = replace(
        first, label=label, data={"name": data}, model={"name": model}, settings={key: value}
    )
    text = report.html(runs=[hostile, second])
    page = Page(text)
    settings = dict(
        zip(
            *([node.text for node in page.all(name, "training")] for name in ("dt", "dd")),
            strict=True,
        )
    )
    assert settings["Data"] == data
    assert settings["Model"] == model
    assert settings[key.replace("key", "Key", 1)] == value
    lead = next(n.text for n in page.root.walk() if n.attrs.get("class") == "lead")
    assert f"(model: {model}; data: {data})" in lead
    assert page.rows("training")[0][0] == label
    assert page.rows("spending")[0][0] == label
    assert f"Settings of “{label}”" in [node.text for node in page.all("h3")]
    assert f"Error of each step for {label}, " in page.all("svg", "error")[0].attrs["aria-label"]
    shown = text.split("<main>")[1].split("</main>")[0]
    for piece in (label, data, model, value):
        assert str(escape(piece)) in shown
        assert piece not in shown
    for twice in ("&amp;lt;script", "&amp;#34;", "&amp;#39;", "&amp;amp;amp;"):
        assert twice not in shown


def test_elements_escape_what_is_not_markup():
    inner = markup.tag("i", "<")
    assert markup.tag("b", inner, "<", None) == "<b><i>&lt;</i>&lt;</b>"
    assert markup.tag("b", title=inner) == '<b title="&lt;i&gt;&amp;lt;&lt;/i&gt;"></b>'
    assert markup.joined([inner, "&"]) == "<i>&lt;</i>&amp;"
    assert markup.tag("input", checked=True, hidden=False) == "<input checked>"


def test_the_statement_is_whole():
    for runs in (pages.compared(pages.fixed()), pages.compared(pages.certified())):
        statement = runs[0].statement
        page = Page(report.html(runs=runs))
        rows = dict(
            zip(
                *([node.text for node in page.all(name, "statement")] for name in ("dt", "dd")),
                strict=True,
            )
        )
        for name, value in statement.rows():
            if name not in ("Versions", "ε is"):
                assert rows[name] == value
        assert statement.caveats in page.id("statement").text
        (badge,) = (n.text for n in page.root.walk() if n.attrs.get("class") == "badge")
        assert badge == {"bound": "proven bound", "certified": "certified"}[statement.kind]
        versions = [node.text for node in page.all("dd", "verify")]
        assert versions == list(statement.versions.values())
    assert "fails with probability at most 10⁻⁹" in rows["ε is"]


def test_the_tables_show_the_values():
    runs = pages.compared(pages.fixed())
    page = Page(report.html(runs=runs))
    for run, row in zip(runs, page.rows("training"), strict=True):
        assert row[0] == run.label
        assert row[2:] == [
            rounded_up(run.statement.epsilon),
            rounded_up(run.statement.delta, 3),
            run.statement.kind,
            rounded_up(run.plan.noise_multiplier),
            number(run.plan.error),
            percent(run.test_accuracy),
            number(run.records[-1].test_loss, 3),
            number(run.seconds, 3),
        ]
    records = [(run.label, record) for run in runs for record in run.records]
    for (label, record), row in zip(records, page.rows("training", 1), strict=True):
        assert row == [
            label,
            number(record.step),
            rounded_up(record.epsilon),
            percent(record.test_accuracy),
            number(record.test_loss),
            number(record.loss),
        ]
    alternatives = page.rows("alternatives")
    for a, row in zip(runs[0].plan.alternatives, alternatives, strict=True):
        assert row[1:7] == [
            a.sampling,
            number(a.error),
            rounded_up(a.noise_multiplier),
            a.kind,
            number(a.scheme.num_vectors),
            number(a.step_cost, 3),
        ]
    (chosen,) = (row for row in alternatives if row[-1] == "chosen")
    assert chosen[2:4] == [number(runs[0].plan.error), rounded_up(runs[0].plan.noise_multiplier)]


def test_the_marks_show_the_values():
    runs = pages.compared(pages.fixed())
    page = Page(report.html(runs=runs))
    accuracy, loss = (picture.titles() for picture in page.all("svg", "training"))
    spent = page.all("svg", "spending")[0].titles()
    for run in runs:
        for r in run.records:
            at = f"step {r.step}: "
            assert f"{run.label}, test accuracy, {at}{percent(r.test_accuracy)}" in accuracy
            assert f"{run.label}, test loss, {at}{number(r.test_loss)}" in loss
            assert f"{run.label}, training loss, {at}{number(r.loss)}" in loss
            assert f"{run.label}, {at}{rounded_up(r.epsilon)}" in spent


def test_errors_are_those_of_the_calibrations():
    plan = pages.fixed()
    (stock,) = (a for a in plan.alternatives if a.name == "dp_sgd")
    for runs in ((), pages.compared(plan)):
        evidence = Evidence.of(plan, runs)
        ours, other = evidence.errors
        assert (ours.mean, ours.kind) == (plan.error, plan.calibration.kind)
        assert other.mean == pytest.approx(stock.error, rel=1e-12)
        assert evidence.baseline is other
        for e in (ours, other):
            assert math.sqrt(np.mean(e.steps**2)) == pytest.approx(e.mean, rel=1e-12)
            assert math.sqrt(np.sum(e.remains**2)) == pytest.approx(e.steps[-1], rel=1e-12)
        assert evidence.lower_bound == plan.lower_bound < ours.mean


def test_a_run_at_another_budget_is_not_compared_by_error():
    plan = pages.fixed()
    looser = cn.calibrate(
        cn.mechanisms.dp_sgd(plan.mechanism.workload), plan.participation, epsilon=8, delta=1e-5
    )
    other = cn.Plan(num_examples=1437, batch_size=64, calibration=looser)
    runs = [pages.run(plan, "Correlated", 0.9), pages.run(other, "Loose", 0.9)]
    evidence = Evidence.of(None, runs)
    assert [e.label for e in evidence.errors] == ["Correlated", "DP-SGD"]
    assert evidence.errors[1].noise_multiplier > looser.noise_multiplier
    assert "did not spend the same (ε, δ)" in report.html(runs=runs)


def of_one_sampling(*families):
    """What ``corrnoise train`` plans: secret batches of one kind, and no other considered."""
    return cn.plan(
        num_examples=120, batch_size=20, epochs=3, epsilon=4.0, delta=1e-5, momentum=0.9,
        sampling="balls-in-bins", mechanisms=list(families), samples=20_000,
    )  # fmt: skip


def dp_sgd_of(plan, sampling):
    found = cn.calibrate(
        cn.mechanisms.dp_sgd(plan.mechanism.workload), plan.participation,
        epsilon=plan.epsilon, delta=plan.delta, sampling=sampling,
    )  # fmt: skip
    return cn.Plan(num_examples=plan.num_examples, batch_size=plan.batch_size, calibration=found)


@pytest.mark.parametrize("families", [["bisr"], ["dp_sgd", "bisr"]], ids=len)
def test_the_headline_is_against_the_best_dp_sgd_and_names_its_batches(families):
    plan = of_one_sampling(*families)
    rivals = {name: dp_sgd_of(plan, name) for name in ("poisson", "random-allocation")}
    best = min(rivals, key=lambda name: rivals[name].error)
    runs = [pages.run(plan, "Ours", 0.9), pages.run(rivals["poisson"], "DP-SGD", 0.9)]
    for given_runs in ((), runs[:1], runs):
        evidence = Evidence.of(plan, given_runs)
        assert evidence.baseline.mean == pytest.approx(rivals[best].error, rel=1e-9)
        assert evidence.baseline.sampling == best
        page = Page(report.html(plan, given_runs))
        notes = [n.text for n in page.root.walk() if n.attrs.get("class") == "note"]
        against = f"than DP-SGD with {best} batches at the same budget ("
        assert any(n.replace("\u2011", "-").startswith(against) for n in notes)
        assert f"independent noise (DP-SGD) with {best} batches has" in page.id("error").text
    assert [e.label for e in Evidence.of(plan, runs).errors[:2]] == ["Ours", "DP-SGD"]


def test_public_batches_are_compared_with_public_ones_unless_a_better_run_is_there():
    plan = pages.fixed()
    assert Evidence.of(plan, ()).baseline.sampling == "fixed"
    rival = pages.run(dp_sgd_of(plan, "poisson"), "Poisson", 0.9)
    evidence = Evidence.of(plan, [pages.run(plan, "Ours", 0.9), rival])
    assert (evidence.baseline.label, evidence.baseline.sampling) == ("Poisson", "poisson")
    assert len(evidence.errors) == 2


@pytest.mark.parametrize("same", [True, False])
def test_several_runs_on_the_same_data_cost_their_sum(same):
    plan = pages.fixed()
    other = pages.with_dp_sgd(plan)
    last = pages.run(other, "Third", 0.7, epochs=None if same else 3)
    runs = [*pages.compared(plan), last]
    text = Page(report.html(runs=runs)).id("training").text
    epsilon, delta = (sum(getattr(r.statement, f) for r in runs) for f in ("epsilon", "delta"))
    assert f"costs their sum, ({rounded_up(epsilon)}, {rounded_up(delta, 3)}) for all 3" in text
    assert ("All runs spent the same" in text) is same
    alone = Page(report.html(runs=runs[:1])).id("training").text
    assert "their sum" not in alone


def test_the_lower_bound_is_drawn_only_where_it_is_proven():
    for name, proven in (("bound", True), ("certified", True), ("poisson", False)):
        page = Page(shown(f"plan, {name}"))
        picture = page.all("svg", "error")[0].text
        assert ("bound" in picture) is proven
        assert ("No lower bound is known here for" in page.id("error").text) is not proven
        assert ("the mean over the steps only" in page.id("error").text) is proven
    assert "the proof is loose" in shown("plan, certified")


def test_dp_sgd_has_nothing_to_compare_with():
    evidence = Evidence.of(pages.with_dp_sgd(pages.fixed()), ())
    assert evidence.baseline is None
    assert len(evidence.errors) == 1
    assert "no alternatives were considered" in report.html(evidence.plan)


def test_the_noise_is_that_of_the_mechanism():
    for plan in (pages.fixed(), pages.dense()):
        evidence = Evidence.of(plan, ())
        rows = figures.noising(evidence, 6)
        m = plan.mechanism
        strategy = (
            m.strategy[:6, :6] if plan is pages.dense() else toeplitz.matrix(m.strategy_coef[:6])
        )
        inverse = np.linalg.inv(strategy)
        np.testing.assert_allclose(rows, inverse / inverse[0, 0], atol=1e-12)
        covariance = inverse @ inverse.T
        scale = np.sqrt(np.diag(covariance))
        np.testing.assert_allclose(
            figures.correlations(evidence, 6), covariance / np.outer(scale, scale), atol=1e-12
        )


def test_more_memory_is_drawn_only_where_it_saves_time():
    plan = pages.fixed()
    page = Page(report.html(plan))
    (circles,) = ([n for n in p.walk() if n.name == "circle"] for p in page.all("svg", "memory"))
    own = [c for c in circles if c.parent.attrs["class"].startswith("s0")]
    times = {
        float(c.attrs["cx"]): float(c.text.rsplit(" times", 1)[0].rsplit(" ", 1)[1]) for c in own
    }
    assert len(times) == len(own) > 2  # one for each amount of memory
    ordered = [times[x] for x in sorted(times)]
    assert ordered == sorted(ordered, reverse=True)
    assert len(circles) == len(plan.alternatives) + len(own) - 1


def test_spending_is_recorded_or_certified():
    plan = pages.certified()
    (computed,) = Evidence.of(plan, ()).spending
    assert (computed.steps[0], computed.epsilons[0]) == (0, 0.0)
    assert (computed.steps[-1], computed.epsilons[-1]) == (plan.num_steps, plan.epsilon)
    middle = computed.steps[3]
    assert computed.epsilons[3] == plan.calibration.spent(middle, samples=20_000)
    assert "computed for this page" in shown("plan, certified")
    runs = pages.compared(plan)
    evidence = Evidence.of(None, runs)
    assert evidence.recorded
    for run, spending in zip(runs, evidence.spending, strict=True):
        assert spending.epsilons[1:] == tuple(record.epsilon for record in run.records)
    assert "The runs recorded these values" in shown("runs, certified")
    # Bins of DP-SGD are priced with no draws.
    both = shown("runs, certified")
    assert "Each point of “Correlated” is a proven upper bound (that of the whole run is" in both
    assert "each point of “DP-SGD” is a proven upper bound" in both
    kinds = "Each point of “Correlated” is a proven upper bound; each point of “DP-SGD” is exact."
    assert kinds in shown("runs")


@pytest.mark.parametrize("plan", [pages.fixed, pages.certified, pages.dense])
def test_the_guarantee_can_be_recomputed_from_the_file(plan, tmp_path, monkeypatch):
    plan = plan()
    path = report.write(tmp_path / "report.html", plan)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert report.read(path) == plan
    code = lines(Evidence.of(plan, ()))
    monkeypatch.chdir(tmp_path)
    if plan is pages.certified():
        code = code.replace("sampling=c.sampling,", "sampling=c.sampling, samples=20_000,")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert float(printed.getvalue()) == pytest.approx(plan.epsilon, rel=5e-3)
    page = Page(path.read_text(encoding="utf-8"))
    assert page.all("pre")[0].text == lines(Evidence.of(plan, ()))


def test_a_run_that_stopped_says_so():
    run = pages.run(pages.fixed(), "Stopped", 0.9, epochs=3)
    page = Page(report.html(runs=[run]))
    assert run.statement.epsilon < 4
    assert f"Trained with ({rounded_up(run.statement.epsilon)}," in page.all("h1")[0].text
    assert "69 of 115 released" in page.id("statement").text
    assert "c.spent(69)" in page.all("pre")[0].text


def test_what_a_stopped_run_spent_can_be_recomputed_from_the_file(tmp_path, monkeypatch):
    run = pages.run(pages.fixed(), "Stopped", 0.9, epochs=3)
    path = report.write(tmp_path / "report.html", runs=[run])
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(Page(path.read_text(encoding="utf-8")).all("pre")[0].text, {})
    whole, stopped = map(float, printed.getvalue().split())
    assert whole == pytest.approx(run.plan.epsilon, rel=1e-9)
    assert stopped == run.statement.epsilon


def test_what_a_part_of_a_certified_run_spent_is_recomputed_with_no_draws(tmp_path, monkeypatch):
    """The engine states a bound there, where ``Calibration.spent`` would certify another number."""
    plan = pages.certified()
    run = pages.run(plan, "Stopped", 0.9, epochs=1)
    c, steps = plan.calibration, run.statement.steps_taken
    assert steps < plan.num_steps
    spent = c.sampling.epsilon(c.mechanism, c.participation, c.noise_multiplier, c.delta, steps)
    stated = replace(run.statement, epsilon=spent, kind="bound")
    code = lines(Evidence.of(None, [replace(run, statement=stated)])).splitlines()
    report.write(tmp_path / "report.html", plan)
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec("\n".join([*code[:4], code[-1]]), {})
    assert float(printed.getvalue()) == pytest.approx(spent, rel=0.06)  # where searches end
    assert f"# was {spent!r}" in code[-1]


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="plan or runs must be given, got neither"):
        report.html()
    with pytest.raises(ValueError, match="plan must be the plan of the first run"):
        report.html(pages.certified(), pages.compared(pages.fixed()))
    other = tmp_path / "other.html"
    other.write_text("<p>no plan</p>")
    with pytest.raises(ValueError, match=r"a page that report\.write made, got .*other\.html"):
        report.read(other)


def test_a_plan_of_another_format_is_refused(tmp_path):
    path = report.write(tmp_path / "report.html", pages.fixed())
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('id="plan">{"format": 1,', 'id="plan">{"format": 2,'))
    with pytest.raises(ValueError, match="format of a plan must be 1"):
        report.read(path)


def test_noise_multipliers_are_rounded_up():
    for name in ("plan, bound", "plan, certified"):
        page = Page(shown(name))
        (plan,) = SUBJECTS[name]().values()
        exact = [plan.noise_multiplier] + [a.noise_multiplier for a in plan.alternatives]
        tiles = [n for n in page.root.walk() if n.attrs.get("class") == "tile"]
        (tile,) = (n.children[1].text for n in tiles if n.children[0].text == "Noise multiplier")
        written = [tile, *(row[3] for row in page.rows("alternatives"))]
        for value, text in zip(exact, written, strict=True):
            assert value * (1 - 1e-12) <= float(text) <= value * (1 + 1e-4)


def test_a_diverged_loss_is_left_out_of_the_picture_alone():
    run = pages.run(pages.fixed(), "Diverged", 0.9)
    last = replace(run.records[-1], loss=math.nan, test_loss=math.inf, test_accuracy=None)
    run = replace(run, records=(*run.records[:-1], last))
    page = Page(report.html(runs=[run]))
    assert len(page.all("svg", "training")) == 2
    assert page.rows("training", 1)[-1][3:] == ["–", "inf", "nan"]


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6).filter(
        lambda values: max(values) - min(values) > 1e-6 * max(1.0, *map(abs, values))
    )
)
def test_linear_ticks_are_few_and_hold_the_values(values: list[float]):
    axis = axes.linear("", values)
    assert 2 <= len(axis.ticks) <= 8
    assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in values)


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e5))
def test_logarithmic_ticks_are_few_and_hold_the_values(low: float, ratio: float):
    axis = axes.logarithmic("", [low, low * ratio])
    assert 1 <= len(axis.ticks) <= 7
    assert all(0 <= axis.share(value) <= 1 for value in (low, low * ratio, *axis.ticks))


@given(st.lists(st.floats(0, 200), min_size=1, max_size=8))
def test_spread_labels_do_not_touch(wanted: list[float]):
    placed = axes.spread(wanted, 14.0, 0.0, 220.0)
    order = sorted(placed)
    assert all(b - a >= 14.0 - 1e-9 for a, b in itertools.pairwise(order))
    assert order[0] >= -1e-9
    assert order[-1] <= 220.0 + 1e-9


def luminance(color: np.ndarray) -> float:
    linear = np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read():
    """The 4.5 of WCAG for text, on both grounds, and for numbers on the densest cells."""
    for shade in (0, 1):
        rgb = {
            name: np.array([int(pair[shade][i : i + 2], 16) / 255 for i in (1, 3, 5)])
            for name, pair in PALETTE.items()
        }
        for name in ("ink", "muted", *(f"s{i}" for i in range(6))):
            assert contrast(rgb[name], rgb["card"]) >= 4.5, name
            assert contrast(rgb[name], rgb["ground"]) >= 4.5, name
        assert contrast(rgb["sure"], rgb["sure-ground"]) >= 4.5
        for name in ("plus", "minus"):
            cell = cells.WRITTEN * rgb[name] + (1 - cells.WRITTEN) * rgb["card"]
            assert contrast(rgb["ink"], cell) >= 4.5, (shade, name)


def test_it_is_imported_when_it_is_used():
    code = "import corrnoise, sys; assert 'corrnoise.report' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import corrnoise.report, sys; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_markupsafe_the_extra_is_named():
    code = "import sys; sys.modules['markupsafe'] = None; import corrnoise; import corrnoise.report"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last == (
        "ModuleNotFoundError: markupsafe is needed and not installed: "
        "in a clone of corrnoise, pip install '.[report]'"
    )


def test_no_setting_is_listed_twice():
    run = pages.run(pages.fixed(), "a run", 0.9)
    run = replace(run, settings={**run.settings, "model": "linear"})
    names = [node.text for node in Page(str(report.html(runs=[run]))).all("dt", "training")]
    assert names.count("Model") == 1
    assert len(names) == len(set(names))
