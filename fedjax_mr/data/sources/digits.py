"""The 1,797 handwritten digits (8 x 8, 17 grey levels) included in scikit-learn: real data without a download.

Importing scikit-learn takes as long as all other imports of a run together (3 s of one core), so its file is read, and
its stratified split drawn, without it.
"""

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr.data.federated import DataRequest, Dataset

FILE = "datasets/data/digits.csv.gz"  # in scikit-learn's folder; a line has 64 grey levels and the digit
TEST_SHARE = 0.2
SPLIT_SEED = 0  # constant, so that all runs of all strategies are tested on the same 360 digits


def load(request: DataRequest) -> Dataset:
    """The handwritten digits of scikit-learn. The test set is a stratified 20 % with a constant seed."""
    del request  # this dataset has no options
    lines = _lines()
    x = (lines[:, :-1].reshape(-1, 8, 8, 1) / 16.0).astype(np.float32)
    y = lines[:, -1].astype(np.int32)
    train, test = stratified_split(y, TEST_SHARE, SPLIT_SEED)
    return Dataset("digits", x[train], y[train], x[test], y[test], num_classes=10, mean=(0.5,), std=(0.5,))


def _lines() -> np.ndarray:
    """The grey levels and the digits [1797, 65]."""
    package = importlib.util.find_spec("sklearn")  # imports nothing
    for folder in (package and package.submodule_search_locations) or ():
        if (path := Path(folder) / FILE).exists():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # a version that keeps its file elsewhere

    digits: Any = load_digits()
    return np.column_stack([digits.data, digits.target])


def stratified_split(y: np.ndarray, test_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide samples at random, with about equal shares of each class on both sides.

    The rows are those of scikit-learn's ``train_test_split(..., stratify=y, random_state=seed)``, in the same order.

    Args:
      y: the classes of the samples [M], from 0 to C - 1.
      test_share: fraction of the samples on the second side, rounded up.
      seed: seed of NumPy's older generator.

    Returns:
      The rows of both sides.
    """
    random = np.random.RandomState(seed)
    num_test = math.ceil(test_share * len(y))
    per_class = np.bincount(y)
    in_train = _apportion(len(y) - num_test, per_class, random)
    in_test = _apportion(num_test, per_class - in_train, random)
    train, test = [], []
    for label, (first, second) in enumerate(zip(in_train, in_test, strict=True)):
        rows = random.permutation(np.flatnonzero(y == label))
        train.append(rows[:first])
        test.append(rows[first : first + second])
    return random.permutation(np.concatenate(train)), random.permutation(np.concatenate(test))


def _apportion(seats: int, sizes: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Divide seats in proportion to sizes: largest remainders first, and equal remainders at random."""
    exact = sizes / sizes.sum() * seats
    shares = np.floor(exact)
    remainders = exact - shares
    for remainder in np.unique(remainders)[::-1]:
        if (left := int(seats - shares.sum())) > 0:
            equal = np.flatnonzero(remainders == remainder)
            shares[random.choice(equal, min(left, len(equal)), replace=False)] += 1
    return shares.astype(int)
