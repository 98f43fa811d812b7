"""A data set as tensors. The embedded default is scikit-learn's handwritten digits: real, and no download."""

from math import prod

import torch

from stableair.checks import InputError, choice, number, whole
from stableair.contracts import Dataset, Split
from stableair.data import hub
from stableair.data.table import IMAGE_SETS, Source
from stableair.spec import Registry
from stableair.streams import generator

dataset = Registry("data set", "data")


def hold_out(data: Dataset, share: float, seed: int) -> Dataset:
    """The set with its test split replaced by a share of its training data, which leaves the training split.

    Whatever is chosen by looking at results (a threshold, a learning rate) is chosen on this, never on test data.
    """
    order = generator(seed, "validation").permutation(len(data.train.y))
    held = max(1, round(share * len(order)))
    return data._replace(train=data.train.take(order[held:]), test=data.train.take(order[:held]))


@dataset("digits")
def digits() -> Dataset:
    """Handwritten digits of scikit-learn: 1,797 grey images of 8 x 8, ten classes; every fifth, shuffled, is test.

    x: (1437, 1, 8, 8) and (360, 1, 8, 8), with grey values 0 ... 16 (Alpaydin and Kaynak, 1998).

    >>> data = digits()
    >>> tuple(data.train.x.shape), tuple(data.test.x.shape), data.classes
    ((1437, 1, 8, 8), (360, 1, 8, 8), 10)
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    everything = Split(torch.from_numpy(images).to(torch.uint8).reshape(-1, 1, 8, 8), torch.from_numpy(labels).long())
    order = generator(0, "digits").permutation(len(labels))  # the split is the same for every seed
    test = torch.arange(len(order)) % 5 == 0
    return Dataset(everything.take(order[~test]), everything.take(order[test]), classes=10, model="mlp(200)", std=16.0)


@dataset("synthetic")
def synthetic(
    samples: int = 1000,
    classes: int = 10,
    shape: tuple[int, int, int] = (1, 8, 8),
    spread: float = 1.0,
    writers: int = 10,
    seed: int = 0,
) -> Dataset:
    """Gaussian clouds, one per class, each writer with an offset of their own; a test split of a fifth on top.

    x = centre of the class + 0.3 offset of the writer + spread z, all standard normal: (samples, *shape).

    >>> data = synthetic(samples=20, classes=3, shape=(1, 2, 2))
    >>> tuple(data.train.x.shape), data.train.y.unique().tolist()
    ((20, 1, 2, 2), [0, 1, 2])
    """
    for name, value, least in (("samples", samples, 1), ("classes", classes, 2), ("writers", writers, 1)):
        whole(name, value, least)
    whole("seed", seed)
    number("spread", spread, 0.0)
    if not isinstance(shape, tuple) or len(shape) != 3:
        raise InputError(f"shape must be (channels, height, width): got {shape!r}")
    for side in shape:
        whole("shape", side, 1)
    source = generator(seed, "synthetic")
    centre, offset = source.normal(classes, *shape), 0.3 * source.normal(writers, *shape)

    def split(m: int) -> Split:
        y, writer = source.permutation(m) % classes, source.permutation(m) % writers
        x = torch.empty(m, *shape)
        for rows in torch.arange(m).split(max(1, (1 << 22) // prod(shape))):
            x[rows] = (centre[y[rows]] + offset[writer[rows]] + spread * source.normal(len(rows), *shape)).float()
        return Split(x, y, writer)

    return Dataset(split(samples), split(max(classes, samples // 5)), classes, model="mlp(200)")


@dataset("cifar10")
def cifar10(train: int | None = None, test: int | None = None) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour images of 32 x 32, ten classes; `train`, `test` take so many of them.

    x: (50000, 3, 32, 32) uint8 (Krizhevsky, 2009). The data folder must hold it, or the hub be in reach.

    >>> str(dataset.one("cifar10(train=10)"))
    'cifar10(train=10)'
    """
    return _named("cifar10", train, test)


@dataset("cifar100")
def cifar100(train: int | None = None, test: int | None = None) -> Dataset:
    """CIFAR-100: 50,000 + 10,000 colour images of 32 x 32, a hundred classes.

    x: (50000, 3, 32, 32) uint8 (Krizhevsky, 2009); otherwise as cifar10.

    >>> str(dataset.one("cifar100(test=100)"))
    'cifar100(test=100)'
    """
    return _named("cifar100", train, test)


@dataset("femnist")
def femnist(train: int | None = None, test: int | None = None) -> Dataset:
    """FEMNIST: digits and letters by 3,597 writers, grey images of 28 x 28, 62 classes; knows its writers.

    x: (m, 1, 28, 28) uint8, black on white; writer: (m,) (Caldas et al., 2018); otherwise as cifar10.

    >>> str(dataset.one("femnist(1000, 100)"))
    'femnist(train=1000, test=100)'
    """
    return _named("femnist", train, test)


@dataset("hf")
def hf(
    name: str,
    image: str = "image",
    label: str = "label",
    writer: str | None = None,
    config: str | None = None,
    train: int | None = None,
    test: int | None = None,
) -> Dataset:
    """Any image set of the hub, or a folder in its schema; the arguments name its columns.

    x: (m, c, h, w) uint8, images of one size, normalised by their own mean and standard deviation per channel.

    >>> str(dataset.one("hf('user/birds', label=species)"))
    "hf(name='user/birds', label=species)"
    """
    source = Source(name, image, label, writer, config)
    data = _from_folder(source.name, source, train, test)
    seen = data.train.x[:: max(1, len(data.train.y) // 2000)].float()
    mean, std = seen.mean((0, 2, 3)), seen.std((0, 2, 3)).clamp(min=1.0)
    return data._replace(mean=tuple(mean.tolist()), std=tuple(std.tolist()))


@dataset("remote")
def remote() -> Dataset:
    """Data that stay with real clients, such as Flower's; the model and the local training are theirs as well.

    Of an experiment with such data `partition`, `model`, `local_epochs`, `batch_size` and `augment` say nothing. They
    cannot be read from here: `stableair.flower` asks their clients.

    >>> str(dataset.one("remote"))
    'remote'
    """
    raise InputError("data=remote() stay with their clients and are not read here; stableair.flower asks the clients")


def stored(text: str) -> tuple[str, Source]:
    """The name of a set's data file and where it comes from, for a set of the hub: "cifar10", "hf('user/set')"."""
    call = dataset.one(text)
    if call.entry.name != "hf":
        return call.entry.name, hub.NAMED[choice("set of the hub", call.entry.name, [*hub.NAMED, "hf"])]
    defaults = {name: parameter.default for name, parameter in call.parameters.items()} | call.arguments
    source = Source(*(defaults[key] for key in ("name", "image", "label", "writer", "config")))
    return source.name, source


def _named(name: str, train: int | None, test: int | None) -> Dataset:
    """A set of the table."""
    known = IMAGE_SETS[name]
    return _from_folder(name, hub.NAMED[name], train, test, known.classes, known.model, known.mean, known.std)


def _from_folder(
    name: str, source: Source, train: int | None, test: int | None, classes: int | None = None, model: str = "cnn()",
    mean: float | tuple[float, ...] = 0.0, std: float | tuple[float, ...] = 1.0,
) -> Dataset:  # fmt: skip
    """A set of the data folder; `train` and `test` take so many samples of each split, always the same ones."""
    stored, digest = hub.read(name, source)

    def split(part: str, most: int | None) -> Split:
        x, y = stored[f"{part}.x"].permute(0, 3, 1, 2), stored[f"{part}.y"]
        whole_split = Split(x, y, stored.get(f"{part}.writer"))
        if most is None:
            return whole_split
        if whole(part, most, 1) > len(y):
            raise InputError(f"{part} must be at most {len(y)}, all there are: got {most}")
        return whole_split.take(generator(0, "subset").permutation(len(y))[:most].sort().values)

    top = max(int(stored["train.y"].max()), int(stored["test.y"].max()))
    if classes is not None and top >= classes:
        raise InputError(f"{hub.file(name)}: labels must be below {classes}: got {top}")
    files = ((hub.file(name).name, digest),)
    return Dataset(split("train", train), split("test", test), classes or top + 1, model, mean, std, files)
