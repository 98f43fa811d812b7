import base64
import gzip
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

import stableair as sa
from stableair.experiment import IDEAL
from stableair.results import report
from stableair.results.reading import find
from stableair.results.run import Run
from stableair.results.statistics import compare_groups


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


class Page(HTMLParser):
    """The content of a page: the text of each section, its tables as rows of cells, and its scripts."""

    VOID = "meta", "link"

    def __init__(self, source):
        super().__init__()
        self.open, self.section = [], ""
        self.text, self.tables, self.scripts = {"": ""}, {"": []}, []
        self.feed(source)
        self.close()
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables[self.section].append([])
        elif tag == "tr":
            self.tables[self.section][-1].append([])
        elif tag in ("td", "th"):
            self.tables[self.section][-1][-1].append("")
        elif tag == "script":
            self.scripts.append((self.section, ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        tag = self.open[-1] if self.open else ""
        if tag == "script":
            section, before = self.scripts.pop()
            self.scripts.append((section, before + data))
        elif tag in ("td", "th"):
            self.tables[self.section][-1][-1][-1] += data
        elif tag == "h2":
            self.section = data
            self.text[data], self.tables[data] = "", []
        if tag not in ("script", "style"):
            self.text[self.section] += data

    def figures(self, section):
        return [json.loads(content) for where, content in self.scripts if where == section]


@pytest.fixture(scope="module")
def page(runs):
    return report.page(*find([runs]))


def test_the_page_shows_the_numbers_of_the_runs(page, runs):
    shown = Page(page)
    (results,) = shown.tables["Results"]
    head, rows = results[0], {row[0]: row for row in results[1:]}
    macs = [sa.load(runs / f"mac{seed}")["test/accuracy"] for seed in (0, 1)]
    mac = dict(zip(head, next(row for name, row in rows.items() if "mac(C=1)" in name), strict=True))
    gnc = dict(zip(head, next(row for name, row in rows.items() if "gnc" in name), strict=True))
    assert mac["final"].startswith(f"{(macs[0][-1] + macs[1][-1]) / 2:.4f} ± ")
    assert mac["best"].startswith(f"{(max(macs[0]) + max(macs[1])) / 2:.4f} ± ")
    fluctuation = sum(sa.load(runs / f"gnc{seed}").fluctuation("test/accuracy") for seed in (0, 1)) / 2
    assert gnc["fluctuation"].startswith(f"{fluctuation:.4f} ± ")
    assert sorted(row[head.index("diverged")] for row in rows.values()) == ["at round 2", "no", "no", "no"]
    assert list(shown.text)[1:] == [
        "Results", "Curves", "Resources", "Paired comparison", "Settings that differ", "Label distribution",
        "Environment", "Left out",
    ]  # fmt: skip


def test_the_figures_hold_the_means_of_the_metrics(page, runs):
    shown = Page(page)
    (curves,) = shown.figures("Curves")
    macs = [sa.load(runs / f"mac{seed}")["test/accuracy"] for seed in (0, 1)]
    mean = [(one + other) / 2 for one, other in zip(*macs, strict=True)]
    lines = [trace for trace in curves["data"] if "mac(C=1)" in trace.get("name", "")]
    assert len(lines) == 4, "accuracy, loss, SNR and clipped share"
    assert lines[0]["y"] == pytest.approx(mean, rel=1e-5)
    assert lines[0]["x"] == list(range(1, 13)), "the first round is 1"
    assert [trace["showlegend"] for trace in lines] == [True, False, False, False]
    (labels,) = shown.figures("Label distribution")
    assert sum(sum(bar["y"]) for bar in labels["data"]) == 60


def test_unreadable_runs_are_listed_and_text_is_escaped(page):
    assert "broken/experiment.json is corrupted" in Page(page).text["Left out"]
    assert "{<b>" not in page
    hostile = "</script><b>&'\""
    escaped = report.page([made([0.5], receiver="mac(C=1)")], [hostile])
    assert hostile in Page(escaped).text["Left out"]
    assert hostile not in escaped


def test_text_in_a_figure_cannot_close_its_script(monkeypatch):
    hostile = "</script><b>&'\""
    monkeypatch.setattr(report, "group", lambda runs: {hostile: runs})
    source = report.page([made([0.5, 0.6])])
    assert hostile not in source
    (curves,) = Page(source).figures("Curves")
    assert hostile in [trace.get("name") for trace in curves["data"]]


def test_the_page_contains_plotly(page):
    compressed = re.search(r'id="plotly">(.*?)</script>', page)[1]
    assert gzip.decompress(base64.b64decode(compressed)).decode() == get_plotlyjs()


def test_no_file_is_loaded_from_another_site(page):
    without_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["']?(?!data:)[\w/.]""", without_scripts)
    assert "http" not in without_scripts


def test_plotly_and_jinja_are_imported_only_for_a_page():
    code = (
        "import sys, stableair.results.report, stableair.comparisons\n"
        "loaded = {'plotly', 'jinja2', 'scipy.stats', 'pandas', 'optuna'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pairs_are_of_the_same_seeds_with_the_uncertainty_of_their_difference():
    groups = {
        "a": [made([0.5], seed=0), made([0.7], seed=1), made([0.9], seed=7)],
        "b": [made([0.4], seed=0), made([0.5], seed=1), made([0.1], seed=8)],
        "c": [made([0.1], seed=8)],
    }
    ab, bc = sorted(compare_groups(groups, "test/accuracy"), key=lambda pair: pair.seeds, reverse=True)
    assert (ab.better, ab.worse, ab.seeds) == ("a", "b", 2)
    assert ab.difference == pytest.approx(0.15)
    assert ab.error == pytest.approx(0.05)  # of 0.1 and 0.2
    assert ab.interval == pytest.approx((0.15 - 12.7062 * 0.05, 0.15 + 12.7062 * 0.05), rel=1e-4)
    assert (bc.seeds, bc.error, bc.interval) == (1, None, None)
    swapped = compare_groups({"b": groups["b"], "a": groups["a"]}, "test/accuracy")
    assert swapped == [ab], "the better one is first in any order"


def test_runs_are_compared_over_the_rounds_that_both_have():
    groups = {"long": [made([0.1, 0.2, 0.9, 0.9])], "short": [made([0.3, 0.4], receiver="none()")]}
    (pair,) = compare_groups(groups, "test/accuracy")
    assert (pair.better, pair.difference) == ("short", pytest.approx(0.2))


def test_only_groups_with_the_same_task_are_paired():
    groups = {"a": [made([0.5])], "b": [made([0.9], clients=7)], "c": [made([0.7], **IDEAL)]}
    assert [(p.better, p.worse) for p in compare_groups(groups, "test/accuracy")] == [("c", "a")]


def test_a_copy_of_a_run_is_used_once(tiny, tmp_path):
    for name, rounds in (("a", 2), ("b", 3)):
        sa.run(tiny.with_(rounds=rounds), tmp_path / name)
    (run,), left_out = find([tmp_path])
    assert len(run) == 3
    assert left_out == [f"{tmp_path / 'a'}: the same run as {tmp_path / 'b'}"]


def test_damaged_files_of_one_folder_do_not_affect_the_page(tiny, tmp_path):
    for i, (file, content) in enumerate(
        [("environment.json", "[3]"), ("environment.json", '[{"data": null}]'), ("clients.json", '{"labels": 3}'),
         ("clients.json", "{"), ("rounds.jsonl", '{"round": 0, "test/accuracy": "high"}\n')]
    ):  # fmt: skip
        sa.run(tiny.with_(rounds=1, seed=i), tmp_path / f"r{i}")
        (tmp_path / f"r{i}" / file).write_text(content)
    sa.run(tiny.with_(rounds=1, seed=9), tmp_path / "r9")
    found, left_out = find([tmp_path])
    assert ([run.settings["seed"] for run in found], len(left_out)) == ([9], 5)
    assert "test/accuracy is not a number" in left_out[4]
    assert all("is corrupted" in line for line in left_out)
    assert len(Page(report.page(found, left_out)).tables["Results"][0]) == 2


def test_the_settled_accuracy_and_the_fluctuation_are_of_the_last_ten_rounds():
    run = made([0.0] * 10 + [0.4, 0.6] * 5)
    assert run.settled("test/accuracy") == pytest.approx(0.5)
    assert made([0.0, 0.2, 0.4, 0.6]).settled("test/accuracy") == pytest.approx(0.5), "half of a short run"
    assert run.fluctuation("test/accuracy") == pytest.approx((10 * 0.01 / 9) ** 0.5)
    assert made([0.5]).fluctuation("test/accuracy") is None


def test_validation_runs_are_reported_if_there_are_no_test_runs():
    searched = Run(sa.Experiment(evaluate="validation").to_dict(), [{"round": 0, "validation/accuracy": 0.25}])
    assert "the validation accuracy" in Page(report.page([searched])).text["Results"]
    assert "without test/accuracy" in Page(report.page([searched, made([0.5])])).text["Left out"]


@pytest.mark.parametrize(
    ("lengths", "rounds"), [([8], "4 rounds"), ([40, 30], "10 rounds"), ([40, 8], "4 to 10 rounds"), ([1], "1 round")]
)
def test_the_page_names_the_rounds_of_the_mean(lengths, rounds):
    page = Page(report.page([made([0.5] * length, batch_size=5 + length) for length in lengths]))
    assert f"mean of the last {rounds}" in page.tables["Results"][0][0]
    assert f"the mean of the last {rounds}, with 0" in page.text["Results"]
    assert len(lengths) < 2 or f"(mean of the last {rounds})" in page.text["Paired comparison"]


def test_runs_without_rounds_are_refused_or_left_out():
    with pytest.raises(sa.InputError) as error:
        report.page([made([])])
    assert error.value.code == "no-rounds"
    assert "no complete round" in Page(report.page([made([0.5]), made([])])).text["Left out"]


def test_a_page_cannot_replace_a_folder(tmp_path):
    for path in (tmp_path, tmp_path / "file" / "page.html"):
        (tmp_path / "file").write_text("")
        with pytest.raises(sa.InputError) as error:
            sa.report([made([0.5])], path)
        assert (error.value.code, error.value.fields["path"]) == ("cannot-write", path)


def test_no_p_is_shown_for_equal_differences():
    """0.3 - 0.2 and 0.6 - 0.5 differ in their last bits; a t-test on these would give p = 1e-60."""
    levels = 0.3, 0.6, 0.7, 0.8, 0.9
    runs = [made([level], seed=i) for i, level in enumerate(levels)]
    runs += [made([level - 0.1], seed=i, receiver="none()") for i, level in enumerate(levels)]
    ((_, row),) = Page(report.page(runs)).tables["Paired comparison"]
    assert row == ["mac(C=1)", "none()", "5", "+10.00", "± 0.00", "+10.00 to +10.00", "–"]


def test_the_page_works_in_a_browser(browser, page, tmp_path):
    """From a file path, without network: the curves are drawn, there are no warnings, and the legend works."""
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
    requested = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requested), requested
    picture = tmp_path / "report.png"
    assert browser.save_screenshot(str(picture))
    assert picture.stat().st_size > 50_000


def test_many_pairs_are_shown_on_demand():
    runs = [made([0.001 * i] * 3, receiver=f"mac(C={i + 1})") for i in range(200)]
    source = report.page(runs)
    assert len(source.encode()) < 5_000_000
    shown = Page(source)
    closest_to_best, closest, on_demand = shown.tables["Paired comparison"]
    assert len(closest_to_best) == len(closest) == 1 + report.CLOSEST
    assert closest_to_best[1] == ["mac(C=200)", "mac(C=199)", "1", "+0.10", "one seed", "", ""]
    assert {row[3] for row in closest[1:]} == {"+0.10"}
    assert len(on_demand) == 1, "filled by a script"
    assert "All 19,900 pairs" in shown.text["Paired comparison"]
    (content,) = shown.figures("Paired comparison")
    assert len(content["rows"]) == 199 * 100
    assert content["rows"][0] == [199, 0, 1, "+19.90", "one seed", "", ""]
    assert content["names"][199] == "mac(C=200)"


def test_the_best_setting_is_first():
    ended = made([0.9, 0.9, None], receiver="none()")
    ended.rounds[-1]["diverged"] = True
    runs = [ended, made([0.2] * 3), made([0.8] * 3, receiver="mac(C=2)"), made([0.5] * 3, receiver="mac(C=3)")]
    (results,) = Page(report.page(runs)).tables["Results"]
    assert [row[0] for row in results[1:]] == ["mac(C=2)", "mac(C=3)", "mac(C=1)", "none()"]


def test_the_accuracy_is_drawn_against_the_only_number_that_differs():
    runs = [
        made([0.0, C / 100 + seed / 10], receiver=f"mac(C={C})", seed=seed) for C in (10, 1, 0.1) for seed in (1, 3)
    ]
    shown = Page(report.page([*runs, made([0.0, 0.9], receiver="none()")]))
    (figure,) = shown.figures("receiver.C")
    mac, none = figure["data"]
    assert (mac["x"], mac["y"]) == ([0.1, 1, 10], pytest.approx([0.201, 0.21, 0.3]))
    assert mac["error_y"]["array"] == pytest.approx([0.02**0.5] * 3, rel=1e-5)
    assert none["y"] == [0.9, 0.9], "a setting without the argument is a horizontal line"
    assert figure["layout"]["xaxis"]["type"] == "log"
    two_differ = Page(report.page([*runs, made([0.1, 0.5], clients=3)]))
    assert "receiver.C" not in two_differ.text


def test_curves_are_in_numerical_order():
    runs = [made([0.1, 0.2], receiver=f"mac(C={C})") for C in (10, 9, 100)]
    (curves,) = Page(report.page(runs)).figures("Curves")
    assert [trace["name"] for trace in curves["data"][:3]] == ["mac(C=9)", "mac(C=10)", "mac(C=100)"]
    colours = [trace["line"]["color"] for trace in curves["data"][:3]]
    assert len(set(colours)) == 3
    assert len({trace["line"]["dash"] for trace in curves["data"][:3]}) == 3


def test_no_table_scrolls_at_1300_pixels(browser, tmp_path):
    """With eight settings that differ, and long names."""
    more = {"partition": "dirichlet(beta=0.3)", "augment": "crop_flip", "participation": "sample(m=5)", "lr": 0.01,
            "noise": "sas(alpha=1.2, tau=0.3)", "model": "logistic()", "server": "momentum(beta=0.8)"}  # fmt: skip
    runs = [made([0.1, 0.2], clients=9, receiver=f"mac(C={C})", **settings) for C in (1, 2) for settings in ({}, more)]
    for run in runs:
        for row in run.rounds:
            row["channel/snr_db"] = -30.0
    browser.set_window_size(1300, 900)
    browser.get(report.write(report.page(runs), tmp_path / "report.html").as_uri())
    elements = "[document.documentElement, ...document.querySelectorAll('.scroll')]"
    assert set(browser.execute_script(f"return {elements}.map(one => one.scrollWidth - one.clientWidth)")) == {0}


def test_on_a_narrow_screen_panels_are_stacked_and_names_do_not_break(browser, page, tmp_path):
    from selenium.webdriver.support.ui import WebDriverWait

    overhang = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    broken = """return [...document.querySelectorAll('td')].filter(cell => {
      const range = document.createRange();
      const words = [...cell.childNodes].filter(node => node.nodeType === 3).flatMap(node =>
        [...node.data.matchAll(/\\S+/g)].map(match => [node, match.index, match.index + match[0].length]));
      return words.some(([node, start, end]) => {
        range.setStart(node, start); range.setEnd(node, end);
        return new Set([...range.getClientRects()].map(one => one.top)).size > 1;
      });
    }).map(cell => cell.textContent).filter(text => !/[-\\/]/.test(text))"""  # a browser may break after these
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    try:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(report.write(page, tmp_path / "report.html").as_uri())
        drawn = "return !!document.querySelector('#plot-curves .legend')"
        WebDriverWait(browser, 30).until(lambda b: b.execute_script(drawn))
        assert browser.execute_script(overhang) <= 0
        assert browser.execute_script(broken) == []
        axes = "return document.querySelector('#plot-curves')._fullLayout"
        narrow = [browser.execute_script(f"{axes}.{name}.domain[0]") for name in ("xaxis", "xaxis2", "xaxis3")]
        assert narrow == [0, 0, 0]
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics | {"width": 1300})
        WebDriverWait(browser, 30).until(lambda b: b.execute_script(f"{axes}.xaxis2.domain[0]") > 0.5)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
