"""The built site: complete, and readable from a file path without a network, in a browser."""

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

import stableair as sa
from helpers import ROOT
from stableair.experiment import COMPONENT_SETTINGS, registry

pytestmark = pytest.mark.slow  # it builds the whole site

OPENED = (
    "index",
    "theory",
    "choices",
    "reproduction",
    "auto",
    "extending",
    "figures/fig4a",
    "reference/receivers",
    "reference/channels",
)
FIRST_RESULTS = {"write a receiver": "extending", "slow": "observe", "Ctrl-C": "observe"}  # words to search for: page
FIRST_RESULT = "return document.querySelector('a.md-search-result__link')?.href ?? ''"
PICTURES = "return [...document.images].every(image => image.complete && image.naturalWidth > 0)"
OVERHANG = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def anchors(site):
    """The anchors of the reference."""
    return {id for page in (site / "reference").glob("*.html") for id in re.findall(r'id="([\w.]+)"', page.read_text())}


def test_every_public_name_is_in_the_reference(anchors):
    for name, home in sa._public().items():
        found = getattr(sa, name)
        if home == "stableair":
            assert any(f"{anchor}.".startswith(f"stableair.{name}.") for anchor in anchors), name
            continue
        defined = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
        assert {f"{home}.{name}", defined} & anchors, name


def test_every_component_is_in_the_reference(anchors):
    for field in COMPONENT_SETTINGS:
        for entry in registry(field):
            if entry.factory.__module__.startswith("stableair.") and "plugin" not in entry.factory.__module__:
                assert f"{entry.factory.__module__}.{entry.factory.__qualname__}" in anchors, entry.name


def test_all_links_of_the_site_have_a_target(site):
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # for servers: its links begin at the root
            continue
        for link in re.findall(r'(?:href|src)="([^"#:?]+)["#?]', page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)


def test_ids_are_unique(site):
    for page in site.rglob("*.html"):
        ids = re.findall(r'<[^>]* id="([^"]+)"', page.read_text())
        assert [id for id, count in Counter(ids).items() if count > 1] == [], page.name


def test_no_file_is_loaded_from_another_site(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=[\"']?([^\"'\s>]+)", text)
        assert not [url for url in loaded if re.match(r"(?:https?:)?//", url)], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\([\"']?|@import [\"']?)(?:https?:)?//", style.read_text()), style.name


def test_the_search_shows_no_source_of_formulas(site):
    index = (site / "search/search_index.js").read_text()
    assert "alpha = 1.5" in index
    assert not re.search(r"\\\\[(\[]", index)
    assert json.loads(index.partition("=")[2])["docs"]


def test_third_party_assets_are_small_and_have_their_licence():
    kept = [path for path in (ROOT / "docs/assets").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 1_000_000
    for folder in ("katex", "iframe-worker"):
        assert "Permission is hereby granted" in (ROOT / "docs/assets" / folder / "LICENSE").read_text()


def test_the_site_works_in_a_browser(browser, site):
    """From a file path, without network: formulas are typeset, the search works; no warnings, no requests."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    browser.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    wait = WebDriverWait(browser, 30)
    for name in OPENED:
        browser.get((site / f"{name}.html").as_uri())
        marked = browser.find_elements(By.CSS_SELECTOR, ".arithmatex")
        typeset = browser.find_elements(By.CSS_SELECTOR, ".arithmatex .katex .katex-html")
        assert len(marked) == len(typeset) > 0, name
        assert all(formula.size["width"] > 3 and formula.size["height"] > 3 for formula in typeset), name
        assert browser.execute_script("return document.fonts.check('16px KaTeX_Math')"), name
        wait.until(lambda b: b.execute_script(PICTURES))
        assert browser.execute_script(OVERHANG) <= 0, f"{name} is wider than the window"

    browser.get((site / "index.html").as_uri())
    browser.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("nakagami")
    results = "article.md-search-result__article"
    wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, results))
    found = [result.text.lower() for result in browser.find_elements(By.CSS_SELECTOR, results)]
    assert any("nakagami" in text for text in found), found
    links = browser.find_elements(By.CSS_SELECTOR, "a.md-search-result__link")
    assert any("channels.html" in link.get_attribute("href") for link in links)

    for words, page in FIRST_RESULTS.items():
        field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
        field.clear()
        browser.execute_script("arguments[0].value = arguments[1]", field, words)  # typed words pass through "Ctrl-"
        field.send_keys(Keys.END)  # the search reads the field when a key is released
        wait.until(lambda b, page=page: f"/{page}.html" in b.execute_script(FIRST_RESULT))

    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert any(url.endswith("katex.min.js") for url in requested)
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in requested), requested
