"""The named image sets of the hub: source, classes, shape, scaling and model of each."""

import hashlib
import json
import re
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from stableair.errors import InputError
from stableair.validation import choice

Mode = Literal["L", "RGB"]  # conversion of 8-bit images to grey or to colour


class Source(NamedTuple):
    """A set on the hub, or a folder in its schema, and the names of its columns."""

    repo: str
    image: str
    label: str
    writer: str | None = None
    config: str | None = None
    mode: Mode | None = None

    @property
    def folder(self) -> Path | None:
        """The local folder of the set; None for a set on the hub."""
        return Path(self.repo).absolute() if Path(self.repo).is_dir() else None

    @property
    def spec(self) -> str:
        """Spec of the data set with this source: hf("user/set", image="img")."""
        defaults = {"image": "image", "label": "label"}
        options = {key: value for key, value in self._asdict().items() if value not in (None, defaults.get(key))}
        repo, *others = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in options.items())
        return f"hf({', '.join((repo.removeprefix('repo='), *others))})"

    @property
    def name(self) -> str:
        """Unique name of the data file of a set that is not in `IMAGE_SETS`."""
        if any(not isinstance(text, str) for text in (*self[:3], *filter(None, self))):
            text = f"a set of the hub and its columns must be names: got {', '.join(map(repr, self))}"
            raise InputError(text, code="wrong-type", value=tuple(self))
        if not self.repo.strip() or "\0" in "".join(filter(None, self)):
            text = f"a set of the hub needs a name such as 'user/set': got {self.repo!r}"
            raise InputError(text, code="invalid-name", name="name", value=self.repo)
        if self.mode is not None:
            choice("mode", self.mode, get_args(Mode))
        resolved, title = self, self.repo
        if self.folder or Path(self.repo).is_absolute():  # one name for all spellings of the path
            real = Path(self.repo).resolve()
            resolved, title = self._replace(repo=str(real)), real.name
        digest = hashlib.blake2b(repr(tuple(resolved)).encode(), digest_size=4).hexdigest()
        return f"hf-{re.sub(r'[^a-zA-Z0-9]+', '-', title).strip('-')}-{digest}"


class ImageSet(NamedTuple):
    """A named set of the hub: its source, its images, and the paper's model for it."""

    source: Source
    classes: int
    shape: tuple[int, int, int]  # (channels, height, width)
    model: str
    mean: float | tuple[float, ...]  # mean of pixel values 0 ... 255, per channel or for all channels
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
