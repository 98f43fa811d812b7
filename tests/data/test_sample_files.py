"""CSV and npz files of the user: their content, and errors in one line."""

import numpy as np
import pytest
import torch

import stableair as sa
from helpers.errors import refused
from stableair.data.datasets import dataset

SPEC = "csv(path='flowers.csv', label=species, writer=gardener)"
HEAD = "a,b,label\n"


def test_csv_columns_are_read(sample_files):
    data = dataset.one(SPEC)()
    assert (data.train.x.shape, data.test.x.shape, data.classes) == ((16, 2), (4, 2), 2)
    assert data.train.writer.unique().tolist() == [0, 1, 2]
    label = {0: "iris", 1: "rose"}
    rows = {
        tuple(map(float, row[:2])): row[2]
        for row in (line.split(",") for line in (sample_files / "flowers.csv").read_text().splitlines()[1:])
    }
    for split in (data.train, data.test):
        for x, y in zip(split.x.tolist(), split.y.tolist(), strict=True):
            nearest = min(rows, key=lambda row: abs(row[0] - x[0]) + abs(row[1] - x[1]))
            assert rows[nearest] == label[y]
    assert dataset.one("csv('flowers.csv', species, features=width, test=0.5)")().train.x.shape == (10, 1)
    assert sa.Dataset.from_csv("flowers.csv", "species", features=("width", "length")).train.x.shape == (16, 2)


def test_a_csv_test_file_is_read(sample_files):
    (sample_files / "test.csv").write_text("width,species,length,gardener\n1,rose,2,g\n")
    data = sa.Dataset.from_csv("flowers.csv", "species", test_path="test.csv", writer="gardener")
    assert data.test.x.tolist() == [[2.0, 1.0]], "columns are found by name"
    assert data.test.y.tolist() == [1]
    assert [name for name, _ in data.files] == ["flowers.csv", "test.csv"]


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        (["10", "9"], [1, 0]),
        (["1.0", "0"], [1, 0]),
        (["NA", "None"], [0, 1]),
        (["True", "False"], [1, 0]),
        (["2", "x"], [0, 1]),
    ],
)
def test_labels_of_a_csv(sample_files, labels, numbers):
    (sample_files / "a.csv").write_text(HEAD + "".join(f"1,2,{label}\n" for label in labels))
    (sample_files / "b.csv").write_text(HEAD + f"1,2,{labels[0]}\n")
    assert sa.Dataset.from_csv("a.csv", "label", test_path="b.csv").train.y.tolist() == numbers


def test_other_separators_and_a_byte_order_mark(sample_files):
    text = (sample_files / "flowers.csv").read_text().replace(",", ";")
    (sample_files / "semicolons.csv").write_text(text, "utf-8-sig")
    data = sa.Dataset.from_csv("semicolons.csv", "species", sep=";", features=("length", "width"))
    assert torch.equal(
        data.train.x, sa.Dataset.from_csv("flowers.csv", "species", features=("length", "width")).train.x
    )


@pytest.mark.parametrize(
    ("code", "text", "fields"),
    [
        ("invalid-feature", HEAD + "1,2,0\n1,red,1\n", {"row": 1, "column": "b", "value": "red"}),
        ("invalid-feature", HEAD + "1,2,0\n1,,1\n", {"row": 1, "column": "b", "value": ""}),
        ("invalid-feature", HEAD + "nan,2,0\n1,2,1\n", {"row": 0, "column": "a"}),
        ("invalid-feature", HEAD + "1,inf,0\n1,2,1\n", {"row": 0, "column": "b"}),
        ("invalid-feature", HEAD + "1,2,0\n1e39,2,1\n", {"row": 1, "column": "a", "value": 1e39}),
        ("missing-label", HEAD + "1,2,0\n1,2,\n", {"row": 1, "column": "label", "value": ""}),
        ("missing-label", HEAD + "1,2,x\n1,2\n", {"row": 1, "column": "label"}),
        ("missing-label", HEAD + "1,2,0\n1,2,-1\n", {"row": 1, "value": -1}),
        ("invalid-label", HEAD + "1,2,0\n1,2,1.5\n", {"row": 1, "column": "label", "value": 1.5}),
        ("unknown-column", "a,b,class\n1,2,0\n", {"name": "label", "allowed": ["a", "b", "class"]}),
        ("wrong-columns", "label\n0\n1\n", {}),
        ("empty-data", HEAD, {}),
        ("unreadable-file", "", {}),
        ("unreadable-file", "\n\n", {}),
        ("unreadable-file", HEAD + "1,2,0\n1,2,3,4\n", {}),
        ("unreadable-file", HEAD + "1,2,0,9\n1,2,1,9\n", {}),
        ("unreadable-file", "a,a,label\n1,2,0\n1,2,1\n", {}),
        ("unreadable-file", ",a,label\n0,1,0\n1,2,1\n", {}),
        ("unreadable-file", b"\xff\xfe\x00\xd8", {}),
    ],
)
def test_bad_csv_is_one_line_that_names_the_file(sample_files, code, text, fields):
    (sample_files / "bad.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    error = refused(code, lambda: sa.Dataset.from_csv("bad.csv", "label"))
    assert "bad.csv" in str(error)
    assert {key: error.fields[key] for key in fields} == fields


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a;b;class\n1;2;0\n", "the file has only one column, 'a;b;class'; if its separator is ';', set sep=';'"),
        ("5.1,3.5,setosa\n4.9,3,setosa\n", "the first line must contain the column names: got '5.1, 3.5, setosa'"),
        ("1,1,2\n4,5,6\n", "the first line must contain the column names: got '1, 1, 2'"),
        (HEAD + "1,2,0\n1,red,1\n", "bad.csv, line 3: column 'b'"),
        (HEAD + "\n1,2,0\n  \n1,red,1\n", "bad.csv, line 5: column 'b'"),
        (HEAD + '1,2,"x\ny"\n1,2,\n', "bad.csv, line 4: column 'label'"),
        (HEAD + "1,2,0\n1,2,7\n", "bad.csv: column 'label', line 3: the label 7"),
    ],
)
def test_text_of_csv_errors(sample_files, text, part):
    (sample_files / "bad.csv").write_text(text)
    with pytest.raises(sa.InputError) as error:
        sa.Dataset.from_csv("bad.csv", "label", classes=2)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("5.1,3.5,0\n4.9,3,1\n", "0"),
        ("5.1,3.5,setosa\n4.9,3,lily\n4.7,3.2,setosa\n", "setosa"),
        ("1,0,2\n0,1,3\n", "2"),
    ],
)
def test_a_first_line_with_a_sample_is_refused(sample_files, text, label):
    (sample_files / "bad.csv").write_text(text)
    error = refused("missing-column-names", lambda: sa.Dataset.from_csv("bad.csv", label, test=0.5))
    assert "bad.csv: the first line must contain the column names" in str(error)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("0,1,2\n4.9,3,1\n5,3,0\n5,4,1\n5,5,0\n", "2"),  # a data frame of pandas without names
        ("400.5,410.5,label\n4.9,3,a\n5,3,b\n5,4,a\n5,5,b\n", "label"),  # wavelengths
        ("1,2,class\n4.9,3,a\n5,3,b\n5,4,a\n5,5,b\n", "class"),
    ],
)
def test_column_names_may_be_numbers(sample_files, text, label):
    (sample_files / "numbers.csv").write_text(text)
    assert len(sa.Dataset.from_csv("numbers.csv", label, test=0.5).train.y) == 2


def test_invalid_files_and_arguments_are_refused(sample_files):
    refused("unreadable-file", lambda: sa.Dataset.from_csv("nothing.csv", "label"))
    refused("unreadable-file", lambda: sa.Dataset.from_csv(".", "label"))
    refused("wrong-columns", lambda: sa.Dataset.from_csv("flowers.csv", "species", features=("species",)))
    refused("unknown-column", lambda: sa.Dataset.from_csv("flowers.csv", "species", features="petal"))
    refused("wrong-type", lambda: sa.Dataset.from_csv("flowers.csv", 3))
    error = refused("invalid-feature", lambda: sa.Dataset.from_csv("flowers.csv", "species"))
    assert error.fields["column"] == "gardener"
    (sample_files / "other.csv").write_text("length,width,species\n1,2,lily\n")
    columns = {"features": ("length", "width"), "test_path": "other.csv"}
    error = refused("unknown-class", lambda: sa.Dataset.from_csv("flowers.csv", "species", **columns))
    assert "other.csv" in str(error)
    assert error.fields["value"] == "lily"


def test_npz_files_are_read(sample_files):
    data = dataset.one("npz('tokens.npz', test=0.5)")()
    assert data.train.x.dtype == torch.int64
    assert sorted(torch.cat([data.train.x, data.test.x]).tolist()) == sorted(np.load("tokens.npz")["x"].tolist())
    x = np.arange(24.0).reshape(12, 2)
    for names in (("x", "y", "x_test", "y_test", "writer"), ("train.x", "train.y", "test.x", "test.y", "train.writer")):
        y = np.arange(12) % 2
        np.savez("data.npz", **dict(zip(names, (x, y, x[:3] + 1, y[:3], y), strict=True)))
        data = sa.Dataset.from_npz("data.npz")
        assert data.train.x.tolist() == x.tolist()
        assert data.test.x.tolist() == (x[:3] + 1).tolist()
        assert data.train.writer.tolist() == y.tolist()


@pytest.mark.parametrize(
    ("code", "arrays"),
    [
        ("missing-array", {"x": np.ones((4, 2))}),
        ("missing-array", {"x": np.ones((4, 2)), "y": np.arange(4), "x_test": np.ones((4, 2))}),
        ("unequal-lengths", {"x": np.ones((4, 2)), "y": np.arange(3)}),
        ("unreadable-file", {"x": np.ones((4, 2)), "y": np.array([{}, {}, {}, {}])}),
        ("missing-label", {"x": np.ones((4, 2)), "y": np.array([0, np.nan, 1, 1])}),
    ],
)
def test_bad_npz_is_one_line_that_names_the_file(sample_files, code, arrays):
    np.savez("bad.npz", **arrays)
    assert "bad.npz" in str(refused(code, lambda: sa.Dataset.from_npz("bad.npz")))


def test_a_file_that_is_not_npz_is_refused(sample_files):
    for name in ("flowers.csv", "nothing.npz"):
        refused("unreadable-file", lambda name=name: sa.Dataset.from_npz(name))


@pytest.mark.parametrize("spec", [SPEC, "npz(path='tokens.npz')"])
def test_changed_file_is_refused_on_resume(sample_files, tiny, spec):
    model = "logistic()"
    if "tokens" in spec:
        np.savez("tokens.npz", x=np.load("tokens.npz")["x"] / 7, y=np.load("tokens.npz")["y"])
    experiment = tiny.with_(data=spec, model=model, clients=3, rounds=2)
    sa.run(experiment.with_(rounds=1), "run")
    assert len(sa.run(experiment, "run", resume=True)) == 2, "the same file is accepted"
    if "tokens" in spec:
        np.savez("tokens.npz", x=np.load("tokens.npz")["x"] * 2, y=np.load("tokens.npz")["y"])
    else:
        (sample_files / "flowers.csv").write_text((sample_files / "flowers.csv").read_text().replace("0.1", "0.2"))
    refused("data-changed", lambda: sa.run(experiment.with_(rounds=3), "run", resume=True))


def test_the_commands_read_csv_and_npz_files(sample_files, command, monkeypatch):
    monkeypatch.chdir(sample_files)
    shown, _, errors = command("data", "show", "npz(path='tokens.npz')", "--clients", "3", "-o", "labels.png")
    assert shown == 0, errors
    settings = ["data=csv(path=\"flowers.csv\", label=species, features=('length', 'width'))", "rounds=1", "clients=4"]
    code, _, errors = command("run", *settings, "--out", "run")
    assert code == 0, errors
    assert sa.load("run").environments[0]["data"].keys() == {"flowers.csv"}
    code, _, errors = command("run", "data=csv", "data.path=flowers.csv", "data.label=gender", "rounds=1")
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "gender" in errors
