"""Data sets from arrays and torch data sets: kinds of features, labels, the split, the scaling, and bad input."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, TensorDataset

import stableair as sa
from helpers import errors
from stableair.data.partitions import divide, partition

RNG = np.random.default_rng(0)
Y = np.arange(40) % 4
TABLE = RNG.normal(3, 2, (40, 3))
TOKENS = RNG.integers(0, 9, (40, 5))
PIXELS = RNG.integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)
KINDS = {"table": TABLE, "tokens": TOKENS, "images": PIXELS, "sequences": RNG.random((40, 4, 2))}


def refused(code, *args, **options):
    return errors.refused(code, sa.Dataset.from_arrays, *args, **options)


def all_samples(data):
    """All samples of both splits in a fixed order, with their classes."""
    x, y = (torch.cat([getattr(split, name) for split in (data.train, data.test)]) for name in "xy")
    return sorted(zip(x.flatten(1).tolist(), y.tolist(), strict=True))


# ------------------------------------------------------------------------------------------------------------- features


def test_table_is_scaled_per_column_of_the_training_samples():
    data = sa.Dataset.from_arrays(TABLE, Y)
    assert (data.train.x.dtype, data.model, data.classes) == (torch.float32, "mlp(200)", 4)
    inputs = data.inputs(data.train.x)
    torch.testing.assert_close(inputs.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std(0), torch.ones(3), atol=1e-5, rtol=0)
    assert data.inputs(data.test.x).mean(0).abs().max() > 1e-3, "the test samples do not affect the scale"


def test_token_ids_stay_integers():
    data = sa.Dataset.from_arrays(TOKENS.astype(np.int16), Y)
    assert data.model is None
    assert data.inputs(data.train.x, torch.float64).dtype == torch.int64
    assert torch.equal(data.inputs(data.train.x), data.train.x)
    assert [row for row, _ in all_samples(data)] == sorted(TOKENS.tolist())


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (PIXELS, (3, 6, 5)),
        (PIXELS.transpose(0, 3, 1, 2), (3, 6, 5)),
        (PIXELS[..., :1], (1, 6, 5)),
        (PIXELS[:, :3], (3, 5, 3)),  # both axes may be the channels: the first one is used
        (PIXELS.astype(np.int64), (3, 6, 5)),
    ],
)
def test_the_channel_axis_is_detected(x, shape):
    data = sa.Dataset.from_arrays(x, Y)
    assert tuple(data.train.x.shape[1:]) == shape
    assert data.train.x.dtype == (torch.uint8 if x.dtype == np.uint8 else torch.float32)
    assert len(data.mean) == shape[0]
    torch.testing.assert_close(data.inputs(data.train.x).mean((0, 2, 3)), torch.zeros(shape[0]), atol=1e-4, rtol=0)


def test_the_declared_axis_of_the_channels_is_used():
    x = PIXELS[:, :3]
    last = sa.Dataset.from_arrays(x, Y, channels="last")
    assert tuple(last.train.x.shape[1:]) == (3, 3, 5)
    assert [row for row, _ in all_samples(last)] == sorted(x.transpose(0, 3, 1, 2).reshape(40, -1).tolist())
    assert refused("unknown-value", x, Y, channels="middle").fields["value"] == "middle"


@pytest.mark.parametrize(("shape", "model"), [((4, 4), "cnn()"), ((3, 9), "mlp(200)")])
def test_the_default_model_depends_on_the_image_size(shape, model):
    assert sa.Dataset.from_arrays(np.ones((40, 1, *shape)), Y).model == model


def test_constant_and_single_values_are_scaled_by_one():
    data = sa.Dataset.from_arrays(np.ones((40, 2)), Y)
    assert data.std == (1.0, 1.0)
    x = np.array([[3], [4]], np.uint8)
    one_each = sa.Dataset.from_arrays(x[:1], [1], x_test=x, y_test=[0, 1], classes=2)
    assert torch.isfinite(one_each.inputs(one_each.train.x)).all()


def test_a_specified_scale_is_used():
    data = sa.Dataset.from_arrays(TABLE, Y, mean=1, std=(2, 4, 8))
    torch.testing.assert_close(data.inputs(data.train.x), (data.train.x - 1) / torch.tensor([2.0, 4.0, 8.0]))
    refused("wrong-length", TABLE, Y, std=(1, 2))
    refused("out-of-range", TABLE, Y, std=0)
    refused("scaled-tokens", TOKENS, Y, mean=0)


def test_frames_lists_and_tensors_are_equal():
    expected = sa.Dataset.from_arrays(TABLE, Y)
    for x, y in ((pd.DataFrame(TABLE), pd.Series(Y)), (TABLE.tolist(), Y.tolist()), map(torch.tensor, (TABLE, Y))):
        data = sa.Dataset.from_arrays(x, y)
        assert torch.equal(data.train.x, expected.train.x)
        assert torch.equal(data.test.y, expected.test.y)


# ------------------------------------------------------------------------------------------------- labels and the split


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        (["b", "a", "c"], [1, 0, 2]),
        ([10, 9, 100], [1, 0, 2]),
        ([2.0, 1.0, 4.0], [1, 0, 2]),
        ([True, False, 1], [1, 0, 1]),
    ],
)
def test_labels_are_numbered_in_sorted_order(labels, numbers):
    data = sa.Dataset.from_arrays([[0.0], [1.0], [2.0]], labels, x_test=[[0.0]], y_test=labels[:1])
    assert data.train.y.tolist() == numbers
    assert data.test.y.tolist() == numbers[:1]
    assert data.classes == len(set(numbers))


def test_classes_may_be_declared():
    assert sa.Dataset.from_arrays(TABLE, Y, classes=9).classes == 9
    named = sa.Dataset.from_arrays(TABLE, np.array(["d", "c", "b", "a"])[Y], classes=("d", "c", "b", "a"))
    assert all_samples(named) == all_samples(sa.Dataset.from_arrays(TABLE, Y))
    error = refused("unknown-class", TABLE, Y, classes=3)
    assert (error.fields["row"], error.fields["value"]) == (3, 3)
    assert refused("unknown-class", TABLE, Y, x_test=TABLE, y_test=Y + 1).fields["row"] == 3
    refused("invalid-classes", TABLE, Y * 0)
    refused("invalid-classes", TABLE, Y, classes=("a", "a"))


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_test_split_is_stratified_and_a_function_of_the_seed(share):
    y = np.repeat([0, 1, 2], [100, 20, 3])
    x = np.arange(len(y), dtype=float)[:, None]
    data = sa.Dataset.from_arrays(x, y, test=share, seed=5)
    for label, count in enumerate((100, 20, 3)):
        held = int((data.test.y == label).sum())
        assert abs(held - share * count) <= 1
        assert 1 <= held < count
    assert [row for row, _ in all_samples(data)] == sorted(x.tolist()), "each sample is in one split"
    assert torch.equal(data.test.x, sa.Dataset.from_arrays(x, y, test=share, seed=5).test.x)
    assert not torch.equal(data.test.x, sa.Dataset.from_arrays(x, y, test=share, seed=6).test.x)


def test_the_only_sample_of_a_class_is_a_training_sample():
    data = sa.Dataset.from_arrays([[0.0], [1.0], [2.0]], ["a", "b", "b"])
    assert data.train.y.tolist().count(0) == 1
    refused("too-few-samples", [[0.0], [1.0]], ["a", "b"])
    for share in (0, 1, -0.5):
        refused("out-of-range", TABLE, Y, test=share)


def test_specified_test_samples_are_used():
    data = sa.Dataset.from_arrays(TABLE, Y, x_test=TABLE[:7] + 1, y_test=Y[:7])
    torch.testing.assert_close(data.test.x, torch.tensor(TABLE[:7] + 1).float())
    assert len(data.train.y) == 40
    refused("missing-array", TABLE, Y, x_test=TABLE)
    refused("missing-array", TABLE, Y, y_test=Y)
    refused("mixed-samples", TABLE, Y, x_test=TABLE[:, :2], y_test=Y)
    refused("mixed-samples", TOKENS, Y, x_test=TOKENS / 1.0, y_test=Y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spec", ["iid()", "dirichlet(beta=0.3)", "dirichlet_by_class(beta=0.5)", "shards()", "by_writer()"]
)
def test_partitions_cover_every_kind(kind, spec):
    data = sa.Dataset.from_arrays(KINDS[kind], Y, writer=[f"w{i % 8}" for i in range(40)])
    parts = divide(partition.one(spec)(), data.train, 4, np.random.default_rng(0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(data.train.y)))
    if spec == "by_writer()":
        writers = [set(data.train.writer[part].tolist()) for part in parts]
        assert sum(map(len, writers)) == len(set.union(*writers)) == 8


# ------------------------------------------------------------------------------------------------------------ bad input


def replaced(array, value, *index):
    changed = np.array(array, float)
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("code", "x", "y"),
    [
        ("unequal-lengths", TABLE, Y[:-1]),
        ("empty-data", np.empty((0, 3)), []),
        ("empty-data", np.empty((40, 0)), Y),
        ("wrong-shape", TABLE[:, 0], Y),
        ("wrong-shape", TABLE, Y[:, None]),
        ("not-an-array", [[1.0], [1.0, 2.0]], [0, 1]),
        ("not-an-array", [["red"]] * 40, Y),
        ("not-an-array", TABLE * 1j, Y),
        ("missing-label", TABLE, replaced(Y, np.nan, 3)),
        ("missing-label", TABLE, [*Y[:-1], None]),
        ("missing-label", TABLE, [*map(str, Y[:-1]), " "]),
        ("missing-label", TABLE, Y - 1),
        ("invalid-label", TABLE, replaced(Y, 1.5, 3)),
    ],
)
def test_invalid_arrays_are_refused(code, x, y):
    refused(code, x, y)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_the_error_has_the_position_of_an_invalid_value(value):
    error = refused("invalid-feature", replaced(TABLE, value, 7, 2), Y)
    assert (error.fields["row"], error.fields["entry"]) == (7, [2])
    assert "row 7, column 2" in str(error)


def test_the_error_has_the_position_of_a_negative_token():
    tokens = TOKENS.copy()
    tokens[4, 1] = -1
    error = refused("invalid-feature", tokens, Y)
    assert (error.fields["row"], error.fields["value"]) == (4, -1)


def test_unknown_option_is_refused():
    assert refused("unknown-option", TABLE, Y, sead=1).fields["names"] == ["sead"]


# --------------------------------------------------------------------------------------------------- torch's data sets


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(torch.tensor(TABLE), Y.tolist(), strict=True)


class Photos:
    """Pillow images, as in torchvision's data sets without a transform."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return Image.fromarray(PIXELS[i]), int(Y[i])


def test_torch_data_sets_are_converted():
    expected = sa.Dataset.from_arrays(TABLE, Y, test=0.3)
    tensors = TensorDataset(torch.tensor(TABLE), torch.tensor(Y))
    for source in (tensors, Stream()):
        assert torch.equal(sa.Dataset.from_torch(source, test=0.3).train.x, expected.train.x)
    photos = sa.Dataset.from_torch(Photos(), Photos())
    assert torch.equal(photos.train.x, torch.tensor(PIXELS).permute(0, 3, 1, 2))
    assert torch.equal(photos.test.y, torch.tensor(Y))


@pytest.mark.parametrize(
    ("code", "items"),
    [
        ("empty-data", []),
        ("wrong-type", [torch.ones(3)]),
        ("mixed-samples", [(torch.ones(3), 0), (torch.ones(4), 1)]),
        ("wrong-type", 3),
    ],
)
def test_invalid_torch_data_sets_are_refused(code, items):
    errors.refused(code, sa.Dataset.from_torch, items)
