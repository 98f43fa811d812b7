"""The pictures on the page of channel models."""

from helpers import ROOT
from stableair.channels.registries import fading, noise, power
from stableair.paper.air_plots import PICTURES


def test_the_page_shows_a_picture_of_every_channel_component():
    page = (ROOT / "docs/air.md").read_text()
    before = {"none", "sas", "gaussian", "student_t", "middleton", "rayleigh", "rician", "nakagami", "unit"}
    for name in {entry.name for registry in (power, noise, fading) for entry in registry} - before:
        assert name in PICTURES
        assert f"stableair air {name}\n" in page
        assert f"(images/air-{name}.png)" in page


def test_a_picture_is_written_to_the_requested_path(command, tmp_path):
    assert command("air", "bursts", "-o", "b.pdf") == (0, "b.pdf\n", "")
    assert (tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")
