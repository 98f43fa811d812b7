"""Image files keep their bit depth; files that Pillow reads incompletely are refused."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest

from stableair.data.images import decode, describe
from stableair.errors import InputError

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

RNG = np.random.default_rng(0)
GREY8 = RNG.integers(256, size=(6, 8), dtype=np.uint8)
COLOUR8 = RNG.integers(256, size=(6, 8, 3), dtype=np.uint8)
COLOUR16 = RNG.integers(65536, size=(6, 8, 3))


def encoded(image, file_format="PNG", **options):
    file = BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, file_format, **options)
    return file.getvalue()


def png_of_16_bit_colour(pixels):
    """A PNG file with 16 bits per channel, which Pillow cannot write."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    parts = (struct.pack(">I", len(c)) + tag + c + struct.pack(">I", zlib.crc32(tag + c)) for tag, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def transparent(mode):
    image = Image.fromarray(COLOUR8).convert("RGBA")
    image.putalpha(Image.fromarray(GREY8))
    return encoded(image.convert(mode))


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_16_bit_grey_keeps_every_bit(file_format, dtype):
    pixels = RNG.integers(1000, 65536, size=(6, 8)).astype(dtype)
    image = decode(BytesIO(encoded(pixels, file_format)))
    assert image.dtype == np.uint16
    assert np.array_equal(image[..., 0], pixels)


@pytest.mark.parametrize(
    "pixels", [RNG.integers(-70000, 2**24, size=(6, 8)).astype(np.int32), RNG.random((6, 8), "f4")]
)
def test_32_bit_images_are_float32(pixels):
    image = decode(BytesIO(encoded(pixels, "TIFF")))
    assert image.dtype == np.float32
    assert np.array_equal(image[..., 0], pixels)


@pytest.mark.parametrize(
    ("mode", "file_format", "channels"),
    [("1", "PNG", 1), ("L", "PNG", 1), ("LA", "PNG", 1), ("RGB", "PNG", 3), ("RGBA", "PNG", 3), ("P", "PNG", 3),
     ("CMYK", "TIFF", 3), ("YCbCr", "TIFF", 3)],
)  # fmt: skip
def test_8_bit_images_are_grey_or_colour_by_their_mode(mode, file_format, channels):
    image = Image.fromarray(COLOUR8 if channels == 3 else GREY8).convert(mode)
    pixels = decode(BytesIO(encoded(image, file_format)))
    assert (pixels.dtype, pixels.shape) == (np.uint8, (6, 8, channels))
    expected = np.asarray(image.convert("RGB" if channels == 3 else "L")).reshape(pixels.shape)
    assert np.array_equal(pixels, expected)


def test_a_mode_converts_8_bit_images_and_no_others():
    assert decode(BytesIO(encoded(GREY8)), "RGB").shape == (6, 8, 3)
    assert decode(BytesIO(encoded(COLOUR8)), "L").shape == (6, 8, 1)
    with pytest.raises(InputError) as error:
        decode(BytesIO(encoded(GREY8.astype(np.uint16))), "RGB")
    assert error.value.code == "unusable-image"


def test_the_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[274] = 6  # rotated by a quarter turn
    pixels = np.arange(48, dtype=np.uint16).reshape(6, 8)
    assert np.array_equal(decode(BytesIO(encoded(pixels, exif=exif)))[..., 0], np.rot90(pixels, -1))


@pytest.mark.parametrize(
    "content",
    {
        "16-bit colour, PNG": png_of_16_bit_colour(COLOUR16),
        "16-bit colour, PPM": b"P6\n8 6\n65535\n" + COLOUR16.astype(">u2").tobytes(),
        "several frames": encoded(GREY8, "GIF", save_all=True, append_images=[Image.fromarray(255 - GREY8)]),
        "several pages": encoded(GREY8, "TIFF", save_all=True, append_images=[Image.fromarray(GREY8)]),
        "transparent": transparent("RGBA"),
        "transparent grey": transparent("LA"),
        "transparent palette": encoded(Image.fromarray(COLOUR8).quantize(8), transparency=3),
        "NaN": encoded(np.full((6, 8), np.nan, np.float32), "TIFF"),
        "truncated": encoded(COLOUR8)[:80],
        "text": b"hello",
        "empty": b"",
    }.items(),
    ids=lambda item: item[0],
)
def test_an_image_that_would_be_altered_is_refused_in_one_line(content):
    with pytest.raises(InputError) as error:
        decode(BytesIO(content[1]))
    assert error.value.code == "unusable-image"
    assert "\n" not in str(error.value)
    assert " object at " not in str(error.value)


def test_a_mode_ignores_transparency():
    assert decode(BytesIO(transparent("RGBA")), "RGB").shape == (6, 8, 3)


def test_the_first_image_of_a_photograph_with_previews_is_used():
    image = Image.linear_gradient("L").resize((8, 16)).convert("RGB")
    content = encoded(image, "MPO", save_all=True, append_images=[image.rotate(180)])
    assert abs(decode(BytesIO(content)).astype(int) - np.asarray(image)).max() < 10


def test_the_description_of_an_image():
    assert describe(np.zeros((6, 8, 3), np.uint8)) == "8 x 6 8-bit colour"
    assert describe(np.zeros((6, 8, 1), np.float32)) == "8 x 6 32-bit grey"
