"""Tables of runs: DataFrames, CSV, Parquet and LaTeX."""

import math

import pandas
import pytest

import stableair as sa
from stableair import optional
from stableair.results.run import Run
from stableair.results.table import export, table


def made(accuracy, evaluate="test", **settings):
    rows = [{"round": k, f"{evaluate}/accuracy": a, "seconds": 1.0} for k, a in enumerate(accuracy)]
    return Run(sa.Experiment(evaluate=evaluate).with_(**settings).to_record(), rows)


RUNS = [made([0.1, 0.5], receiver=f"mac(C={C})", seed=seed) for C in (10, 2) for seed in (1, 0)]


def code_of(call, *args, **options):
    with pytest.raises(sa.StableairError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return error.value.code


def test_a_row_per_run_with_the_arguments_that_differ():
    frame = table(RUNS)
    assert list(frame) == ["receiver.C", "seed", "rounds", "diverged", "test/accuracy", "seconds"]
    assert frame[["receiver.C", "seed"]].values.tolist() == [[2, 0], [2, 1], [10, 0], [10, 1]], "in numerical order"
    assert frame["test/accuracy"].tolist() == [0.5] * 4, "the last value"


def test_a_row_per_round():
    frame = table(RUNS, "round")
    assert list(frame) == ["receiver.C", "seed", "round", "test/accuracy", "seconds"]
    assert frame["round"].tolist() == [0, 1] * 4
    assert frame["test/accuracy"].tolist() == [0.1, 0.5] * 4


def test_the_mean_of_the_last_rounds():
    run = made([0.0, 0.2, 0.4])
    assert table([run], last=2)["test/accuracy"].tolist() == [pytest.approx(0.3)]
    assert table([run], last=99)["test/accuracy"].tolist() == [pytest.approx(0.2)]


def test_a_run_that_diverged_has_no_metrics():
    run = made([0.4, None])
    run.rounds[-1]["diverged"] = True
    frame = table([run, made([0.5], seed=1)], last=2)
    assert frame["diverged"].tolist() == [True, False]
    assert math.isnan(frame["test/accuracy"].iloc[0])


def test_metrics_that_a_run_lacks_are_missing_values(caplog):
    mixed = [made([0.5]), made([0.7], evaluate="validation"), made([], seed=1)]
    frame = table(mixed)
    assert frame["evaluate"].tolist() == ["test", "validation"]
    assert frame["validation/accuracy"].isna().tolist() == [True, False]
    assert "no complete round" in caplog.text
    assert table(mixed, metrics=["test/accuracy"])["test/accuracy"].tolist() == [0.5]
    assert "has no test/accuracy" in caplog.text


def test_invalid_input_is_refused(tmp_path):
    assert code_of(table, []) == "no-rounds"
    assert code_of(table, tmp_path) == "no-run"
    assert code_of(table, [made([])]) == "no-rounds"
    assert code_of(table, RUNS, "seed") == "wrong-type"
    assert code_of(table, RUNS, metrics=["accuracy"]) == "unknown-metric"
    assert code_of(table, RUNS, last=0) == "out-of-range"
    for name in ("a.xlsx", "a", "a.tex.gz"):
        assert code_of(export, RUNS, tmp_path / name) == "unknown-format"
    (tmp_path / "mine.csv").write_text("a,b\n")
    assert code_of(export, RUNS, tmp_path / "mine.csv") == "file-exists"
    assert (tmp_path / "mine.csv").read_text() == "a,b\n"
    (tmp_path / "file").write_text("")
    assert code_of(export, RUNS, tmp_path / "file" / "a.csv") == "cannot-write"


@pytest.mark.parametrize("per", ["run", "round"])
@pytest.mark.parametrize(("name", "read"), [("a.csv", pandas.read_csv), ("a.parquet", pandas.read_parquet)])
def test_a_file_holds_the_table_and_replaces_its_older_version(tmp_path, per, name, read):
    for runs in (RUNS[:1], RUNS):
        path = export(runs, tmp_path / name, per)
    pandas.testing.assert_frame_equal(
        read(path).reset_index().drop(columns=["index", "run folder"], errors="ignore"),
        table(RUNS, per).reset_index(drop=True),
    )


def test_numbers_and_texts_in_one_column_fit_into_parquet(tmp_path):
    runs = [made([0.5], receiver=f"mac(C={C})") for C in (1, "auto")]
    assert table(runs)["receiver.C"].tolist() == [1, "auto"]
    assert pandas.read_parquet(export(runs, tmp_path / "a.parquet"))["receiver.C"].tolist() == ["1", "auto"]


def test_latex_has_rules_of_booktabs_and_escaped_names(tmp_path):
    runs = [made([0.5], partition=f"dirichlet_by_class(beta={beta})") for beta in (0.3, 3)]
    runs += [made([0.25], partition="iid()")]
    for _ in range(2):
        text = export(runs, tmp_path / "a.tex", metrics=["test/accuracy"]).read_text()
    assert "\n% a row per run; metrics of the last round; seeds: " in text
    assert [rule in text for rule in ("\\toprule", "\\midrule", "\\bottomrule")] == [True] * 3
    assert "dirichlet\\_by\\_class & 0.3 & 1 & False & 50" in text
    assert "iid & -- & 1 & False & 25" in text
    assert "test/accuracy (\\%)" in text
    values = sa.table(runs, metrics=["test/accuracy"])["test/accuracy"].tolist()
    assert sorted(values) == [0.25, 0.5, 0.5], "the table itself has fractions"


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    def missing(module):
        raise ImportError(module)

    monkeypatch.setattr(optional, "import_module", missing)
    with pytest.raises(sa.MissingExtraError) as error:
        export(RUNS, tmp_path / "a.parquet")
    assert error.value.fields["extra"] == "parquet"


def test_the_index_is_the_run_folder(tiny, tmp_path):
    sa.run(tiny, tmp_path / "a")
    assert table(tmp_path).index.tolist() == [str(tmp_path / "a")]
    assert set(table(tmp_path, "round").index) == {str(tmp_path / "a")}
