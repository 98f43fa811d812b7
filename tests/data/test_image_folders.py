"""Local image folders: their conversion, and changes of their files."""

import json
import logging
import os
import shutil

import numpy as np
import pytest
import torch

from stableair.data import hub
from stableair.data.datasets import dataset, stored
from stableair.data.manifest import manifest
from stableair.errors import InputError

pytest.importorskip("datasets", reason="the hub's library is not installed")
from PIL import Image

RNG = np.random.default_rng(0)


def pixels(mode, level=0):
    """A random image of a class; the pixels of a higher class are brighter by a constant."""
    base = RNG.integers(40, size=(6, 8))
    if mode == "RGB":
        return (base[..., None] + np.array([60 * level, 0, 0])).astype(np.uint8)
    scale = {
        "L": (60, 0, np.uint8),
        "I;16": (500, 1000, np.uint16),
        "I": (10**5, 0, np.int32),
        "F": (100, 0, np.float32),
    }
    step, offset, dtype = scale[mode]
    image = (base + step * level + offset).astype(dtype)
    return image / np.float32(1000) if mode == "F" else image


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An image folder of two classes of 16-bit images, and an empty data folder."""
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "data"))
    return fill(tmp_path / "letters", "I;16")


def fill(folder, mode, extension="tiff", count=6):
    for level, name in enumerate("ab"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(pixels(mode, level)).save(folder / name / f"{i}.{extension}")
    return folder


def load(folder, **options):
    arguments = "".join(f", {key}={value}" for key, value in options.items())
    return dataset.one(f"hf(name='{folder}'{arguments})")()


def refused(folder, **options):
    with pytest.raises(InputError) as error:
        load(folder, **options)
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("mode", "stored_as", "used_as"),
    [("L", torch.uint8, torch.uint8), ("I;16", torch.uint16, torch.float32), ("I", torch.float32, torch.float32),
     ("F", torch.float32, torch.float32)],
)  # fmt: skip
def test_pixels_keep_their_values_and_are_scaled_by_their_spread(tmp_path, monkeypatch, mode, stored_as, used_as):
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "data"))
    folder = fill(tmp_path / "letters", mode)
    data = load(folder)
    assert hub._tensors(stored(str(folder))[0])["train.x"].dtype == stored_as
    assert data.train.x.dtype == used_as
    files = {np.asarray(Image.open(path)).astype(np.float32).tobytes() for path in folder.rglob("*.tiff")}
    kept = {x.float().numpy().tobytes() for split in (data.train, data.test) for x in split.x.contiguous()}
    assert kept == files
    scaled = data.inputs(data.train.x)
    assert scaled.mean().abs() < 1e-3
    assert (scaled.std() - 1).abs() < 1e-3
    first, second = (scaled[data.train.y == c].mean() for c in (0, 1))
    assert second - first > 1.5, "the classes differ after scaling as before"


def test_a_constant_float_channel_is_not_divided_by_zero(tmp_path, monkeypatch):
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "data"))
    folder = fill(tmp_path / "letters", "F")
    for path in folder.rglob("*.tiff"):
        Image.fromarray(np.full((6, 8), 3e38, np.float32)).save(path)
    data = load(folder)
    assert data.inputs(data.train.x).isfinite().all()


@pytest.mark.parametrize(
    ("first", "other", "mode", "channels"),
    [
        ("L", "RGB", "RGB", 3),
        ("RGB", "L", "RGB", 3),
        ("L", "RGB", "L", 1),
        ("L", "I;16", None, 0),
        ("I;16", "F", None, 0),
    ],
)
def test_mixed_images_are_refused_with_their_name_unless_a_mode_is_set(
    tmp_path, monkeypatch, first, other, mode, channels
):
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "data"))
    folder = fill(tmp_path / "letters", first)
    Image.fromarray(pixels(other)).save(folder / "b" / "odd.tiff")
    error = refused(folder)
    assert error.code == "mixed-images"
    assert "(b/odd.tiff)" in str(error)
    assert not list((tmp_path / "data").glob("*")), "no file is left"
    if mode:
        assert load(folder, mode=mode).train.x.shape[1] == channels


def test_an_unknown_mode_is_refused_before_anything_is_read(folder):
    error = refused(folder, mode="CMYK")
    assert (error.code, error.fields["name"], error.fields["value"]) == ("unknown-value", "mode", "CMYK")


def test_images_without_class_folders_have_no_labels(folder):
    for path in folder.glob("b/*"):
        path.rename(folder / "a" / f"b{path.name}")
    error = refused(folder)
    assert (error.code, error.fields["name"]) == ("unknown-column", "label")
    assert "put the images of each class into a folder" in str(error)


def test_splits_of_different_kinds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "data"))
    fill(tmp_path / "letters" / "train", "L")
    fill(tmp_path / "letters" / "test", "I;16")
    error = refused(tmp_path / "letters")
    assert (error.code, error.fields) == ("mixed-images", {"row": 0, "split": "test"})


def test_a_damaged_image_is_named(folder):
    (folder / "b" / "2.tiff").write_bytes(b"II*\0 damaged")
    error = refused(folder)
    assert error.code == "unusable-image"
    assert "(b/2.tiff)" in str(error)


def test_folders_from_which_no_images_are_read_are_logged(folder, tmp_path, caplog):
    (folder / "empty").mkdir()
    (folder / "texts").mkdir()
    (folder / "texts" / "x.txt").touch()
    fill(tmp_path / "more", "I;16")
    (folder / "linked").symlink_to(tmp_path / "more" / "a")
    with caplog.at_level(logging.WARNING, "stableair"):
        assert load(folder).classes == 2
    assert "no images are read from empty, linked, texts (" in caplog.text


def modify_keeping_size_and_time(path):
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "a/0.tiff was modified": lambda folder: os.utime(folder / "a" / "0.tiff", (1, 1)),
    "a/1.tiff was removed": lambda folder: (folder / "a" / "1.tiff").unlink(),
    "b/new.PNG was added": lambda folder: shutil.copy(folder / "a" / "0.tiff", folder / "b" / "new.PNG"),
    "metadata.csv was added": lambda folder: (folder / "metadata.csv").write_text("file_name,label\n"),
}


@pytest.mark.parametrize(("change", "modify"), CHANGES.items(), ids=CHANGES)
def test_a_changed_folder_is_refused_at_every_use_until_it_is_converted_again(folder, change, modify):
    load(folder)
    modify(folder)
    for _ in range(2):
        error = refused(folder)
        assert (error.code, error.fields["change"]) == ("changed-data", change)
        assert f"stableair data prepare 'hf(\"{folder}\")' --again" in str(error)
    name, source = stored(str(folder))
    with pytest.raises(InputError):
        hub.prepare(name, source)


def test_every_extension_that_the_datasets_library_reads_is_in_the_manifest(folder):
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    for extension in [*ImageFolder.EXTENSIONS, ".JFIF", ".tgz", ".tar.gz", ".zip", ".parquet"]:
        (folder / "a" / f"x{extension}").write_bytes(b"")
    files = {name for name in manifest(folder) if "/x" in name}
    assert files == {f"a/{path.name}" for path in (folder / "a").glob("x.*")}


@pytest.mark.parametrize("name", ["1.jfif", "more.tgz"])
def test_other_image_files_and_archives_are_changes(folder, name):
    load(folder)
    (folder / "a" / name).write_bytes(b"new")
    assert refused(folder).code == "changed-data"


def test_a_repeated_conversion_reads_changed_images(folder):
    before = dict(load(folder).files)
    Image.fromarray(np.full((6, 8), 7, np.uint16)).save(folder / "a" / "0.tiff")
    hub.prepare(*stored(str(folder)), again=True)
    data = load(folder)
    everything = torch.cat([data.train.x, data.test.x])
    assert (everything == 7).all((1, 2, 3)).sum() == 1
    assert dict(data.files) != before


def test_only_the_digest_detects_a_change_that_keeps_size_and_time(folder):
    load(folder)
    modify_keeping_size_and_time(folder / "a" / "3.tiff")
    name, source = stored(str(folder))
    hub.check(name)
    with pytest.raises(InputError) as error:
        hub.check(name, contents=True)
    assert (error.value.code, error.value.fields["change"]) == ("changed-data", "a/3.tiff was modified")
    hub.prepare(name, source, again=True)
    hub.check(name, contents=True)


def test_a_repeated_conversion_does_not_read_the_librarys_cache(tmp_path, monkeypatch):
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageColumn

    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "data"))
    features = Features({"image": ImageColumn(), "label": Value("int64")})
    path = tmp_path / "letters" / "train.parquet"
    path.parent.mkdir()

    def write(labels):
        images = [Image.fromarray(np.full((6, 8), i, np.uint8)) for i in range(4)]
        Dataset.from_dict({"image": images, "label": labels}, features=features).to_parquet(path)
        os.utime(path, (10, 10))

    write([0, 0, 0, 1])
    load(path.parent)
    write([0, 1, 2, 3])
    hub.prepare(*stored(str(path.parent)), again=True)
    assert load(path.parent).classes == 4


def test_other_files_hidden_files_and_a_deleted_folder_are_not_changes(folder):
    before = load(folder)
    (folder / "notes.txt").write_text("mine")
    (folder / ".thumbnails").mkdir()
    (folder / ".thumbnails" / "x.png").touch()
    (folder / "a" / ".x.png").touch()
    (folder / "a" / "circle").symlink_to(folder)
    load(folder)
    shutil.rmtree(folder)
    assert torch.equal(load(folder).train.x, before.train.x)


def test_a_link_to_a_file_is_a_file(folder, tmp_path):
    Image.fromarray(pixels("I;16")).save(tmp_path / "elsewhere.tiff")
    (folder / "a" / "linked.tiff").symlink_to(tmp_path / "elsewhere.tiff")
    data = load(folder)
    assert len(data.train.y) + len(data.test.y) == 13
    os.utime(tmp_path / "elsewhere.tiff", (1, 1))
    assert refused(folder).fields["change"] == "a/linked.tiff was modified"


def test_one_folder_has_one_data_file_however_its_path_is_written(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    names = {stored(text)[0] for text in ("letters", "./letters/", str(folder), "hf('letters')", f"hf('{folder}')")}
    assert len(names) == 1
    assert stored("hf('letters', mode=L)")[0] not in names


def test_a_folder_whose_data_file_has_no_description_is_converted_again(folder):
    load(folder)
    name, source = stored(str(folder))
    hub.description_file(name).unlink()
    hub.prepare(name, source)
    assert len(json.loads(hub.description_file(name).read_text())["files"]) == 12


@pytest.mark.parametrize("files", [[1], {"a/0.tiff": 3}, "x"])
def test_a_damaged_manifest_is_refused(folder, files):
    load(folder)
    path = hub.description_file(stored(str(folder))[0])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))
    assert refused(folder).code == "corrupt-data"
