"""The digits are those of scikit-learn, and so is their split, without an import of it."""

import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fedjax_mr.data import load
from fedjax_mr.data.sources import digits


def test_the_digits_and_their_split_are_those_of_scikit_learn():
    theirs, ours = load_digits(), load("digits")
    train, test = train_test_split(
        np.arange(1797), test_size=digits.TEST_SHARE, stratify=theirs.target, random_state=digits.SPLIT_SEED
    )
    for rows, x, y in ((train, ours.x, ours.y), (test, ours.test_x, ours.test_y)):
        np.testing.assert_array_equal(x, (theirs.images[rows][..., None] / 16).astype(np.float32))
        np.testing.assert_array_equal(y, theirs.target[rows])


@pytest.mark.parametrize(("seed", "share"), [(1, 0.2), (2, 0.33), (3, 0.5), (4, 0.05)])
def test_stratified_splits_are_those_of_scikit_learn(seed, share):
    y = np.random.default_rng(seed).integers(0, 7, 300)
    y = np.concatenate([y, np.repeat(np.arange(7), 20)])
    rows = train_test_split(np.arange(len(y)), test_size=share, stratify=y, random_state=seed)
    for theirs, ours in zip(rows, digits.stratified_split(y, share, seed), strict=True):
        np.testing.assert_array_equal(theirs, ours)


def test_a_version_that_keeps_its_file_elsewhere_is_imported(monkeypatch):
    expected = load("digits").x
    monkeypatch.setattr(digits, "FILE", "absent")
    np.testing.assert_array_equal(load("digits").x, expected)


@pytest.mark.slow
def test_the_digits_need_no_import_of_scikit_learn():
    script = "import sys; from fedjax_mr import data; data.load('digits'); assert 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
