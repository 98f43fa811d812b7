"""Damage to the text files of a run is detected."""

import re
import shutil

import pytest

from helpers.runs import flipped
from stableair.errors import CorruptRunError, StableairError
from stableair.results.checksums import CLIENTS, ENVIRONMENT, EXPERIMENT, ROUNDS
from stableair.results.reading import load
from stableair.runner import run


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (EXPERIMENT, None),
        (EXPERIMENT, b"{"),
        (EXPERIMENT, b'{"cliets": 3}'),
        (EXPERIMENT, b"[1]"),
        (ROUNDS, b""),
        (ROUNDS, b'{"round": 0}\n{"round": 7}\n'),
        (ROUNDS, b"nonsense\n"),
        (ENVIRONMENT, None),
        (ENVIRONMENT, b"{"),
    ],
)
def test_a_corrupted_file_is_named_and_not_changed(tiny, tmp_path, name, content):
    """Without content, the file is truncated to half of its length."""
    folder = run(tiny, tmp_path / "a").folder
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(StableairError) as error:
        run(tiny.with_(rounds=5), folder, resume=True)
    assert error.value.code == "corrupt-run"
    assert name in str(error.value)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("name", [EXPERIMENT, ENVIRONMENT, CLIENTS, ROUNDS])
def test_every_flipped_bit_of_a_text_file_is_detected(finished, tmp_path, name):
    """A sample of the bits, and all bits of the last 60 bytes, which include the checksum."""
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    raw = (folder / name).read_bytes()
    bits = [*range(0, 8 * len(raw), 41), *range(8 * (len(raw) - 60), 8 * len(raw))]
    undetected = []
    for bit in bits:
        (folder / name).write_bytes(flipped(raw, bit))
        try:
            load(folder)
            undetected.append(bit)
        except StableairError as error:
            assert "\n" not in str(error)
            assert name in str(error)
    assert not undetected, [flipped(raw, bit)[bit // 8 - 10 : bit // 8 + 10] for bit in undetected]


def test_a_minus_that_becomes_a_line_break_is_found(finished, tmp_path):
    """One bit turns - into a carriage return, at which a line does not end."""
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    raw = (folder / ROUNDS).read_bytes()
    assert b"-" in raw
    (folder / ROUNDS).write_bytes(raw.replace(b"-", b"\r", 1))
    with pytest.raises(CorruptRunError) as error:
        load(folder)
    assert error.value.fields["path"] == folder / ROUNDS
    assert error.value.fields["line"] >= 1


@pytest.mark.parametrize(("name", "end"), [(EXPERIMENT, rb"\n\}\n\Z"), (ROUNDS, rb"\}\n\Z")])
def test_a_removed_checksum_is_found(finished, tmp_path, name, end):
    """The checksum of the experiment or of the last round; files of version 0.1 have no checksums."""
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    raw = (folder / name).read_bytes()
    without = re.sub(rb',\s+"checksum": "[0-9a-f]+"(?=' + end + rb")", b"", raw)
    assert len(without) < len(raw)
    (folder / name).write_bytes(without)
    with pytest.raises(CorruptRunError) as error:
        load(folder)
    assert error.value.fields["path"] == folder / name
