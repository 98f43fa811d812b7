"""Checks, test split and scaling of samples that are arrays."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stableair.contracts import Dataset, Split, holds_tokens
from stableair.data.labels import Place, checked_labels, class_numbers, in_rows, number_from_zero
from stableair.data.splits import held_out
from stableair.errors import InputError, first_line
from stableair.streams import generator
from stableair.validation import choice, integer, number, positive, short_repr

Channels = Literal["auto", "first", "last"]  # axis of the channels of an image; auto: last if it has 1, 3 or 4 entries
Files = tuple[tuple[str, str], ...]  # names of files and their SHA-256
Scale = float | Sequence[float]  # one number, or one for each channel or column

COLOURS = 1, 3, 4  # numbers of channels that identify images (m, h, w, c)
SMALLEST_CNN_IMAGE = 4  # pixels per side


class Samples(NamedTuple):
    """Checked samples, before their classes get numbers."""

    x: Tensor  # (m, ...): uint8, float32, or int64 for token ids
    y: np.ndarray  # (m,), integers or text
    writer: np.ndarray | None
    title: str  # name of the labels in messages, such as "y_test"
    place: Place = in_rows  # place of a sample in messages, such as "row 3"


class Options(NamedTuple):
    """Options of a data set of samples; `Dataset.from_arrays` describes them."""

    test: float = 0.2
    seed: int = 0
    classes: int | Sequence[Any] | None = None
    mean: Scale | None = None
    std: Scale | None = None
    model: str | None = None


def samples(
    x: Any, y: Any, writer: Any = None, suffix: str = "", channels: Channels = "auto", file: str = ""
) -> Samples:
    """Check arrays and convert them to samples.

    Args:
        x: Features (m, ...): an array, a tensor, a data frame or nested lists.
        y: Labels (m,).
        writer: The author of each sample (m,), if known.
        suffix: Suffix of the names x and y in messages, such as "_test".
        channels: Axis of the channels of images.
        file: The file that holds the arrays, for messages.

    Returns:
        The samples.

    Raises:
        InputError: The arrays are empty or of unequal length, or hold invalid values.
    """
    title = f"{file}: " if file else ""
    features = _features(f"{title}x{suffix}", x, channels)
    labels = {"y": _column(f"{title}y{suffix}", y)}
    if writer is not None:
        labels["writer"] = _column(f"{title}writer{suffix}", writer)
    for name, values in labels.items():
        if len(values) != len(features):
            text = f"{title}x{suffix} has {len(features)} rows, {name}{suffix} has {len(values)}: they must be equal"
            raise InputError(text, code="unequal-lengths", name=name + suffix, lengths=(len(features), len(values)))
    checked = {name: checked_labels(values, file or "arrays", name + suffix) for name, values in labels.items()}
    return Samples(features, checked["y"], checked.get("writer"), f"{title}y{suffix}")


def assemble(
    train: Samples, test: Samples | None, options: Options, files: tuple[tuple[str, str], ...] = ()
) -> Dataset:
    """Build a data set from samples: number the classes, hold out test samples if needed, and scale.

    Args:
        train: The training samples.
        test: The test samples; None holds out a share of the training samples.
        options: Options of the data set.
        files: Names and SHA-256 of the files that were read.

    Returns:
        The data set.

    Raises:
        InputError: The shapes or kinds of the two splits differ, or an option is invalid.
    """
    if test is not None and (test.x.shape[1:] != train.x.shape[1:] or holds_tokens(test.x) != holds_tokens(train.x)):
        one, other = (f"{each.x.dtype} {tuple(each.x.shape[1:])}" for each in (train, test))
        text = f"training and test samples must have one shape and kind: got {one} and {other}"
        raise InputError(text, code="mixed-samples", train=one, test=other)
    named = test or train
    titles, places = (train.title, named.title), (train.place, named.place)
    y, y_test, classes = class_numbers(train.y, test.y if test else None, options.classes, titles, places)
    writer = None if train.writer is None else torch.from_numpy(number_from_zero([train.writer])[0])
    whole = Split(train.x, torch.from_numpy(y), writer)
    if test is not None and y_test is not None:
        splits = whole, Split(test.x, torch.from_numpy(y_test))
    else:
        splits = _divided(whole, options)
    mean, std = _chosen_scaling(splits[0].x, options)
    model = options.model or _default_model(train.x)
    return Dataset(*splits, classes, model, mean, std, files)


def _divided(whole: Split, options: Options) -> tuple[Split, Split]:
    """Return the training and the test split, which holds a share of each class."""
    share = number("test", options.test)
    if not 0 < share < 1:
        text = f"test must be above 0 and below 1: got {share:g}; or pass the test samples"
        raise InputError(text, code="out-of-range", name="test", value=share, low=0.0, high=1.0)
    test = torch.from_numpy(held_out(whole.y.numpy(), share, generator(integer("seed", options.seed), "own test")))
    if not test.any():
        text = f"too few samples for a test split: no class has 2 samples or more: got {len(whole.y)} samples"
        raise InputError(text, code="too-few-samples", samples=len(whole.y))
    return whole.take(~test), whole.take(test)


def _default_model(x: Tensor) -> str | None:
    """Return the default model for samples of this shape; None for token ids."""
    if holds_tokens(x):
        return None
    return "cnn()" if x.ndim == 4 and min(x.shape[2:]) >= SMALLEST_CNN_IMAGE else "mlp(200)"


# ------------------------------------------------------------------------------------------------------------- features


def _features(title: str, x: Any, channels: Channels) -> Tensor:
    """Convert features to the form in a split: uint8, float32, or int64 for token ids."""
    array = _array_of_numbers(title, x)
    if array.ndim < 2 or 0 in array.shape:
        is_empty = 0 in array.shape
        wanted = "at least one sample and one feature" if is_empty else "two axes or more, one row per sample"
        text = f"{title} must have {wanted}: got the shape {array.shape}"
        raise InputError(text, code="empty-data" if is_empty else "wrong-shape", shape=array.shape)
    if array.ndim == 4 and _channels_are_last(array.shape, channels):
        array = np.moveaxis(array, 3, 1)
    if array.dtype in (np.bool_, np.uint8):
        return torch.from_numpy(array.astype(np.uint8))
    if array.dtype.kind in "iu" and array.ndim != 4:
        _refuse_first(title, array, array < 0, "invalid-feature", "token ids must not be negative")
        return torch.from_numpy(array.astype(np.int64))
    _refuse_first(title, array, ~np.isfinite(array), "invalid-feature", "features must be finite numbers")
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(array, np.float32)
    _refuse_first(title, array, ~np.isfinite(single), "invalid-feature", "features must be in the range of float32")
    return torch.from_numpy(single)


def _as_numpy(title: str, x: Any) -> np.ndarray:
    """Convert an array, tensor, data frame or list to a numpy array."""
    try:
        return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of unequal length, or a dtype unknown to numpy
        text = f"{title} is not an array: {first_line(error).partition('. ')[0]}"
        raise InputError(text, code="not-an-array") from None


def _array_of_numbers(title: str, x: Any) -> np.ndarray:
    array = _as_numpy(title, x)
    if array.size and array.dtype.kind not in "biuf":
        text = f"{title} must hold numbers: got {array.dtype} such as {short_repr(array.flat[0])}"
        raise InputError(text, code="not-an-array", dtype=str(array.dtype))
    return array


def _refuse_first(title: str, array: np.ndarray, wrong: np.ndarray, code: str, reason: str) -> None:
    """Raise an error for the first entry that is wrong."""
    if not wrong.any():
        return
    index = [int(i) for i in np.unravel_index(wrong.argmax(), wrong.shape)]
    where = f"row {index[0]}, " + (f"column {index[1]}" if len(index) == 2 else f"entry {tuple(index[1:])}")
    value = array[tuple(index)].item()
    raise InputError(f"{title}, {where}: {reason}: got {value}", code=code, row=index[0], entry=index[1:], value=value)


def _channels_are_last(shape: tuple[int, ...], channels: Channels) -> bool:
    if choice("channels", channels, ("auto", "first", "last")) != "auto":
        return channels == "last"
    return shape[3] in COLOURS and shape[1] not in COLOURS


def _column(title: str, values: Any) -> list[Any]:
    """Convert labels or writers to a list."""
    array = _as_numpy(title, values)
    if array.ndim != 1:
        text = f"{title} must have one axis, one entry per sample: got the shape {array.shape}"
        raise InputError(text, code="wrong-shape", shape=array.shape)
    return [value.item() if isinstance(value, np.generic) else value for value in array.tolist()]


# -------------------------------------------------------------------------------------------------------------- scaling


def scaling(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel or column of x, never 0.

    Images have channels (m, c, h, w) and tables columns (m, f); other samples have one mean for all entries.
    """
    axes = [0, *range(2, x.ndim)] if x.ndim in (2, 4) else list(range(x.ndim))
    entries = math.prod(x.shape[axis] for axis in axes)  # in each channel or column
    correction = 1 if entries > 1 else 0
    if x.dtype == torch.uint8:
        x = x.float()
        std = x.std(axes, correction=correction).clamp(min=1.0)
    else:  # squares may exceed the range of float32
        x = x.double()
        std = x.std(axes, correction=correction)
        std = torch.where(std > 0, std, 1.0)
    return tuple(x.mean(axes).reshape(-1).tolist()), tuple(std.reshape(-1).tolist())


def _chosen_scaling(x: Tensor, options: Options) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel or column: from the options, or else the samples."""
    if holds_tokens(x):
        if options.mean is not None or options.std is not None:
            raise InputError("token ids are not scaled: leave out mean and std", code="scaled-tokens")
        return (0.0,), (1.0,)
    mean, std = scaling(x) if None in (options.mean, options.std) else ((), ())
    return (
        mean if options.mean is None else _scale("mean", options.mean, x),
        std if options.std is None else _scale("std", options.std, x),
    )


def _scale(name: str, value: Scale, x: Tensor) -> tuple[float, ...]:
    """Check a mean or a standard deviation of the options."""
    values = [value] if isinstance(value, int | float) else list(value)
    allowed = sorted({1, x.shape[1]})
    if len(values) not in allowed:
        text = f"{name} must be a number, or {x.shape[1]} of them, one for each channel or column: got {len(values)}"
        raise InputError(text, code="wrong-length", name=name, value=value, allowed=allowed)
    if name == "std":
        return tuple(positive(name, one) for one in values)
    return tuple(number(name, one, -math.inf, math.inf) for one in values)
