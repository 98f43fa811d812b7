"""The data folder, and the conversion of data sets of the hub, with small local files in the schema of the hub."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from safetensors.numpy import save_file

from stableair.data import hub
from stableair.data.datasets import dataset, stored
from stableair.errors import InputError, MissingExtraError

pytest.importorskip("datasets", reason="the hub's library is not installed")
from datasets import ClassLabel, Dataset, Features, Image, Value

TWO_IMAGES = {
    f"{split}.{part}": values
    for split in ("train", "test")
    for part, values in {"x": np.zeros((2, 4, 4, 1), np.uint8), "y": np.arange(2)}.items()
}


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty data folder."""
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "data"))
    return tmp_path / "data"


def random_images(n, mode="RGB", size=(8, 6), seed=0):
    rng = np.random.default_rng(seed)
    shape = (n, size[1], size[0]) + ((3,) if mode == "RGB" else ())
    return [Picture.fromarray(pixels) for pixels in rng.integers(256, size=shape, dtype=np.uint8)]


def write(folder, split, columns, features):
    folder.mkdir(exist_ok=True)
    rows = Dataset.from_dict(columns, features=Features(features))
    rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def cifar_like(tmp_path):
    """Two splits with the columns img and label, as in uoft-cs/cifar10."""
    source = {
        split: {"img": random_images(n, size=(32, 32), seed=n), "label": list(np.arange(n) % 3)}
        for split, n in (("train", 12), ("test", 6))
    }
    for split, columns in source.items():
        write(tmp_path / "like", split, columns, {"img": Image(), "label": ClassLabel(names=["a", "b", "c"])})
    return tmp_path / "like", source


@pytest.fixture
def femnist_like(tmp_path):
    """A train split only, with the columns of flwrlabs/femnist; writers of 1, 2, 20 and 37 images."""
    writers = ["f_1"] * 1 + ["f_2"] * 2 + ["f_9"] * 20 + ["f_3"] * 37
    order = np.random.default_rng(1).permutation(len(writers))
    columns = {
        "image": random_images(len(writers), "L", size=(28, 28)),
        "writer_id": [writers[i] for i in order],
        "hsf_id": [0] * len(writers),
        "character": list(np.arange(len(writers)) % 5),
    }
    features = {
        "image": Image(), "writer_id": Value("string"), "hsf_id": Value("int64"),
        "character": ClassLabel(names=list("abcde")),
    }  # fmt: skip
    write(tmp_path / "femnist-like", "train", columns, features)
    return tmp_path / "femnist-like", columns


def test_a_set_is_prepared_once_with_its_pixels_and_labels(cifar_like, empty, monkeypatch):
    folder, source = cifar_like
    monkeypatch.setitem(hub.NAMED, "cifar10", hub.Source(str(folder), "img", "label"))
    data = dataset.one("cifar10")()
    for split, content in source.items():
        got = getattr(data, split)
        pixels = np.stack([np.asarray(image) for image in content["img"]])
        assert torch.equal(got.x, torch.from_numpy(pixels).permute(0, 3, 1, 2))
        assert got.y.tolist() == [int(y) for y in content["label"]]
    assert data.classes == 10
    about = json.loads((empty / "cifar10.json").read_text())
    assert about["source"]["repo"] == str(folder)
    assert sorted(p.name for p in empty.iterdir()) == ["cifar10.json", "cifar10.safetensors"]
    monkeypatch.setattr(hub, "_fetch", lambda *_: pytest.fail("downloaded twice"))
    dataset.one("cifar10")()
    assert hub.prepare("cifar10", hub.NAMED["cifar10"]) == empty / "cifar10.safetensors"
    assert dict(data.files) == {"cifar10.safetensors": about["sha256"]}


def test_without_a_test_split_a_tenth_of_each_writer_is_held_out(femnist_like, empty, monkeypatch):
    folder, columns = femnist_like
    monkeypatch.setitem(hub.NAMED, "femnist", hub.Source(str(folder), "image", "character", "writer_id"))
    data = dataset.one("femnist")()
    assert data.train.writer.bincount().tolist() == [1, 1, 33, 18]  # f_1, f_2, f_3, f_9 in the order of their names
    assert data.test.writer.bincount(minlength=4).tolist() == [0, 1, 4, 2]
    names = sorted(set(columns["writer_id"]))
    rows = zip(columns["image"], columns["character"], columns["writer_id"], strict=True)
    original = {(np.asarray(image).tobytes(), int(y), w) for image, y, w in rows}
    kept = {
        (x.numpy().tobytes(), int(y), names[w])
        for split in (data.train, data.test)
        for x, y, w in zip(split.x.contiguous(), split.y, split.writer, strict=True)
    }
    assert kept == original, "every image kept its label and its writer"
    hub.prepare("femnist", hub.NAMED["femnist"], again=True)
    assert torch.equal(dataset.one("femnist")().test.x, data.test.x), "the split is always the same"


def test_any_data_set_of_the_hub_can_be_used(cifar_like, empty):
    folder, _ = cifar_like
    data = dataset.one(f"hf(name='{folder}', image=img)")()
    assert (data.classes, tuple(data.train.x.shape), data.model) == (3, (12, 3, 32, 32), "cnn()")
    scaled = data.inputs(data.train.x)
    assert scaled.mean((0, 2, 3)).abs().max() < 1e-5
    assert stored(f"hf(name='{folder}', image=img)")[0] != stored(f"hf(name='{folder}', image=img, label=other)")[0]


def test_text_labels_become_numbers_common_to_both_splits(tmp_path, empty):
    features = {"image": Image(), "label": Value("string")}
    write(tmp_path / "s", "train", {"image": random_images(3), "label": ["dog", "cat", "emu"]}, features)
    write(tmp_path / "s", "test", {"image": random_images(2), "label": ["emu", "dog"]}, features)
    data = dataset.one(f"hf(name='{tmp_path / 's'}')")()
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([1, 0, 2], [2, 1])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("image=picture", "has no column 'picture'; its columns are img, label"),
        ("image=img, label=y", "has no column 'y'; its columns are img, label"),
        ("image=label, label=label", "column 'label' does not hold images; columns with images: ['img']"),
        ("image=img, label=3", "must be names"),
        ("image=img, train=99", "train must be at most 12"),
    ],
)
def test_wrong_columns_are_refused_with_the_existing_columns(cifar_like, empty, spec, expected):
    with pytest.raises(InputError) as error:
        dataset.one(f"hf(name='{cifar_like[0]}', {spec})")()
    assert expected in str(error.value)
    assert "train=" in spec or not any(empty.glob("*")), "no file is left"


def test_images_of_several_sizes_are_refused(tmp_path, empty):
    images = [*random_images(1), *random_images(1, size=(5, 5))]
    write(tmp_path / "s", "train", {"image": images, "label": [0, 1]}, {"image": Image(), "label": Value("int64")})
    with pytest.raises(InputError) as error:
        dataset.one(f"hf(name='{tmp_path / 's'}')")()
    assert (error.value.code, error.value.fields["row"]) == ("mixed-images", 1)


def test_without_network_and_file_the_error_names_command_folder_and_file(empty, monkeypatch):
    import datasets

    def unreachable(*_):
        raise ConnectionError("Couldn't reach it\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(InputError) as error:
        dataset.one("cifar100")()
    for part in ("stableair data prepare cifar100", "cifar100.safetensors", str(empty), hub.VARIABLE):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.hint == "data", "the command line has an option for it"


def test_a_prepared_data_set_does_not_need_the_datasets_library(data_folder, empty, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError) as error:
        dataset.one("cifar10")()
    assert (error.value.fields, error.value.hint) == ({"module": "datasets", "extra": "hub"}, "data")
    assert str(error.value) == (
        "data set cifar10(): cifar10 is not prepared; with a network: pip install 'stableair[hub]', then "
        f"stableair data prepare cifar10; without: copy cifar10.safetensors into {empty}; or set {hub.VARIABLE} to its "
        "folder"
    )
    empty.mkdir(exist_ok=True)
    (empty / "cifar10.safetensors").write_bytes((data_folder / "cifar10.safetensors").read_bytes())
    assert len(dataset.one("cifar10")().train.y) == 100
    assert "unchecked: its description cifar10.json is missing" in caplog.text


@pytest.mark.parametrize("with_description", [True, False])
@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b[:20], lambda b: b"", lambda b: b"x" * 500])
def test_a_damaged_file_is_named_and_not_loaded(data_folder, empty, damage, with_description):
    empty.mkdir()
    for name in ("cifar10.safetensors", "cifar10.json")[: 1 + with_description]:
        (empty / name).write_bytes((data_folder / name).read_bytes())
    path = empty / "cifar10.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError) as error:
        dataset.one("cifar10")()
    assert error.value.code == "corrupt-data"


def test_one_altered_pixel_is_found(data_folder, empty):
    empty.mkdir()
    for name in ("cifar10.safetensors", "cifar10.json"):
        (empty / name).write_bytes((data_folder / name).read_bytes())
    path = empty / "cifar10.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        dataset.one("cifar10")()
    assert error.value.code == "corrupt-data"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("test.y"), ("invalid-data-file", "test.y")),
        (lambda t: t.update({"train.x": t["train.x"].astype(np.float32)}), ("invalid-data-file", "train.x")),
        (lambda t: t.update({"train.y": t["train.y"][:-1]}), ("invalid-data-file", "train.y")),
        (lambda t: t.update({"train.y": t["train.y"] + 5}), ("invalid-data-file", "y")),
        (lambda t: t.update({"test.y": t["test.y"] - 1}), ("invalid-data-file", "test.y")),
        (lambda t: t.update({"test.x": t["test.x"][:, 2:, 2:].copy()}), ("invalid-data-file", "test.x")),
        (lambda t: t.update({"train.x": t["train.x"].transpose(0, 3, 1, 2).copy()}), ("invalid-data-file", "train.x")),
    ],
)
def test_a_file_of_another_form_is_refused(data_folder, empty, change, expected, monkeypatch):
    monkeypatch.setenv(hub.VARIABLE, str(data_folder))
    tensors = {key: t.numpy() for key, t in hub._tensors("cifar10").items()}
    change(tensors)
    monkeypatch.setenv(hub.VARIABLE, str(empty))
    empty.mkdir()
    save_file(tensors, empty / "cifar10.safetensors")
    with pytest.raises(InputError) as error:
        dataset.one("cifar10")()
    assert (error.value.code, error.value.fields.get("name")) == expected


def test_a_failed_write_leaves_nothing(empty, monkeypatch):
    monkeypatch.setattr(hub.os, "replace", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hub.write("a", {"train.x": np.zeros(3)}, hub.NAMED["cifar10"])
    assert not list(empty.iterdir())


def test_a_prepared_file_has_the_usual_permissions(empty):
    hub.write("a", TWO_IMAGES, hub.NAMED["cifar10"])
    (empty / "plain").touch()
    modes = {path.name: path.stat().st_mode for path in empty.iterdir()}
    assert modes == dict.fromkeys(["a.json", "a.safetensors", "plain"], (empty / "plain").stat().st_mode)
    save_file(TWO_IMAGES, empty / "other")
    assert (empty / "a.safetensors").read_bytes() == (empty / "other").read_bytes()


def test_a_file_that_cannot_be_written_is_named_and_the_old_description_stays(empty):
    hub.write("a", TWO_IMAGES, hub.NAMED["cifar10"])
    before = {path.name: path.read_bytes() for path in empty.iterdir()}
    with pytest.raises(InputError) as error:
        hub.write("a", {"train.x": np.zeros(3, complex)}, hub.NAMED["cifar10"])
    assert error.value.code == "cannot-write"
    assert {path.name: path.read_bytes() for path in empty.iterdir()} == before


def test_a_new_file_never_has_an_old_description(empty, monkeypatch):
    hub.write("a", TWO_IMAGES, hub.NAMED["cifar10"])
    monkeypatch.setattr(hub, "describe", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hub.write("a", TWO_IMAGES | {"train.y": np.arange(2)[::-1]}, hub.NAMED["cifar10"])
    assert [path.name for path in empty.iterdir()] == ["a.safetensors"]


def test_no_two_sources_share_a_file(tmp_path, monkeypatch):
    columns = [("a/b", "x", "y", "w"), ("a/b", "x", "y", None, "w"), ("a/b", "y", "x")]
    names = [hub.Source(*each).name for each in [("a-b/c", "x", "y"), ("a/b-c", "x", "y"), *columns]]
    for folder in ("one", "two"):  # the same relative path in another folder is another set
        (tmp_path / folder / "letters").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / folder)
        names.append(hub.Source("./letters", "x", "y").name)
    assert len(set(names)) == len(names)


def test_a_folder_without_write_permission_is_refused_before_any_download(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "file" / "data"))
    monkeypatch.setattr(hub, "_fetch", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(InputError) as error:
        hub.prepare("cifar10", hub.NAMED["cifar10"])
    assert error.value.code == "cannot-write"


def test_the_check_of_a_missing_data_folder_creates_nothing(tmp_path, monkeypatch):
    """Otherwise one process could remove a folder that another one is about to write to."""
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "new" / "data"))
    for name in ("mkdir", "rmdir"):
        monkeypatch.setattr(Path, name, lambda *_, **__: pytest.fail("a folder was changed"))
    hub._check_writable()
    assert not [*tmp_path.iterdir()]


def test_a_validation_split_is_used_if_there_is_no_test_split(tmp_path, empty):
    features = {"image": Image(), "label": Value("int64")}
    write(tmp_path / "s", "train", {"image": random_images(3), "label": [0, 5, 9]}, features)
    write(tmp_path / "s", "validation", {"image": random_images(2), "label": [9, 0]}, features)
    data = dataset.one(f"hf(name='{tmp_path / 's'}')")()
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 1, 2], [2, 0])
    assert data.classes == 3, "no class is empty"


def test_samples_without_a_label_are_refused(tmp_path, empty):
    features = {"image": Image(), "label": Value("int64")}
    write(tmp_path / "s", "train", {"image": random_images(2), "label": [0, 1]}, features)
    write(tmp_path / "s", "test", {"image": random_images(1), "label": [-1]}, features)
    with pytest.raises(InputError) as error:
        dataset.one(f"hf(name='{tmp_path / 's'}')")()
    assert (error.value.code, error.value.fields["row"]) == ("missing-label", 0)


def test_the_data_folder_is_the_variable_or_the_user_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(hub.VARIABLE, "/elsewhere")
    assert str(hub.folder()) == "/elsewhere"
    monkeypatch.delenv(hub.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.folder() == tmp_path / "stableair"


def test_a_folder_without_images_is_refused_before_it_is_searched(tmp_path, empty):
    (tmp_path / "texts").mkdir()
    for i in range(3):
        (tmp_path / "texts" / f"{i}.json").write_text('[{"image": 1, "label": 2}]')
    for repo in (tmp_path / "texts", "/proc"):
        with pytest.raises(InputError) as error:
            dataset.one(f"hf('{repo}')")()
        assert error.value.code == "not-an-image-set"


def test_a_missing_home_folder_is_one_line_with_the_variable_to_set(monkeypatch):
    monkeypatch.delenv(hub.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(hub.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(InputError) as error:
        hub.folder()
    assert error.value.code == "no-data-folder"
