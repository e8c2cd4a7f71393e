"""Shoulder exercises seen by a smartwatch: 140 series of 10 people and 7 exercises, included in seglearn.

Burns et al., "Shoulder physiotherapy exercise recognition: machine learning the inertial signals from a smartwatch"
(Physiological Measurement 39(7), 2018). seglearn has the BSD license; the table is a part of it. Acceleration and
angular velocity along three axes are measured 50 times a second. A series is one person, one exercise and one arm, and
is cut into windows of `LENGTH` positions that do not overlap. All windows of a series are either training or test
samples.
"""

import dataclasses
import io

import numpy as np

from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources import wheels
from fedjax_mr.data.sources.arrays import from_arrays

FILE = "data/watch_dataset.npy"
DIGEST = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
LENGTH = 100  # positions of a window: two seconds
RATIO = 5  # each fifth series is a test series


def load(request: DataRequest) -> Dataset:
    """The windows, x [M, 100, 6] float32. Natural clients are the ten people.

    Raises:
      UserError: seglearn is not installed.
    """
    content = wheels.read(request.name, "seglearn", FILE, digest=DIGEST)
    table = np.load(io.BytesIO(content), allow_pickle=True).item()  # the digest says that it is the known dictionary
    windows = [series[: len(series) // LENGTH * LENGTH].reshape(-1, LENGTH, 6) for series in table["X"]]
    person, exercise, arm = (np.asarray(table[name]).astype(np.int32) for name in ("subject", "y", "side"))
    # Spread evenly: four of the 20 series of an exercise, two or three of the 14 series of a person, both arms.
    is_test = (person + exercise + 2 * arm) % RATIO == 0
    number = np.repeat(np.arange(len(windows)), list(map(len, windows)))  # the series of each window
    x, test = np.concatenate(windows).astype(np.float32), is_test[number]
    client = np.array([f"person {each:02}" for each in person])[number]
    positions = x[~test].reshape(-1, 6).astype(np.float64)
    mean, std = tuple(positions.mean(axis=0).tolist()), tuple(positions.std(axis=0).tolist())
    dataset = from_arrays(
        x[~test], exercise[number][~test], client=client[~test], x_test=x[test], y_test=exercise[number][test],
        client_test=client[test], mean=mean, std=std, name=request.name,
    )  # fmt: skip
    return dataclasses.replace(dataset, class_names=tuple(table["y_labels"]))
