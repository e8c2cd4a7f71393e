"""The 1,797 handwritten digits (8 x 8, 17 grey levels) that scikit-learn ships: real data without a download."""

from typing import Any

import numpy as np

from fedjax_mr.data.federated import DataRequest, Dataset

TEST_SHARE = 0.2
SPLIT_SEED = 0  # constant: every run of every strategy is tested on the same 360 digits


def load(request: DataRequest) -> Dataset:
    """Return the digits; test set = a stratified 20 % with a constant seed."""
    del request  # there is nothing to choose
    from sklearn.datasets import load_digits  # a second to import, and only this data set needs it
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    x = (digits.images[..., None] / 16.0).astype(np.float32)
    y = digits.target.astype(np.int32)
    rows: Any = train_test_split(np.arange(len(y)), test_size=TEST_SHARE, stratify=y, random_state=SPLIT_SEED)
    train, test = rows
    return Dataset("digits", x[train], y[train], x[test], y[test], num_classes=10, mean=(0.5,), std=(0.5,))
