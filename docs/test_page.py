"""docs/index.html in a browser (make test-page), with Debian's chromium and chromium-driver."""

import json
import re

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from docs.build_page import DOCS, build

PAGE = (DOCS / "index.html").as_uri()
WEIGHTS = json.loads((DOCS / "weights.json").read_text(encoding="utf-8"))
OPTIONS = """headless no-sandbox disable-gpu disable-quic no-first-run disable-sync
    disable-background-networking disable-component-update"""


def test_it_is_built_of_what_is_there():
    """Twice the same, and what was published."""
    text = build()
    assert text == build() and len(text.encode()) < 2e6

    def plain(text):  # Pygments' and mistune's tags may be another version's
        return re.sub(r"\s+", " ", re.sub("<.*?>", "", text))

    assert plain(text) == plain((DOCS / "index.html").read_text(encoding="utf-8")), "make page"


def test_what_is_missing(tmp_path):
    for notebook in (tmp_path / "none.ipynb", tmp_path / "source.ipynb"):
        with pytest.raises((FileNotFoundError, ValueError), match="make walkthrough NOTEBOOK=docs"):
            build(notebook)
        source = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path / "source.ipynb").write_text(json.dumps(source))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for option in (*OPTIONS.split(), f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
    driver.get("about:blank")  # in place of a browser's own first page, and its requests
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    """The page, anew: no message, and no request but for it."""
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(PAGE)
    yield browser
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"]["request"]["url"] for e in events if e["method"].endswith("WillBeSent")]
    assert {url.split("#")[0] for url in sent if not url.startswith("data:")} == {PAGE}


def table(page):
    """[adapter, [s of each layer]] of the rows of the table, as they are seen"""
    rows = page.find_elements(By.CSS_SELECTOR, "#s tr")[1:]
    texts = [[one.text for one in row.find_elements(By.CSS_SELECTOR, "th, td")] for row in rows]
    return [[name, [float(text.split("\n")[0]) for text in cells]] for name, *cells in texts]


def expected(sentence, way, token):
    s = WEIGHTS["sentences"][sentence]["readings"][way]["s"]
    names = enumerate(WEIGHTS["adapters"][way])
    return [[name, [pytest.approx(of[token][n], abs=0.0051) for of in s]] for n, name in names]


def choose(page, name, value):
    page.find_element(By.CSS_SELECTOR, f'[name="{name}"][value="{value}"] + span').click()


def test_clicks(page):
    assert table(page) == expected(0, "", 0)
    of_step = [one.text for one in page.find_elements(By.CSS_SELECTOR, "#step .heat")]
    assert of_step == [f"{s:.3f}" for s in WEIGHTS["step"]["s"]]
    last = len(WEIGHTS["sentences"]) - 1
    for sentence in (0, last):
        page.find_element(By.CSS_SELECTOR, f'#sentence [value="{sentence}"]').click()
        for way in WEIGHTS["adapters"]:
            choose(page, "way", way)
            for token in (2, 0):
                choose(page, "token", token)
                assert table(page) == expected(sentence, way, token)
    answer = WEIGHTS["sentences"][last]["readings"][way]["answer"]["label"]
    assert f"answers “{answer}”" in page.find_element(By.ID, "said").text


def test_differences_between_questions(page):
    """Small numbers stand where the questions differ by 0.05, and say by how much."""
    way, other = [*WEIGHTS["adapters"]][1:]
    choose(page, "way", way)
    readings = WEIGHTS["sentences"][0]["readings"]
    for layer, (here, there) in enumerate(
        zip(readings[way]["s"], readings[other]["s"], strict=True)
    ):
        cell = page.find_elements(By.CSS_SELECTOR, "#s tr:nth-of-type(2) td")[layer]
        small = [one.text for one in cell.find_elements(By.TAG_NAME, "small")]
        moved = here[0][0] - there[0][0]
        assert small == ([f"{moved:+.2f}".replace("-", "−")] if abs(moved) >= 0.05 else [])


def test_keys(page):
    page.find_element(By.CSS_SELECTOR, '[name="token"]:checked').send_keys(Keys.ARROW_RIGHT)
    assert table(page) == expected(0, "", 1)
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert table(page) == expected(0, "", 2)
    page.find_element(By.CSS_SELECTOR, ".bar summary").send_keys(Keys.ENTER)
    assert page.find_element(By.LINK_TEXT, "The files").is_displayed()


LINKS = """
const text = (one) => one?.textContent.trim();
return [...document.querySelectorAll('a[href^="#"]')].map((a) => {
  const target = document.getElementById(decodeURIComponent(a.hash.slice(1)));
  const shown = a.matches(".n") ? a.parentElement : a.closest(".listing")?.querySelector(".l");
  return [a.hash, a.className, text(a), target && text(target), text(shown)];
})"""


def test_links(page):
    """Each leads somewhere; those to a line, to one that holds what the page shows."""
    counts = dict.fromkeys(["n", "line", "name"], 0)
    for hash, kind, text, target, shown in page.execute_script(LINKS):
        assert target is not None, hash
        if kind == "line" and shown is None:  # a name in the text
            assert re.match(rf"(def|class) {text.removesuffix('()')}\b", target), hash
            counts["name"] += 1
        elif kind in ("n", "line"):
            assert target == shown, hash
            counts[kind] += 1
    assert counts["n"] > 1600 and counts["line"] > 10 and counts["name"] > 3


OVERLAP = """
const boxes = [...document.querySelectorAll(".prose > div, .beside > div")].map((one) => {
  const { left, right, top, bottom } = one.getBoundingClientRect();
  return { left, right, top, bottom };
});
return boxes.filter((a, i) => boxes.slice(i + 1).some((b) =>
  a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1)).length"""


def test_nothing_overlaps(page):
    """Columns stay in sight while the other one is read, each within its section."""
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    for y in range(0, 12000, 700):
        page.execute_script(f"scrollTo(0, {y})")
        assert page.execute_script(OVERLAP) == 0


WIDE = """
for (const one of document.querySelectorAll("details")) one.open = true;
return [...document.querySelectorAll("body *")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
  .map((one) => one.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize("width", [390, 1400])
def test_widths(page, width):
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert page.execute_script(WIDE) == []
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
