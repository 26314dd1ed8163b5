"""The report in a real browser: headless Chromium, from disk, at a desk's and a phone's size."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages
import pytest

from corrnoise import report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)

SIZES = {"desk": (1280, 900), "phone": (390, 844)}

# Every piece of text with its colour, what it stands on, and its box; drawings stand on cards.
TEXTS = """
const seen = e => { const r = e.getBoundingClientRect(); return r.width && r.height; };
const ground = e => {
  for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (!/^rgba\\(.*, 0\\)$/.test(c)) return c;
  }
};
return [...document.querySelectorAll('body *')].filter(e =>
  !e.closest('script, style, title') && seen(e) &&
  [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())
).map(e => {
  const s = getComputedStyle(e), drawn = e.namespaceURI.endsWith('svg');
  return {text: e.textContent, kind: e.getAttribute('class') || '',
          color: drawn ? s.fill : s.color, ground: ground(e), size: parseFloat(s.fontSize)};
});
"""

# In each drawing, the boxes of its texts and of its card.
BOXES = """
const box = e => (r => [r.left, r.top, r.right, r.bottom])(e.getBoundingClientRect());
return [...document.querySelectorAll('figure svg')].map(svg => ({
  name: svg.getAttribute('aria-label'), box: box(svg), card: box(svg.closest('figure')),
  letter: parseFloat(getComputedStyle(svg.querySelector('text')).fontSize)
    * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width,
  marks: svg.querySelectorAll('circle, rect, polyline').length,
  texts: [...svg.querySelectorAll('text')].map(t => [t.textContent, box(t)]),
}));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    runs = pages.compared(pages.fixed())
    hostile = replace(runs[0], label=pages.HOSTILE, data={"name": pages.HOSTILE})
    return {
        "plan": report.write(folder / "plan.html", pages.fixed()),
        "certified": report.write(folder / "certified.html", pages.certified()),
        "runs": report.write(folder / "runs.html", runs=runs),
        "hostile": report.write(folder / "hostile.html", runs=[hostile, *runs[1:]]),
    }


def show(browser: Any, path: Path, size: str = "desk", scheme: str = "light") -> None:
    width, height = SIZES[size]
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    browser.get(path.as_uri())


def rgb(color: str) -> list[float]:
    return [float(x) / 255 for x in color[color.index("(") + 1 : -1].split(",")[:3]]


def luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb(color)]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def ground(browser: Any) -> float:
    script = "return getComputedStyle(document.body).backgroundColor"
    return luminance(browser.execute_script(script))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["plan", "certified", "runs", "hostile"])
def test_it_shows(browser: Any, files: dict[str, Path], name: str, size: str, scheme: str):
    show(browser, files[name], size, scheme)
    wide = "return [document.documentElement.scrollWidth, innerWidth]"
    needed, given = browser.execute_script(wide)
    assert needed <= given == SIZES[size][0]
    assert (ground(browser) < 0.05) is (scheme == "dark")

    pictures = browser.execute_script(BOXES)
    assert len(pictures) == (7 if name in ("plan", "certified") else 9)
    for picture in pictures:
        left, top, right, bottom = picture["box"]
        assert right - left > 200, picture["name"]
        assert bottom - top > 20, picture["name"]
        assert picture["marks"] >= 2, picture["name"]
        assert picture["letter"] >= 9.5, picture["name"]
        card = picture["card"]
        for words, box in picture["texts"]:
            assert card[0] <= box[0], words
            assert box[2] <= card[2], words
        for index, (words, box) in enumerate(picture["texts"]):
            for other, there in picture["texts"][index + 1 :]:
                across = min(box[2], there[2]) - max(box[0], there[0])
                down = min(box[3], there[3]) - max(box[1], there[1])
                # The boxes of letters have some air above and below.
                assert across < 1 or down < 4, (picture["name"], words, other)

    for piece in browser.execute_script(TEXTS):
        if piece["kind"] != "cell":  # tests/test_report.py: these stand on their own colour
            assert contrast(piece["color"], piece["ground"]) >= 4.5, piece
    assert browser.get_log("browser") == []


def test_it_loads_nothing(browser: Any, files: dict[str, Path]):
    show(browser, files["hostile"])
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    script = (
        "return document.querySelectorAll('img, link, script:not([type=\"application/json\"])')"
    )
    assert browser.execute_script(script + ".length") == 0
    assert pages.HOSTILE in browser.find_element("tag name", "main").text


def test_the_switch_changes_the_colours(browser: Any, files: dict[str, Path]):
    for scheme in ("light", "dark"):
        show(browser, files["plan"], scheme=scheme)
        assert (ground(browser) < 0.05) is (scheme == "dark")
        for choice in ("light", "dark"):
            browser.find_element("id", choice).click()
            assert (ground(browser) < 0.05) is (choice == "dark")


def test_it_prints_on_white_paper(browser: Any, files: dict[str, Path]):
    show(browser, files["runs"], scheme="dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert ground(browser) == pytest.approx(1.0)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    paper = base64.b64decode(printed["data"])
    assert paper.startswith(b"%PDF-")
    assert 3 <= paper.count(b"/Type /Page\n") + paper.count(b"/Type /Page ") <= 9
