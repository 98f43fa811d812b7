"""Data sets as tensors. The default, scikit-learn's handwritten digits, needs no download."""

from math import prod
from pathlib import Path

import torch

from stableair.contracts import Split
from stableair.data import hub
from stableair.data.arrays import Channels, scaling
from stableair.data.dataset import Dataset
from stableair.data.image_sets import IMAGE_SETS, Mode, Source
from stableair.errors import InputError
from stableair.spec import Registry
from stableair.streams import generator
from stableair.validation import choice, integer, number

dataset = Registry("data set", "data")


def hold_out(data: Dataset, share: float, seed: int) -> Dataset:
    """Replace the test split by a share of the training data, which is removed from the training split.

    Thresholds, learning rates and other settings are tuned on this validation split, never on test data.

    Args:
        data: The data set.
        share: Share of the training samples, in (0, 1).
        seed: Seed of the experiment.

    Returns:
        The data set with the validation split as its test split.
    """
    order = generator(seed, "validation").permutation(len(data.train.y))
    count = max(1, round(share * len(order)))
    return data._replace(train=data.train.take(order[count:]), test=data.train.take(order[:count]))


@dataset("digits")
def digits() -> Dataset:
    """Handwritten digits of scikit-learn: 1,797 grey images of 8 x 8 in ten classes.

    The training split has 1,437 images, the test split 360, with grey values 0 ... 16 (Alpaydin and Kaynak, 1998). It
    needs no download.

    Returns:
        The data set.

    >>> data = digits()
    >>> tuple(data.train.x.shape), tuple(data.test.x.shape), data.classes
    ((1437, 1, 8, 8), (360, 1, 8, 8), 10)
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    samples = Split(torch.from_numpy(images).to(torch.uint8).reshape(-1, 1, 8, 8), torch.from_numpy(labels).long())
    order = generator(0, "digits").permutation(len(labels))  # the split is the same for every seed
    test = torch.arange(len(order)) % 5 == 0
    return Dataset(samples.take(order[~test]), samples.take(order[test]), classes=10, model="mlp(200)", std=16.0)


@dataset("synthetic")
def synthetic(
    samples: int = 1000,
    classes: int = 10,
    shape: tuple[int, int, int] = (1, 8, 8),
    spread: float = 1.0,
    writers: int = 10,
    seed: int = 0,
) -> Dataset:
    """Gaussian clusters, one per class, with an offset per writer.

        x = centre of the class + 0.3 offset of the writer + spread z

    The centres, offsets and z are standard normal. The test split has a fifth as many samples, and at least one of each
    class.

    Args:
        samples: Number of training samples.
        classes: Number of classes, at least 2.
        shape: Shape of a sample, (channels, height, width).
        spread: Standard deviation within a cluster.
        writers: Number of writers.
        seed: Seed of the samples.

    Returns:
        The data set.

    >>> data = synthetic(samples=20, classes=3, shape=(1, 2, 2))
    >>> tuple(data.train.x.shape), data.train.y.unique().tolist()
    ((20, 1, 2, 2), [0, 1, 2])
    """
    for name, value, least in (("samples", samples, 1), ("classes", classes, 2), ("writers", writers, 1)):
        integer(name, value, least)
    integer("seed", seed)
    number("spread", spread, 0.0)
    if not isinstance(shape, tuple) or len(shape) != 3:
        text = f"shape must be (channels, height, width): got {shape!r}"
        raise InputError(text, code="wrong-type", name="shape", value=shape)
    for side in shape:
        integer("shape", side, 1)
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
    """CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 in colour, ten classes.

    Stored as uint8, (m, 3, 32, 32) (Krizhevsky, 2009). A missing data file is downloaded from the hub.

    Args:
        train: Number of training samples; by default all.
        test: Number of test samples; by default all.

    Returns:
        The data set.

    Raises:
        InputError: The data file is damaged (`corrupt-data`) or cannot be downloaded.

    >>> str(dataset.one("cifar10(train=10)"))
    'cifar10(train=10)'
    """
    return _named("cifar10", train, test)


@dataset("cifar100")
def cifar100(train: int | None = None, test: int | None = None) -> Dataset:
    """CIFAR-100: 50,000 training and 10,000 test images of 32 x 32 in colour, a hundred classes.

    Stored as uint8, (m, 3, 32, 32) (Krizhevsky, 2009). A missing data file is downloaded from the hub.

    Args:
        train: Number of training samples; by default all.
        test: Number of test samples; by default all.

    Returns:
        The data set.

    Raises:
        InputError: The data file is damaged (`corrupt-data`) or cannot be downloaded.

    >>> str(dataset.one("cifar100(test=100)"))
    'cifar100(test=100)'
    """
    return _named("cifar100", train, test)


@dataset("femnist")
def femnist(train: int | None = None, test: int | None = None) -> Dataset:
    """FEMNIST: digits and letters by 3,597 writers, grey images of 28 x 28 in 62 classes.

    Stored as uint8, (m, 1, 28, 28), black on white, with the writer of each image (Caldas et al., 2018). A missing
    data file is downloaded from the hub.

    Args:
        train: Number of training samples; by default all.
        test: Number of test samples; by default all.

    Returns:
        The data set.

    Raises:
        InputError: The data file is damaged (`corrupt-data`) or cannot be downloaded.

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
    mode: Mode | None = None,
) -> Dataset:
    """Any image set of the Hugging Face hub, or a local folder in its format.

    Stored as (m, c, h, w), uint8, or float32 for 16-bit, 32-bit and float images. All images must have one size and one
    kind. They are normalised by the mean and the standard deviation of each channel.

    Args:
        name: Name of the set on the hub, such as "user/birds", or path of a local folder.
        image: Column of the images.
        label: Column of the labels.
        writer: Column of the author of each image.
        config: Configuration of the set on the hub.
        train: Number of training samples; by default all.
        test: Number of test samples; by default all.
        mode: Conversion of 8-bit images: "L" to grey or "RGB" to colour; by default none.

    Returns:
        The data set.

    Raises:
        InputError: A column is missing (`unknown-column`), an image cannot be used (`unusable-image`, `mixed-images`),
            or the set cannot be downloaded.

    >>> str(dataset.one("hf('user/birds', label=species)"))
    "hf(name='user/birds', label=species)"
    """
    source = Source(name, image, label, writer, config, mode)
    data = _from_folder(source.name, source, train, test)
    mean, std = scaling(data.train.x[:: max(1, len(data.train.y) // 2000)])
    return data._replace(mean=mean, std=std)


@dataset("csv")
def csv(
    path: str,
    label: str,
    test_path: str | None = None,
    features: str | tuple[str, ...] | None = None,
    writer: str | None = None,
    sep: str = ",",
    test: float = 0.2,
    seed: int = 0,
    classes: int | tuple[int | str, ...] | None = None,
    mean: float | tuple[float, ...] | None = None,
    std: float | tuple[float, ...] | None = None,
) -> Dataset:
    """A CSV file of numbers with a column of labels, as `sa.Dataset.from_csv`.

    Stored as float32, (m, f).

    Args:
        path: The file, with a line of column names.
        label: Column of the labels.
        test_path: A file with test samples.
        features: Columns of the features; by default all but `label` and `writer`.
        writer: Column of the author of each sample.
        sep: The character between two columns.
        test: Share of each class to hold out as test data if there is no `test_path`.
        seed: Seed of the held-out samples.
        classes: Number of classes of labels from 0, or the labels in order; by default the sorted labels of the file.
        mean: Subtracted from the features: a number, or one per column; by default the mean of the training samples.
        std: Divides the features: a number, or one per column; by default the standard deviation of the training
            samples.

    Returns:
        The data set.

    Raises:
        InputError: A file cannot be read (`unreadable-file`), lacks a column (`unknown-column`), or holds an invalid
            value (`invalid-feature`, `missing-label`, ...).

    >>> str(dataset.one("csv('iris.csv', label=species)"))
    "csv(path='iris.csv', label=species)"
    """
    return Dataset.from_csv(
        path, label, test_path=test_path, features=features, writer=writer, sep=sep, test=test, seed=seed,
        classes=classes, mean=mean, std=std,
    )  # fmt: skip


@dataset("npz")
def npz(
    path: str,
    channels: Channels = "auto",
    test: float = 0.2,
    seed: int = 0,
    classes: int | tuple[int | str, ...] | None = None,
    mean: float | tuple[float, ...] | None = None,
    std: float | tuple[float, ...] | None = None,
) -> Dataset:
    """Arrays of a numpy file, as `sa.Dataset.from_npz`: tables, images or token ids.

    Args:
        path: The file, with the arrays x and y, and possibly x_test, y_test and writer.
        channels: Axis of the channels of images: "first", "last", or "auto" to detect it.
        test: Share of each class to hold out as test data if there is no x_test.
        seed: Seed of the held-out samples.
        classes: Number of classes of labels from 0, or the labels in order; by default the sorted labels of y.
        mean: Subtracted from the features: a number, or one per channel or column; by default the mean of the training
            samples.
        std: Divides the features: a number, or one per channel or column; by default the standard deviation of the
            training samples.

    Returns:
        The data set.

    Raises:
        InputError: The file cannot be read (`unreadable-file`), lacks an array (`missing-array`), or holds an invalid
            array.

    >>> str(dataset.one("npz('digits.npz', classes=10)"))
    "npz(path='digits.npz', classes=10)"
    """
    return Dataset.from_npz(path, channels=channels, test=test, seed=seed, classes=classes, mean=mean, std=std)


@dataset("remote")
def remote() -> Dataset:
    """Data that stay at real clients, as with Flower; the clients also define the model and the training.

    The settings `partition`, `model`, `local_epochs`, `batch_size` and `augment` are ignored. The data cannot be read
    here: use `stableair.flower`.

    Returns:
        Nothing, since the function always raises the error.

    Raises:
        InputError: The data cannot be read here (`remote-data`).

    >>> str(dataset.one("remote"))
    'remote()'
    """
    text = "data=remote() are stored at the clients and cannot be read here; use stableair.flower"
    raise InputError(text, code="remote-data")


def stored(text: str) -> tuple[str, Source]:
    """Return the file name and the source of a hub data set ("cifar10", "hf('user/set')") or of a local folder."""
    if text not in hub.NAMED and Path(text).is_dir():
        text = Source(text, "image", "label").spec
    call = dataset.one(text)
    if call.entry.name != "hf":
        return call.entry.name, hub.NAMED[choice("set of the hub", call.entry.name, [*hub.NAMED, "hf"])]
    defaults = {name: parameter.default for name, parameter in call.parameters.items()} | call.arguments
    source = Source(*(defaults[key] for key in ("name", "image", "label", "writer", "config", "mode")))
    return source.name, source


def _named(name: str, train: int | None, test: int | None) -> Dataset:
    """Read a set of `IMAGE_SETS`."""
    known = IMAGE_SETS[name]
    return _from_folder(name, hub.NAMED[name], train, test, known.classes, known.model, known.mean, known.std)


def _from_folder(
    name: str, source: Source, train: int | None, test: int | None, classes: int | None = None, model: str = "cnn()",
    mean: float | tuple[float, ...] = 0.0, std: float | tuple[float, ...] = 1.0,
) -> Dataset:  # fmt: skip
    """Read a set from the data folder; `train` and `test` select a fixed random subset of each split."""
    stored, digest = hub.read(name, source)

    def split(part: str, limit: int | None) -> Split:
        x, y = stored[f"{part}.x"].permute(0, 3, 1, 2), stored[f"{part}.y"]
        if x.dtype == torch.uint16:  # torch lacks most operations on it
            x = x.float()
        whole_split = Split(x, y, stored.get(f"{part}.writer"))
        if limit is None:
            return whole_split
        if integer(part, limit, 1) > len(y):
            text = f"{part} must be at most {len(y)}, the number of samples: got {limit}"
            raise InputError(text, code="out-of-range", name=part, value=limit, high=len(y))
        return whole_split.take(generator(0, "subset").permutation(len(y))[:limit].sort().values)

    top = max(int(stored["train.y"].max()), int(stored["test.y"].max()))
    if classes is not None and top >= classes:
        text = f"{hub.file(name)}: labels must be below {classes}: got {top}"
        raise InputError(text, code="invalid-data-file", name="y", value=top, high=classes - 1)
    files = ((hub.file(name).name, digest),)
    return Dataset(split("train", train), split("test", test), classes or top + 1, model, mean, std, files)
