"""Tests on the real files in ``FEDJAX_MR_DATA``, skipped without them."""

import os
from pathlib import Path

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import data

PLACE = os.environ.get("FEDJAX_MR_DATA")


@pytest.fixture
def real():
    """A file or folder of the real data."""

    def find(name):
        if PLACE is None:
            pytest.skip("FEDJAX_MR_DATA does not name a folder with real data")
        path = Path(PLACE) / name
        if not path.exists():
            pytest.skip(f"FEDJAX_MR_DATA has no {name}")
        return path

    return find


def test_mnist_by_writer_in_one_flag(real):
    path = real("arrays/mnist_by_writer.npz")
    dataset = data.load(str(path))
    assert (dataset.x.shape[1:], dataset.num_classes, len(dataset.client_names)) == ((28, 28, 1), 10, 539)
    assert len(dataset.y) + len(dataset.test_y) == 60_000
    federated = data.federate(dataset, partition="natural", num_clients=0, min_samples_per_client=101)
    assert federated.num_clients == 430
    shares = federated.test.sizes / (federated.sizes + federated.test.sizes)
    assert np.abs(shares - 0.2).max() < 0.005


def test_leaf_digits(real):
    dataset = data.load("femnist", data_dir=str(real("leaf/femnist_digits")))
    assert len(dataset.client_names) == 30
    assert (dataset.x.shape[1:], dataset.x.dtype) == ((28, 28, 1), np.uint8)
    assert dataset.x[:, 0, 0].mean() > 250  # a corner is paper, which is white
    again = data.load("femnist", data_dir=str(real("leaf/femnist_digits")))
    np.testing.assert_array_equal(dataset.x, again.x)


def test_leaf_shakespeare(real):
    dataset = data.load("shakespeare", data_dir=str(real("leaf/shakespeare")))
    assert (dataset.x.shape, dataset.vocabulary, len(dataset.client_names)) == ((9600, 80), 80, 30)
    # Samples of a role overlap by all but one character: the label of one is the last character of the next.
    same = dataset.client[1:] == dataset.client[:-1]
    assert (dataset.x[1:, -1] == dataset.y[:-1])[same].mean() > 0.5


@pytest.mark.slow
def test_cifar10_in_its_original_order_also_from_the_cache(real):
    folder = str(real("tfds"))
    dataset = data.load("cifar10", data_dir=folder)
    assert dataset.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]  # the original order, as torchvision has it
    np.testing.assert_array_equal(np.bincount(dataset.y), [5000] * 10)
    np.testing.assert_array_equal(np.bincount(dataset.test_y), [1000] * 10)
    again = data.load("cifar10", data_dir=folder)
    np.testing.assert_array_equal(again.y, dataset.y)
    assert again.x.nbytes == 50_000 * 32 * 32 * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "place", "settings"),
    [
        ("cifar10", "tfds", {"clients": 100, "model": "lenet5", "batch_size": 50, "augment": "crop_flip"}),
        (None, "arrays/mnist_by_writer.npz", {"clients": 0, "partition": "natural", "model": "lenet5"}),
        ("femnist", "leaf/femnist_digits", {"clients": 0, "partition": "natural", "model": "cnn_femnist"}),
        ("shakespeare", "leaf/shakespeare", {"clients": 0, "partition": "natural", "model": "lstm1", "lr": 0.1}),
    ],
)
def test_three_rounds_of_fedmr(real, pictures, tmp_path, dataset, place, settings):
    path = str(real(place))
    source = {"dataset": path} if dataset is None else {"dataset": dataset, "data_dir": path}
    common = {
        "rounds": 3,
        "cohort": 4,
        "local_epochs": 1,
        "eval_every": 1,
        "progress": False,
        "run_dir": str(tmp_path / "run"),
    }
    with pictures():
        result = fmr.run(fmr.Config(strategy="fedmr", **source, **settings, **common))
    losses = [row["train_loss"] for row in result.rows]
    assert losses[-1] < losses[0]
    assert (tmp_path / "run" / "partition.npz").is_file()
    assert (tmp_path / "run" / "partition.png").is_file()
