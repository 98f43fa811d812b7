import pytest
import torch
from torch.nn import functional as F

from helpers.components import EXAMPLES
from stableair.data.datasets import dataset, digits, hold_out, stored, synthetic
from stableair.data.image_sets import IMAGE_SETS
from stableair.errors import InputError
from stableair.training.augmentation import crop_flip


@pytest.mark.parametrize("spec", [spec for spec in EXAMPLES["data"] if spec != "remote()"])
def test_every_data_set_has_two_splits_and_labels(spec, sample_files):
    data = dataset.one(spec)()
    for split in (data.train, data.test):
        assert len(split.x) == len(split.y) > 0
        assert split.x.ndim == (2 if spec.startswith(("csv", "npz")) else 4)
        assert split.y.dtype == torch.int64
        assert split.y.min() >= 0
        assert split.y.max() < data.classes
    x = data.inputs(data.train.x)
    assert x.dtype == (torch.int64 if "tokens" in spec else torch.float32)
    assert x.isfinite().all()


def test_a_local_run_cannot_use_the_data_of_real_clients():
    with pytest.raises(InputError) as error:
        dataset.one("remote()")()
    assert error.value.code == "remote-data"


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_a_data_set_has_the_properties_of_its_table_row(name):
    known, data = IMAGE_SETS[name], dataset.one(name)()
    assert (data.classes, data.model, data.mean, data.std) == (known.classes, known.model, known.mean, known.std)
    assert tuple(data.train.x.shape[1:]) == tuple(data.test.x.shape[1:]) == known.shape
    assert stored(name) == (name, known.source)


def test_digits_are_those_of_scikit_learn_with_a_fixed_split():
    from sklearn.datasets import load_digits

    data, again = digits(), digits()
    both = torch.cat([data.train.x, data.test.x]).flatten(1)
    real = torch.from_numpy(load_digits().data).to(torch.uint8)
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, real.tolist()))
    assert (len(data.train.y), len(data.test.y)) == (1437, 360)
    assert torch.equal(data.test.x, again.test.x)
    assert data.test.y.bincount().min() > 20, "every class is in the test split"
    assert data.inputs(data.train.x).max() == 1


def test_the_validation_split_is_a_part_of_the_training_data():
    data = digits()
    held = hold_out(data, 0.2, seed=0)
    assert len(held.test.y) == round(0.2 * 1437)
    together = torch.cat([held.train.x, held.test.x]).flatten(1)
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, data.train.x.flatten(1).tolist()))


def test_synthetic_data_can_be_learnt_and_have_writers():
    data = synthetic(samples=500, classes=4, writers=5)
    centres = torch.stack([data.train.x[data.train.y == c].mean(0) for c in range(4)]).flatten(1)
    guess = torch.cdist(data.test.x.flatten(1), centres).argmin(1)
    assert (guess == data.test.y).float().mean() > 0.95
    assert data.train.writer.unique().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(data.train.x, synthetic(samples=500, classes=4, writers=5).train.x)
    assert not torch.equal(data.train.x, synthetic(samples=500, classes=4, writers=5, seed=1).train.x)


@pytest.mark.parametrize(
    "text", ["synthetic(samples=0)", "synthetic(shape=3)", "synthetic(shape=(0, 1, 1))", "synthetic(classes=1)"]
)
def test_invalid_arguments_are_refused(text):
    with pytest.raises(InputError) as error:
        dataset.one(text)()
    assert error.value.code in ("out-of-range", "wrong-type")


def test_crop_flip_crops_the_padded_image_and_flips_it():
    x = torch.randint(1, 256, (6, 2, 5, 7), dtype=torch.uint8)
    moves = torch.tensor([(0, 0, 0), (2, -1, 0), (-4, 4, 0), (0, 0, 1), (3, 2, 1), (-1, -3, 1)])
    for image, (down, right, mirrored), got in zip(x, moves.tolist(), crop_flip(x, moves), strict=True):
        padded = F.pad(image, (4, 4, 4, 4))
        crop = padded[:, 4 - down : 9 - down, 4 - right : 11 - right]
        assert torch.equal(got, crop.flip(-1) if mirrored else crop)
    assert crop_flip(x, moves).dtype == torch.uint8
    assert torch.equal(crop_flip(x.view(2, 3, 2, 5, 7), moves.view(2, 3, 3)).flatten(0, 1), crop_flip(x, moves))
