"""Random crops and flips of images."""

import torch
from torch import Tensor

CROP = 4  # largest shift of a crop, in pixels


def crop_flip(x: Tensor, moves: Tensor) -> Tensor:
    """Shift and mirror images.

    Args:
        x: Images, (..., c, h, w).
        moves: One move per image, (..., 3): rows down, columns right, and 1 to mirror.

    Returns:
        The moved images, of the shape of x. Pixels from outside the image are 0 (black).
    """
    h, w = x.shape[-2:]
    down, right, mirrored = moves.unbind(-1)
    rows = torch.arange(h, device=x.device) - down[..., None]  # (..., h), source row of each pixel
    columns = torch.arange(w, device=x.device)
    columns = torch.where(mirrored[..., None] > 0, w - 1 - columns, columns) - right[..., None]
    inside = ((rows >= 0) & (rows < h))[..., :, None] & ((columns >= 0) & (columns < w))[..., None, :]
    x = x.gather(-2, rows.clamp(0, h - 1)[..., None, :, None].expand(x.shape))
    return x.gather(-1, columns.clamp(0, w - 1)[..., None, None, :].expand(x.shape)) * inside[..., None, :, :]
