"""Decoding of image files with Pillow, to arrays with the full bit depth."""

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from stableair.data.image_sets import Mode
from stableair.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

GREY = ("1", "L", "LA")  # 8 bits or fewer; Pillow's names of modes
COLOUR = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
DEEP = {"I;16": np.uint16, "I;16L": np.uint16, "I;16B": np.uint16, "I;16N": np.uint16, "I": np.float32, "F": np.float32}


def decode(content: BinaryIO | Path, mode: Mode | None = None) -> np.ndarray:
    """Decode an image file.

    Args:
        content: The file.
        mode: Convert 8-bit images to grey ("L") or colour ("RGB"); None keeps them as they are.

    Returns:
        The pixels, (height, width, channels): uint8 with 1 or 3 channels, or one channel of uint16 (16-bit grey) or
        float32 (32-bit integers and floats). The orientation in the EXIF data is applied.

    Raises:
        InputError: The file is not a single image, or its pixels would be altered (`unusable-image`).
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(content) as image:
            _check_layout(image, mode)
            image.load()
            return _pixels(ImageOps.exif_transpose(image), mode)
    except InputError:
        raise
    except UnidentifiedImageError:
        raise _unusable("the file is not an image of a format that Pillow reads") from None
    except Exception as error:  # a damaged file raises many unrelated types
        reason = (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")
        raise _unusable(f"the image cannot be read: {reason}") from error


def describe(pixels: np.ndarray) -> str:
    """Return the size and the kind of an image in words.

    >>> describe(np.zeros((6, 8, 1), np.uint16))
    '8 x 6 16-bit grey'
    """
    height, width, channels = pixels.shape
    depth = "32-bit" if pixels.dtype == np.float32 else f"{8 * pixels.dtype.itemsize}-bit"
    return f"{width} x {height} {depth} {'grey' if channels == 1 else 'colour'}"


def _check_layout(image: "Image", mode: Mode | None) -> None:
    """Refuse files that Pillow would decode only partly: several frames, or more than 8 bits per colour."""
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # the other frames of an MPO photograph are previews
        raise _unusable(f"the file has {frames} frames; save one image per file")
    if image.mode not in DEEP and _bits(image) > 8:
        raise _unusable("the image has more than 8 bits per colour, and Pillow reads 8; convert it to 8 bits")
    if image.mode in DEEP and mode is not None:
        raise _unusable(f"mode={mode} converts 8-bit images only, and the image has mode {image.mode}")


def _bits(image: "Image") -> int:
    """Return the bits per channel in the file, 8 or 16; the pixels must not have been loaded yet."""
    for tile in getattr(image, "tile", ()):
        layout, *more = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        if ";16" in str(layout) or (image.format == "PPM" and more and more[0] > 255):  # "RGB;16B"; ("RGB", 65535)
            return 16
    return 8


def _pixels(image: "Image", mode: Mode | None) -> np.ndarray:
    """Return the pixels of a loaded image: (height, width, channels)."""
    if dtype := DEEP.get(image.mode):
        pixels = np.asarray(image).astype(dtype)[..., None]
        if not np.isfinite(pixels).all():
            raise _unusable("the image has pixels that are not finite")
        return pixels
    if image.mode not in (*GREY, *COLOUR):
        raise _unusable(f"mode {image.mode} is not supported; convert the image to RGB")
    if mode is None and image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255:
        raise _unusable("the image has transparent pixels; set mode=RGB or mode=L to ignore the transparency")
    stored = mode or ("L" if image.mode in GREY else "RGB")
    return np.asarray(image.convert(stored)).reshape(image.height, image.width, len(stored) if stored == "RGB" else 1)


def _unusable(reason: str) -> InputError:
    return InputError(reason, code="unusable-image")
