"""The image sets that have a name: one row each, and whatever is known of a set stands in its row."""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from stableair.checks import InputError


class Source(NamedTuple):
    """A set on the hub, or a folder in its schema, and which of its columns are meant."""

    repo: str
    image: str
    label: str
    writer: str | None = None
    config: str | None = None

    @property
    def name(self) -> str:
        """What its file is called where the set has no name of its own: no two sources share one."""
        if any(not isinstance(text, str) for text in (*self[:3], *filter(None, self))):
            raise InputError(f"a set of the hub and its columns must be names: got {', '.join(map(repr, self))}")
        if not self.repo.strip() or "\0" in "".join(filter(None, self)):
            raise InputError(f"a set of the hub needs a name such as 'user/set': got {self.repo!r}")
        here = self._replace(repo=str(Path(self.repo).resolve())) if Path(self.repo).is_dir() else self
        digest = hashlib.blake2b(repr(tuple(here)).encode(), digest_size=4).hexdigest()
        return f"hf-{re.sub(r'[^a-zA-Z0-9]+', '-', self.repo).strip('-')}-{digest}"


class ImageSet(NamedTuple):
    """A set of the hub: where it comes from, what its images are, and the model it is paired with in the paper."""

    source: Source
    classes: int
    shape: tuple[int, int, int]  # of an image: (channels, height, width)
    model: str
    mean: float | tuple[float, ...]  # of the pixels 0 ... 255, each channel's or one for all
    std: float | tuple[float, ...]


IMAGE_SETS = {
    "cifar10": ImageSet(
        Source("uoft-cs/cifar10", "img", "label"),
        10, (3, 32, 32), "resnet18()", mean=(125.3, 123.0, 113.9), std=(63.0, 62.1, 66.7),
    ),
    "cifar100": ImageSet(
        Source("uoft-cs/cifar100", "img", "fine_label"),
        100, (3, 32, 32), "resnet34()", mean=(129.3, 124.1, 112.4), std=(68.2, 65.4, 70.4),
    ),
    "femnist": ImageSet(
        Source("flwrlabs/femnist", "image", "character", "writer_id"),
        62, (1, 28, 28), "cnn()", mean=245.0, std=42.0,
    ),
}  # fmt: skip
