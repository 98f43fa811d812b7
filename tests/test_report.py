import json
import re
import shutil

import pytest

import stableair as sa
from stableair.experiment import IDEAL
from stableair.results import report
from stableair.results.run import Run, find


def made(accuracy, **settings):
    rows = [{"round": k, "test/accuracy": a} for k, a in enumerate(accuracy)]
    return Run(sa.Experiment(**settings).to_dict(), rows)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two rules with two seeds each, an ideal run, one that diverged and one that cannot be read."""
    folder = tmp_path_factory.mktemp("report")
    base = sa.Experiment(data="synthetic(samples=60, classes=3, shape=(1, 2, 2))", model="mlp(4)", clients=5, rounds=12)
    for seed in (0, 1):
        sa.run(base.with_(seed=seed), folder / f"mac{seed}")
        sa.run(base.with_(seed=seed, receiver="gnc(max_norm=1)"), folder / f"gnc{seed}")
    sa.run(base.with_(**IDEAL), folder / "ideal")
    sa.run(base.with_(receiver="none()", noise="sas(alpha=0.5, tau=1e30)"), folder / "diverged")
    (folder / "broken").mkdir()
    (folder / "broken" / "experiment.json").write_text("{<b>")
    return folder


@pytest.fixture(scope="module")
def page(runs):
    found, unreadable = find([runs])
    return report.page(found, unreadable)


def test_the_page_says_what_the_runs_say(page, runs):
    cells = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    macs = [sa.load(runs / f"mac{seed}")["test/accuracy"] for seed in (0, 1)]
    assert f"{(macs[0][-1] + macs[1][-1]) / 2:.4f} ± " in cells
    assert f"{(max(macs[0]) + max(macs[1])) / 2:.4f} ± " in cells
    fluctuation = sum(sa.load(runs / f"gnc{seed}").fluctuation("test/accuracy") for seed in (0, 1)) / 2
    assert f"{fluctuation:.4f} ± " in cells
    assert "at round 2" in cells
    parts = "Results", "Curves", "Paired comparison", "Settings that differ", "Who holds which labels", "Left out"
    for part in parts:
        assert f"<h2>{part}</h2>" in cells
    assert "mac(C=1)" in cells
    assert "gnc(max_norm=1)" in cells


def test_an_unreadable_run_is_said_and_text_is_escaped(page):
    assert "broken/experiment.json is corrupted" in page
    assert "{<b>" not in page
    assert "<li>&lt;b&gt;</li>" in report.page([made([0.5], receiver="mac(C=1)")], ["<b>"])


def test_nothing_is_loaded_from_elsewhere(page):
    ours = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["']?(?!data:)[\w/.]""", ours)
    assert "http" not in ours


def test_pairs_are_of_the_same_seeds_with_the_uncertainty_of_their_difference():
    groups = {
        "a": [made([0.5], seed=0), made([0.7], seed=1), made([0.9], seed=7)],
        "b": [made([0.4], seed=0), made([0.5], seed=1), made([0.1], seed=8)],
        "c": [made([0.1], seed=8)],
    }
    ab, bc = sorted(report.compare(groups, "test/accuracy"), key=lambda pair: pair.seeds, reverse=True)
    assert (ab.better, ab.worse, ab.seeds) == ("a", "b", 2)
    assert ab.difference == pytest.approx(0.15)
    assert ab.error == pytest.approx(0.05)  # of 0.1 and 0.2
    assert ab.interval == pytest.approx((0.15 - 12.7062 * 0.05, 0.15 + 12.7062 * 0.05), rel=1e-4)
    assert (bc.seeds, bc.error, bc.interval) == (1, None, None)
    turned = report.compare({"b": groups["b"], "a": groups["a"]}, "test/accuracy")
    assert turned == [ab], "the better one first, whatever the order"


def test_runs_are_compared_over_the_rounds_that_both_have():
    groups = {"long": [made([0.1, 0.2, 0.9, 0.9])], "short": [made([0.3, 0.4], receiver="none()")]}
    (pair,) = report.compare(groups, "test/accuracy")
    assert (pair.better, pair.difference) == ("short", pytest.approx(0.2))


def test_only_what_learns_the_same_is_paired():
    groups = {"a": [made([0.5])], "b": [made([0.9], clients=7)], "c": [made([0.7], **IDEAL)]}
    assert [(p.better, p.worse) for p in report.compare(groups, "test/accuracy")] == [("c", "a")]


def test_a_copy_of_a_run_does_not_count_twice(tiny, tmp_path):
    for name, rounds in (("a", 2), ("b", 3)):
        sa.run(tiny.with_(rounds=rounds), tmp_path / name)
    (run,), left_out = find([tmp_path])
    assert len(run) == 3
    assert left_out == [f"{tmp_path / 'a'}: the same run as {tmp_path / 'b'}"]


def test_odd_files_in_one_folder_do_not_break_the_page(tiny, tmp_path):
    for i, (file, content) in enumerate(
        [("environment.json", "[3]"), ("environment.json", '[{"data": null}]'), ("clients.json", '{"labels": 3}'),
         ("clients.json", "{"), ("rounds.jsonl", '{"round": 0, "test/accuracy": "high"}\n')]
    ):  # fmt: skip
        sa.run(tiny.with_(rounds=1, seed=i), tmp_path / f"r{i}")
        (tmp_path / f"r{i}" / file).write_text(content)
    sa.run(tiny.with_(rounds=1, seed=9), tmp_path / "r9")
    found, left_out = find([tmp_path])
    assert ([run.settings["seed"] for run in found], len(left_out)) == ([9], 5)
    assert "test/accuracy is no number" in left_out[4]
    assert all("is corrupted" in line for line in left_out)
    assert "<h2>Results</h2>" in report.page(found, left_out)


def test_survivors_are_counted():
    assert report._spread([0.5, None, None]) == "0.5000 (1 of 3)"


def test_the_settled_accuracy_and_the_fluctuation_are_of_the_last_ten_rounds():
    run = made([0.0] * 10 + [0.4, 0.6] * 5)
    assert run.settled("test/accuracy") == pytest.approx(0.5)
    assert made([0.0, 0.2, 0.4, 0.6]).settled("test/accuracy") == pytest.approx(0.5), "half of a short run"
    assert run.fluctuation("test/accuracy") == pytest.approx((10 * 0.01 / 9) ** 0.5)
    assert made([0.5]).fluctuation("test/accuracy") is None


def test_validation_runs_alone_make_a_report_and_beside_test_runs_are_left_out():
    searched = Run(sa.Experiment(evaluate="validation").to_dict(), [{"round": 0, "validation/accuracy": 0.25}])
    assert "final validation accuracy" in report.page([searched])
    assert "no test/accuracy" in report.page([searched, made([0.5])])


def test_nothing_to_report():
    with pytest.raises(sa.InputError, match="nothing to report"):
        report.page([made([])])


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1200,1600":
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield session
    session.quit()


def test_in_a_real_browser(browser, page, tmp_path):
    """From a file path, without network: the curves are drawn, nothing is complained of, the legend acts."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    browser.get(report.write(page, tmp_path / "report.html").as_uri())
    wait = WebDriverWait(browser, 30)
    wait.until(lambda b: len(b.find_elements(By.CSS_SELECTOR, "#plot-curves .legend .traces")) == 4)
    lines = browser.find_elements(By.CSS_SELECTOR, "#plot-curves .scatterlayer .trace path.js-line")
    drawn = [line for line in lines if len(line.get_attribute("d") or "") > 20]
    assert len(drawn) >= 9, "three groups in accuracy, loss and clipped share at the least"
    assert browser.find_elements(By.CSS_SELECTOR, "[id^=plot-labels] .bars path"), "the label distribution"

    count = "return document.querySelector('#plot-curves')._fullData.filter(t => t.visible === true).length"
    before = browser.execute_script(count)
    browser.find_elements(By.CSS_SELECTOR, "#plot-curves .legend .legendtoggle")[0].click()
    wait.until(lambda b: b.execute_script(count) < before)

    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
    picture = tmp_path / "report.png"
    assert browser.save_screenshot(str(picture))
    assert picture.stat().st_size > 50_000


def test_of_many_pairs_the_best_and_the_nearest_are_shown_and_the_rest_on_demand():
    runs = [made([0.001 * i] * 3, receiver=f"mac(C={i + 1})") for i in range(200)]
    text = report.page(runs)
    assert len(text.encode()) < 5_000_000
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    comparison = shown.partition("<h2>Paired comparison</h2>")[2].partition("<h2>")[0]
    assert comparison.count("<tr>") == 2 * report.SHOWN + 3
    assert "<td>mac(C=200)</td><td>mac(C=199)</td><td class=n>1</td><td class=n>+0.10</td>" in comparison
    assert "All 19,900 pairs" in comparison
    packed = re.search(r"<details class=rest>.*?<script[^>]*>(.*?)</script>", text, flags=re.DOTALL)[1]
    rows = json.loads(packed)["rows"]
    assert len(rows) == 199 * 100
    assert rows[0] == [199, 0, 1, "+19.90", "one seed", "", ""]


def test_text_in_a_figure_cannot_end_its_script():
    assert "</script><b>" not in report.page(
        [made([0.5, 0.6], receiver="mac(C=1)", partition="iid()")], ["</script><b>"]
    )
    assert (
        report._data('{"a": "</script>"}') == '<script type="application/json" class="">{"a": "<\\/script>"}</script>'
    )


def test_the_best_comes_first():
    ended = made([0.9, 0.9, None], receiver="none()")
    ended.rounds[-1]["diverged"] = True
    runs = [ended, made([0.2] * 3), made([0.8] * 3, receiver="mac(C=2)"), made([0.5] * 3, receiver="mac(C=3)")]
    results = report.page(runs).partition("<h2>Results</h2>")[2].partition("</table>")[0]
    assert re.findall(r"<tr><td>(.*?)</td>", results) == ["mac(C=2)", "mac(C=3)", "mac(C=1)", "none()"]
