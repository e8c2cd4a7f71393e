"""What a network receives: absurd scales are named in one line, other kinds and units of test samples are refused."""

import dataclasses

import numpy as np
import pytest

from fedjax_mr import data
from fedjax_mr.data import Dataset, divide, inputs
from fedjax_mr.errors import UserError

RNG = np.random.default_rng(0)
LABELS = np.arange(100) % 4
BYTES = RNG.integers(0, 256, (100, 4, 4, 1), dtype=np.uint8)
TABLE = RNG.normal(size=(100, 3)).astype(np.float32)


def made(x, test_x=None, **facts):
    """A dataset that no source has checked."""
    x = np.asarray(x)
    test_x = x if test_x is None else np.asarray(test_x)
    labels = np.resize(LABELS, len(x)), np.resize(LABELS, len(test_x))
    return Dataset("made", x, labels[0], test_x, labels[1], 4, **facts)


def notes(*arguments, **facts):
    return data.federate(made(*arguments, **facts), partition="iid", num_clients=2).notes


SPARSE = (RNG.random((100, 40)) < 0.004).astype(np.float32)
HALF = {"mean": (0.5,), "std": (0.5,)}


@pytest.mark.parametrize(
    ("x", "facts"),
    [
        (BYTES, HALF),
        (BYTES, {"mean": (0.1307,), "std": (0.3081,)}),
        (BYTES, {}),
        (BYTES, {"mean": (0.5,), "std": (-0.5,)}),  # FEMNIST
        ((BYTES > 200).astype(np.uint8) * 255, HALF),
        (BYTES / np.float32(255), {}),
        (TABLE, {}),
        (TABLE * [1, 300, 0.01] + [0, 2000, 5], {"mean": (0, 2000, 5), "std": (1, 300, 0.01)}),
        (SPARSE, {}),  # rare words
        ((SPARSE - SPARSE.mean(0)) / (SPARSE.std(0) + 1e-6), {}),
        (TABLE / np.linalg.norm(np.tile(TABLE, 256), axis=1, keepdims=True), {}),  # an embedding of 768 numbers
        (np.append(TABLE, np.ones((100, 1)), axis=1), {}),  # a constant column
        (np.arange(400, dtype=np.int32).reshape(100, 4), {"vocabulary": 400}),
    ],
)
def test_usual_scales_are_not_noted(x, facts):
    assert notes(x, **facts) == ()


REMEDY = "if that is not intended: pass mean= and std= of the training samples"


@pytest.mark.parametrize(
    ("x", "facts", "message"),
    [
        (
            BYTES,
            {"mean": (0.0,), "std": (255.0,)},
            ", which hardly differ; if that is not intended: bytes (here up to 255",
        ),
        (BYTES // 128, HALF, "bytes (here up to 1) are divided by 255, and mean= and std= are those of the result"),
        (BYTES // 16, HALF, "the network receives values of -0.942 +- 0.037, which hardly differ"),
        (BYTES, {"mean": (0.0,), "std": (0.0039,)}, ", and it learns little from values far above 1"),
        (TABLE, {"std": (1e-44,)}, "values of nan +- nan (column 0), and it learns little from values far above 1"),
        (BYTES / np.float32(1), HALF, f", and it learns little from values far above 1; {REMEDY}"),
        (TABLE / 100, {}, f", which hardly differ; {REMEDY}, one for each column"),
        (
            TABLE + 50,
            {},
            "the network receives values of 50 +- 1.1 (column 2), and it learns little from values far above 1",
        ),
        (TABLE * [1, 1, 0.05] + [0, 0, 2], {}, "(column 2), which hardly differ"),
        (TABLE * [1, 0.005, 4], {}, "(column 2) and "),
        (TABLE * [1, 0.005, 4], {}, f"(column 1), and it hardly notices the smaller ones; {REMEDY}, one for each"),
        (
            np.ones((100, 3), np.float32),
            {},
            "made: the network receives values of 1 +- 0 (column 0), which hardly differ",
        ),
    ],
)
def test_an_absurd_scale_is_one_line_with_a_remedy(x, facts, message):
    (note,) = notes(x, **facts)
    assert message in note and note.startswith("made: the network receives values of ") and "\n" not in note


def test_the_test_samples_vary_like_the_training_samples():
    (note,) = notes(TABLE, TABLE / 4)
    assert "a standard deviation of 0.26 in the test samples, but 1 in the training samples; if that is not" in note
    assert notes(TABLE, TABLE / 2) == notes(TABLE, TABLE[:9] / 4) == ()  # few values say nothing


@pytest.mark.parametrize(
    ("x", "test_x", "facts", "message"),
    [
        (
            BYTES,
            BYTES // 255 + 1,
            {},
            "made: typical values are 1 in the test samples, but 127 in the training samples",
        ),
        (BYTES / np.float32(255), BYTES / np.float32(1), HALF, "in the training samples: bring both to the same unit"),
        (
            BYTES / np.float32(255),
            BYTES,
            {},
            "the test samples are bytes (uint8), but the training samples floating-point",
        ),
        (
            TABLE,
            TABLE.astype(np.int32),
            {},
            "the test samples are tokens (int32), but the training samples floating-point",
        ),
        (
            BYTES,
            None,
            {"mean": (125.3,), "std": (63.0,)},
            "mean is 125.3, but mean and std of bytes are those of pixels",
        ),
        (TABLE, None, {"mean": (0.0, 0.0)}, "mean is (0.0, 0.0); it must be one finite number, or one per channel"),
        (TABLE, None, {"std": (0.0,)}, "std is (0.0,); it must not be 0"),
        (np.where(TABLE > 2, np.nan, TABLE), None, {}, "the training set has a value that is not finite (nan) in row "),
        (TABLE, np.where(TABLE > 2, np.nan, TABLE), {}, "the test set has a value that is not finite (nan) in row "),
    ],
)
def test_another_kind_or_unit_is_refused(x, test_x, facts, message):
    with pytest.raises(UserError) as caught:
        notes(x, test_x, **facts)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_public_samples_of_another_dataset_have_the_same_unit():
    federated = data.federate(made(TABLE), partition="iid", num_clients=2, public_share=0.1)
    public = lambda x: divide.with_public(federated, dataclasses.replace(made(x), name="other"), labels=True, seed=0)
    assert public(TABLE).notes == ()
    assert "standard deviation of 4.2 in the public (other) samples, but 1.1" in public(TABLE * 4).notes[0]
    with pytest.raises(UserError, match=r"typical values are 73.1 in the public \(other\) samples, but 0.731"):
        public(TABLE * 100)


def test_training_samples_of_one_class_are_noted():
    one = dataclasses.replace(made(TABLE), y=np.full(100, 2))
    (note,) = data.federate(one, partition="iid", num_clients=2).notes
    assert (
        note == "all 100 training samples of made have label 2, so there is nothing to learn, whatever the accuracy is"
    )


def test_the_statistics_are_those_of_each_nth_sample(monkeypatch):
    monkeypatch.setattr(inputs, "MOST_VALUES", 120)
    np.testing.assert_array_equal(inputs._some(TABLE), TABLE[::3])
    assert len(inputs._some(np.zeros((2, 100_000), np.float32))) == 1
