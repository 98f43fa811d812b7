import os
import stat

import pytest

from stableair.files import remove_leftovers, write_whole


def test_the_old_content_is_kept_until_the_new_content_is_complete(tmp_path):
    path = tmp_path / "a"
    assert write_whole(path, b"old") == path
    seen = []

    def write_half(file):
        file.write(b"new")
        file.flush()
        seen.append(path.read_bytes())

    write_whole(path, write_half)
    assert seen == [b"old"]
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_failed_write_keeps_the_old_file_and_no_temporary_file(tmp_path):
    path = tmp_path / "a"
    write_whole(path, b"old")

    def fails(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fails)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no" / "a", b"x")


def test_a_symbolic_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / "a").symlink_to(tmp_path / "precious")
    write_whole(tmp_path / "a", b"x")
    assert (tmp_path / "precious").read_bytes() == b"mine"
    assert not (tmp_path / "a").is_symlink()


def test_a_new_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "plain").touch()
    write_whole(tmp_path / "a", b"x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_whole(tmp_path / "a", b"x")
    assert error.value.filename == str(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_only_files_of_a_killed_process_are_removed(tmp_path):
    for name in (".a.0123abcd.tmp", ".mine.tmp", "a.0123abcd.tmp", "a"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path, older=60)
    assert len(os.listdir(tmp_path)) == 4, "another process may be writing it"
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".mine.tmp", "a", "a.0123abcd.tmp"]


def test_a_failed_synchronisation_keeps_the_old_file(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
