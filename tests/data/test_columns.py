"""Rows of parquet files: labels that are missing, and paths that lead out of the data set."""

import numpy as np
import pytest

from stableair.data import hub
from stableair.data.columns import _roots
from stableair.data.datasets import dataset
from stableair.errors import InputError

pytest.importorskip("datasets", reason="the hub's library is not installed")
import datasets
import pyarrow as pa
from datasets import Features, Value
from PIL import Image
from pyarrow import parquet

IMAGES = [Image.fromarray(np.full((6, 8), i, np.uint8)) for i in range(4)]


@pytest.fixture(autouse=True)
def empty_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "data"))


def load(folder, **options):
    arguments = "".join(f", {key}={value}" for key, value in options.items())
    return dataset.one(f"hf(name='{folder}'{arguments})")()


def refused(folder, **options):
    with pytest.raises(InputError) as error:
        load(folder, **options)
    assert "\n" not in str(error.value)
    return error.value


def write_set(folder, labels, kind, **columns):
    folder.mkdir()
    features = {"image": datasets.Image(), "label": kind} | {key: Value("string") for key in columns}
    rows = {"image": IMAGES[: len(labels)], "label": labels} | columns
    datasets.Dataset.from_dict(rows, features=Features(features)).to_parquet(folder / "train.parquet")
    return folder


@pytest.mark.parametrize(
    ("labels", "kind", "row"),
    [
        ([0.0, 1.0, float("nan")], Value("float64"), 2),
        ([0.0, -1.0, 1.0], Value("float32"), 1),
        ([0, None, 1], Value("int64"), 1),
        ([0, 1, -1], Value("int64"), 2),
        ([0, 1, None], datasets.ClassLabel(names=["a", "b"]), 2),
        (["", "a", "b"], Value("string"), 0),
        (["a", " \t", "b"], Value("string"), 1),
        (["a", "b", None], Value("string"), 2),
        ([True, None, False], Value("bool"), 1),
    ],
)
def test_a_missing_label_is_refused_with_its_row(tmp_path, labels, kind, row):
    error = refused(write_set(tmp_path / "s", labels, kind))
    assert (error.code, error.fields["row"], error.fields["column"]) == ("missing-label", row, "label")


def test_a_missing_writer_is_refused_with_its_row(tmp_path):
    error = refused(write_set(tmp_path / "s", [0, 1, 0], Value("int64"), who=["x", "", "y"]), writer="who")
    assert (error.code, error.fields["row"], error.fields["column"]) == ("missing-label", 1, "who")


@pytest.mark.parametrize(
    ("labels", "kind", "row"),
    [
        ([0.0, 0.5, 1.0], Value("float64"), 1),
        ([0.0, 1.0, float("inf")], Value("float64"), 2),
        ([[0], [1], [1]], datasets.Sequence(Value("int64")), 0),
    ],
)
def test_a_label_that_is_no_class_is_refused_with_its_row(tmp_path, labels, kind, row):
    error = refused(write_set(tmp_path / "s", labels, kind))
    assert (error.code, error.fields["row"]) == ("invalid-label", row)


@pytest.mark.parametrize(
    ("labels", "kind", "numbers"),
    [
        ([0.0, 1.0, 1.0, 0.0], Value("float64"), [0, 1, 1, 0]),
        ([True, False, True, False], Value("bool"), [1, 0, 1, 0]),
        (["10", "9", "10", "9"], Value("string"), [0, 1, 0, 1]),
        ([7, 300, 7, 300], Value("uint16"), [0, 1, 0, 1]),
    ],
)
def test_whole_numbers_booleans_and_text_are_classes(tmp_path, labels, kind, numbers):
    data = load(write_set(tmp_path / "s", labels, kind))
    class_of = {
        int(x[0, 0, 0]): int(y) for split in (data.train, data.test) for x, y in zip(split.x, split.y, strict=True)
    }
    assert [class_of[i] for i in range(4)] == numbers


def write_set_with_paths(folder, paths, contents):
    """A parquet file in the hub's schema whose image column holds these paths and bytes."""
    folder.mkdir(exist_ok=True)
    features = Features({"image": datasets.Image(), "label": Value("int64")})
    rows = [{"bytes": content, "path": path} for content, path in zip(contents, paths, strict=True)]
    image = pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table({"image": image, "label": list(range(len(paths)))})
    table = table.replace_schema_metadata(features.arrow_schema.metadata)
    parquet.write_table(table, folder / "train.parquet")
    return folder


@pytest.fixture
def secret(tmp_path):
    """An image of the user, outside the data set."""
    IMAGES[0].save(tmp_path / "secret.png")
    return tmp_path / "secret.png"


@pytest.mark.parametrize(
    "path", ["{secret}", "../secret.png", "pictures/../../secret.png", "file://{secret}", "{cache}"]
)
def test_a_path_outside_the_data_set_is_not_read(tmp_path, secret, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = datasets.config.DOWNLOADED_DATASETS_PATH / "x.png"
    path = path.format(secret=secret, cache=cache)
    error = refused(write_set_with_paths(tmp_path / "s", [path] * 3, [None] * 3))
    outside = "path-outside-data" if "://" not in path else "unusable-image"  # a folder "file:" that is not there
    assert error.code == outside
    assert not list((tmp_path / "data").glob("*"))


def test_a_path_below_the_data_set_is_read_and_embedded_bytes_have_priority(tmp_path, secret):
    (tmp_path / "s").mkdir()
    for i in range(3):
        IMAGES[i].save(tmp_path / "s" / f"{i}.png")
    paths = ["0.png", str(tmp_path / "s" / "1.png"), "./2.png", str(secret)]
    IMAGES[3].save(tmp_path / "3.png")
    embedded = (tmp_path / "3.png").read_bytes()
    write_set_with_paths(tmp_path / "s", paths, [None, None, None, embedded])
    (tmp_path / "s" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: train.parquet\n---\n"
    )
    data = load(tmp_path / "s")
    assert sorted(int(x[0, 0, 0]) for split in (data.train, data.test) for x in split.x) == [0, 1, 2, 3]


def test_a_metadata_file_with_a_path_outside_the_folder_is_refused(tmp_path, secret):
    (tmp_path / "s").mkdir()
    IMAGES[1].save(tmp_path / "s" / "1.png")
    (tmp_path / "s" / "metadata.csv").write_text("file_name,label\n1.png,0\n../secret.png,1\n")
    assert refused(tmp_path / "s").code == "path-outside-data"


def test_a_single_sample_cannot_be_divided(tmp_path):
    error = refused(write_set(tmp_path / "s", [0], Value("int64")))
    assert (error.code, error.fields["samples"]) == ("too-few-samples", 1)
    assert not list((tmp_path / "data").glob("*")), "no file is left"


def test_a_row_without_an_image_is_refused(tmp_path):
    error = refused(write_set_with_paths(tmp_path / "s", [None, None], [None, None]))
    assert error.code == "missing-image"
    assert "row 0" in str(error)


def test_a_set_on_the_hub_reads_files_of_its_part_of_the_cache():
    from huggingface_hub import constants

    rows = datasets.Dataset.from_dict({"label": [0]})
    assert _roots(rows, hub.Source("user/set", "image", "label")) == [
        hub.Path(constants.HF_HUB_CACHE) / "datasets--user--set"
    ]
