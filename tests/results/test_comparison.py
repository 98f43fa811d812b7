"""A comparison as a DataFrame and as a LaTeX table."""

import numpy as np
import pandas
import pytest

import stableair as sa
from stableair.cli.sweeps import parse_labels
from stableair.comparisons import comparison
from stableair.results.run import Run


def made(accuracy, **settings):
    return Run(sa.Experiment(**settings).to_record(), [{"round": 0, "test/accuracy": accuracy, "seconds": 2.0}])


LEVELS = {"mac(C=1)": (0.8, 0.6), "clip(C=1)": (0.7, 0.3), "quantile_clip(q=0.9)": (0.2, 0.1)}
RUNS = [
    made(level + offset, receiver=receiver, noise=noise, seed=seed)
    for receiver, levels in LEVELS.items()
    for level, noise in zip(levels, ("none()", "sas(alpha=1.5, tau=0.3)"), strict=True)
    for seed, offset in enumerate((0.01, -0.03))
]


def test_a_row_per_line():
    found = comparison(RUNS)
    frame = found.to_pandas()
    assert frame["channel"].tolist() == ["none()"] * 3 + ["sas(alpha=1.5, tau=0.3)"] * 3
    second = frame.iloc[1]
    assert (second["receiver"], second["seeds"], second["diverged"]) == ("clip(C=1)", 2, 0)
    assert second["accuracy"] == pytest.approx(0.69)
    assert second["std"] == pytest.approx(np.std([0.71, 0.67], ddof=1))
    assert second[["behind", "low", "high"]].tolist() == pytest.approx([0.1, 0.1, 0.1])
    assert frame["behind"].isna().tolist() == [True, False, False] * 2, "the best is behind none"


def test_behind_has_the_sign_of_the_printed_table():
    runs = [made(0.5, receiver="mac(C=1)", seed=i) for i in range(3)]
    runs += [made(0.6, receiver="clip(C=1)", seed=0), made(0.1, receiver="clip(C=1)", seed=7)]
    behind = comparison(runs).to_pandas().set_index("receiver")["behind"]["clip(C=1)"]
    assert behind == pytest.approx(-0.1), "it is better on the common seed"
    assert "-10.00" in str(comparison(runs))


def test_latex_has_a_row_per_receiver_and_the_best_in_bold():
    comment, *lines = comparison(RUNS).to_latex().splitlines()
    assert comment.startswith("% accuracy on the test data: mean over the last 10 rounds of a run")
    assert "; 2 seeds per receiver: 0, 1; " in comment
    assert [lines[i] for i in (1, 3, -2)] == ["\\toprule", "\\midrule", "\\bottomrule"]
    assert lines[2] == "accuracy (\\%) & none() & sas(alpha=1.5, tau=0.3) \\\\"
    assert lines[4] == "mac(C=1) & \\textbf{79.00 $\\pm$ 2.83} & \\textbf{59.00 $\\pm$ 2.83} \\\\"
    assert lines[6] == "quantile\\_clip(q=0.9) & 19.00 $\\pm$ 2.83 & 9.00 $\\pm$ 2.83 \\\\"
    assert "\n".join(lines).count("textbf") == 2


def test_latex_marks_receivers_that_are_significantly_worse_if_there_are_enough_seeds():
    offsets = (0.01, -0.02, 0.03, 0.0, -0.01)
    levels = {"mac(C=1)": (0.8, 0.0), "clip(C=1)": (0.77, 0.05), "none()": (0.5, 0.01)}
    runs = [
        made(level + offset + own * (-1) ** seed, receiver=receiver, seed=seed)
        for receiver, (level, own) in levels.items()
        for seed, offset in enumerate(offsets)
    ]
    comment, *lines = comparison(runs).to_latex().splitlines()
    marks = {line.partition(" &")[0]: line.partition("$^")[2] for line in lines[4:7]}
    assert marks == {"mac(C=1)": "", "clip(C=1)": "", "none()": "{*}$ \\\\"}
    assert comment.endswith(
        "; * significantly worse than the best (p below 0.05, paired t-test with Holm's correction over the 3 pairs of "
        "a channel)"
    )
    few = comparison([run for run in runs if run.settings["seed"] < 4]).to_latex()
    assert "*" not in few, "no test with four seeds"


def test_latex_does_not_mark_a_receiver_that_is_better_on_the_common_seeds():
    """mac has the best mean, since it has one more seed than clip."""
    better = [made(0.6 + seed / 1000, receiver="clip(C=1)", seed=seed) for seed in range(5)]
    runs = [made(0.5 + seed**2 / 1000, receiver="mac(C=1)", seed=seed) for seed in range(5)]
    found = comparison([*better, *runs, *(made(0.99, receiver="mac(C=1)", seed=seed) for seed in range(5, 20))])
    (pair,) = next(iter(found.pairs.values()))
    assert (next(iter(found.lines.values()))[0].receiver, pair.better, pair.mark) == ("mac(C=1)", "clip(C=1)", "*")
    assert "$^{*}$" not in found.to_latex()


def test_a_receiver_without_a_run_on_a_channel_has_a_dash():
    found = comparison(
        [run for run in RUNS if run.settings["receiver"] != "clip(C=1)" or run.settings["noise"] == "none()"]
    )
    assert "clip(C=1) & 69.00 $\\pm$ 2.83 & --" in found.to_latex()


def test_labels_replace_names_and_keep_formulas():
    labels = {"mac(C=1)": "MAC_1, $C_1$", "none()": "no noise"}
    text = comparison(RUNS).to_latex(labels)
    assert "MAC\\_1, $C_1$ & \\textbf{79.00" in text
    assert "accuracy (\\%) & no noise & sas(" in text
    for wrong, code in (({"mac(C=2)": "x"}, "unknown-label"), ({"mac(C=1)": "x", "clip(C=1)": "x"}, "duplicate-label")):
        with pytest.raises(sa.InputError) as error:
            comparison(RUNS).to_latex(wrong)
        assert error.value.code == code


@pytest.mark.parametrize("spelling", ["none()", "none", "none() | mac(C=1)", "none | mac(C=1)"])
def test_labels_accept_both_spellings(spelling):
    receiver = "none() | mac(C=1)" if "mac" in spelling else "none"
    found = comparison([made(0.5, receiver=receiver), made(0.4, receiver="clip(C=1)")])
    assert "no clipping & \\textbf{50.00} \\\\" in found.to_latex({spelling: "no clipping"})
    words = [f"{spelling}=no clipping, $C = 1$", "clip(C=1)=clip"]
    assert list(parse_labels(words, found).values()) == ["no clipping, $C = 1$", "clip"]
    assert "no clipping, $C = 1$ & " in found.to_latex(parse_labels(words, found))


@pytest.mark.parametrize("ending", ["csv", "parquet", "tex"])
def test_a_file_replaces_its_older_version_only(ending, tmp_path):
    found, path = comparison(RUNS), tmp_path / f"a.{ending}"
    for _ in range(2):
        found.save(path)
    path.write_text("mine")
    with pytest.raises(sa.InputError) as error:
        found.save(path)
    assert error.value.code == "file-exists"
    found.save(path, force=True)
    if ending == "tex":
        assert path.read_text().endswith(found.to_latex())
    else:
        read = {"csv": pandas.read_csv, "parquet": pandas.read_parquet}[ending](path)
        pandas.testing.assert_frame_equal(
            read.reset_index()[list(found.to_pandas())], found.to_pandas(), check_dtype=False
        )
