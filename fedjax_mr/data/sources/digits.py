"""The 1,797 handwritten digits (8 x 8, 17 grey levels) included in scikit-learn: real data without a download."""

from typing import Any

import numpy as np

from fedjax_mr.data.federated import DataRequest, Dataset

TEST_SHARE = 0.2
SPLIT_SEED = 0  # constant, so that all runs of all strategies are tested on the same 360 digits


def load(request: DataRequest) -> Dataset:
    """The handwritten digits of scikit-learn. The test set is a stratified 20 % with a constant seed."""
    del request  # this dataset has no options
    from sklearn.datasets import load_digits  # imported here because it takes a second and only this dataset needs it
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    x = (digits.images[..., None] / 16.0).astype(np.float32)
    y = digits.target.astype(np.int32)
    rows: Any = train_test_split(np.arange(len(y)), test_size=TEST_SHARE, stratify=y, random_state=SPLIT_SEED)
    train, test = rows
    return Dataset("digits", x[train], y[train], x[test], y[test], num_classes=10, mean=(0.5,), std=(0.5,))
