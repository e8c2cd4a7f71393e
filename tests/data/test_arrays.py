"""Arrays of users: conversion, held-out test samples, and errors."""

import zipfile

import numpy as np
import pytest

from fedjax_mr import data
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.resolve import resolve

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (60, 6, 5), dtype=np.uint8)
FLOATS = IMAGES[..., None] / 1.0
LABELS = np.arange(60) % 3


def test_images_get_a_channel_and_tests_are_stratified():
    dataset = data.from_arrays(IMAGES, LABELS)
    assert (dataset.x.shape, dataset.x.dtype, dataset.num_classes) == ((48, 6, 5, 1), np.uint8, 3)
    np.testing.assert_array_equal(np.bincount(dataset.test_y), [4, 4, 4])
    every = np.concatenate([dataset.x, dataset.test_x])[..., 0]
    assert sorted(image.tobytes() for image in every) == sorted(image.tobytes() for image in IMAGES)
    np.testing.assert_array_equal(dataset.x, data.from_arrays(IMAGES, LABELS).x)
    assert (dataset.mean, dataset.std, dataset.client) == ((0.5,), (0.5,), None)


def test_each_client_holds_out_a_fifth():
    client = np.repeat(["anna", "zoe", "ben"], [10, 20, 30])
    dataset = data.from_arrays(IMAGES, LABELS, client=client)
    assert dataset.client_names == ("anna", "ben", "zoe")
    np.testing.assert_array_equal(np.bincount(dataset.client), [8, 24, 16])
    np.testing.assert_array_equal(np.bincount(dataset.test_client), [2, 6, 4])
    federated = data.federate(dataset, partition="natural", num_clients=0)
    x, y, split = federated.client_test
    for number, name in enumerate(federated.names):
        mine = IMAGES[client == name]
        owned = np.concatenate([dataset.x[federated.train.rows(number)], x[split.rows(number)]])[..., 0]
        assert sorted(image.tobytes() for image in owned) == sorted(image.tobytes() for image in mine)
    assert len(y) == 12


def test_vectors_tokens_and_large_integers():
    vectors = data.from_arrays(RNG.normal(size=(30, 7)), LABELS[:30])
    assert (vectors.x.dtype, vectors.mean, vectors.std, vectors.vocabulary) == (np.float32, (0.0,), (1.0,), 0)
    tokens = data.from_arrays(np.arange(210).reshape(30, 7), LABELS[:30])
    assert (tokens.x.dtype, tokens.vocabulary) == (np.int32, 210)
    images = data.from_arrays(IMAGES.astype(np.int64), LABELS)
    np.testing.assert_array_equal(images.x, data.from_arrays(IMAGES, LABELS).x)


def test_given_test_part_and_statistics():
    dataset = data.from_arrays(
        IMAGES[:40], LABELS[:40], x_test=IMAGES[40:], y_test=LABELS[40:],
        client=np.arange(40) % 4, client_test=np.arange(20) % 2, mean=(0.2,), std=(0.3,),
    )  # fmt: skip
    assert (len(dataset.y), len(dataset.test_y), dataset.mean, dataset.std) == (40, 20, (0.2,), (0.3,))
    np.testing.assert_array_equal(dataset.test_client, np.arange(20) % 2)
    assert dataset.client_names == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("client", "client_test", "names"),
    [
        ([1.0, 2.0, 10.0], ["1", "10", "2"], ("1", "10", "2")),
        ([1.0, "2", 10], None, ("1", "10", "2")),
        (np.array([1.0, 2.0, 10.0]), np.array([1, 2, 10]), ("1", "2", "10")),
        (np.array([1, 2, 10], np.uint64), np.array([2, 2, 2]), ("1", "2", "10")),
        (np.array([b"anna", b"ben", b"zo\xc3\xab"]), ["anna", "ben", "zoë"], ("anna", "ben", "zoë")),
        ([1, 2, ""], None, ("1", "2")),
        (np.ma.array([1, 2, 10]), None, ("1", "2", "10")),
        ([True, False, True], None, ("False", "True")),
    ],
)
def test_an_id_has_one_form_whatever_its_type(client, client_test, names):
    repeat = lambda ids: (
        None if ids is None else np.repeat(np.asarray(ids, object), 3) if type(ids) is list else ids.repeat(3)
    )
    test = (
        {} if client_test is None else {"x_test": IMAGES[:9], "y_test": LABELS[:9], "client_test": repeat(client_test)}
    )
    assert data.from_arrays(IMAGES[:9], LABELS[:9], client=repeat(client), **test).client_names == names


def test_samples_are_shown_in_one_short_line():
    dataset = data.from_arrays(IMAGES, LABELS, client=np.arange(60) % 4, name="mine")
    line = "Dataset(mine: 48 training and 12 test samples, 6x5x1 of uint8, 3 classes, 4 clients)"
    assert repr(dataset) == line
    assert "clients" not in repr(data.from_arrays(IMAGES, LABELS))
    federated = data.federate(dataset, partition="natural", num_clients=0, validation_share=0.25)
    assert repr(federated) == f"FederatedData(4 clients, 36 rows of {line})"
    assert repr(federated.validation) == "Split(4 clients, 12 rows)"


def test_from_a_file_by_its_path(tmp_path):
    np.savez(tmp_path / "mine.npz", x=IMAGES, y=LABELS, client=np.arange(60) % 6)
    for path in (tmp_path / "mine.npz", str(tmp_path / "mine.npz")):
        dataset = data.load(path)
        assert (dataset.name, len(dataset.client_names)) == ("mine", 6)


def test_classes_that_no_sample_has_need_the_number_of_classes(tmp_path):
    y = np.array([3, 7, 9])[LABELS]
    assert data.from_arrays(IMAGES, y, num_classes=12).num_classes == 12
    np.savez(tmp_path / "mine.npz", x=IMAGES, y=y, num_classes=10, mean=0.25, std=[0.5])
    dataset = data.load(str(tmp_path / "mine.npz"))
    assert (dataset.num_classes, dataset.mean, dataset.std) == (10, (0.25,), (0.5,))
    assert data.from_arrays(IMAGES, LABELS * 2, x_test=IMAGES, y_test=LABELS + 1).num_classes == 5  # 1 and 3 are tested


def test_floats_of_any_size_with_their_statistics_and_as_vectors():
    pixels = FLOATS
    assert data.from_arrays(pixels, LABELS, mean=(127.5,), std=(-127.5,)).std == (-127.5,)
    for x in (pixels / 255, (pixels - 127) / 74, pixels.reshape(60, -1) / 50):
        assert data.from_arrays(x, LABELS).x.dtype == np.float32


def with_nan():
    x = np.ones((60, 4), np.float32)
    x[17, 2] = np.nan
    return x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": LABELS[:-1]}, "60 samples but 59 labels"),
        ({"y": LABELS - 1}, "labels range from -1 to 1, but must be 0..C-1"),
        ({"y": LABELS + 0.5}, "y is float64 of shape (60,); it must be one integer per sample"),
        ({"y": LABELS[:, None]}, "must be one integer per sample"),
        ({"y": LABELS.astype(str)}, "one integer per sample: use classes, y = np.unique(y, return_inverse=True)"),
        ({"y": LABELS.astype(object)}, "one integer per sample: use classes, y = np.unique(y, return_inverse=True)"),
        ({"y": LABELS.astype(float)}, "one integer per sample: use y.astype(int)"),
        ({"y": LABELS > 0}, "one integer per sample: use y.astype(int)"),
        ({"y": LABELS[:, None]}, "one integer per sample: use y[:, 0]"),
        ({"y": np.eye(3)[LABELS]}, "one integer per sample: use y.argmax(1), because the labels are one-hot"),
        (
            {"y": LABELS + 1},
            "labels up to 3 mean 4 classes, but only 3 have samples (1, 2, 3): use classes, y = np.unique(y",
        ),
        ({"y": np.array([3, 7, 9])[LABELS]}, "labels up to 9 mean 10 classes, but only 3 have samples (3, 7, 9)"),
        ({"y": (LABELS > 0) * 10**6}, "mean 1,000,001 classes, but only 2 have samples (0, 1000000)"),
        ({"num_classes": 2}, "num_classes is 2, but must be an integer above the largest label, 2"),
        ({"num_classes": 3.0}, "num_classes is 3.0, but must be an integer"),
        ({"num_classes": 100_001}, "100,001 classes, but at most 100,000 are supported"),
        (
            {"x": FLOATS},
            "x has floating-point values from 0 to 255; networks learn little from values far above 1",
        ),
        (
            {"x": FLOATS / 255, "x_test": FLOATS, "y_test": LABELS},
            "x_test has floating-point values from 0 to 255",
        ),
        (
            {"x": np.zeros((60, 3, 8, 8))},
            "x has images of shape (3, 8, 8) with channels first: use x.transpose(",
        ),
        ({"x": FLOATS}, "far above 1: divide them (x / 255), or pass mean=12"),
        (
            {"x": IMAGES.reshape(60, -1) / 1.0},
            "far above 1: pass mean=x.mean(0) and std=x.std(0) + 1e-6 of the training samples, after a split into x "
            "and x_test",
        ),
        ({"x": FLOATS / 16.0}, "divide them (x / 16), or pass mean="),
        ({"x": FLOATS * -9.0}, "divide them (x / 2295), or pass mean="),
        ({"x": np.full(FLOATS.shape, 1e30)}, "divide them (x / 1e+30), or pass mean=1e+30 and std="),  # and no warning
        ({"mean": (0.5, 0.5)}, "mean is (0.5, 0.5); it must be one number, or one for each of 1 channels"),
        ({"std": 0.0}, "std is 0.0; it must be finite and not 0"),
        ({"mean": np.nan}, "mean is nan; it must be finite"),
        ({"mean": "a"}, "mean is a; it must be one number"),
        (
            {"x": with_nan()},
            "x has a value that is not finite (nan) in row 17, column 2 (1 of 60 values there): replace such values, "
            "for example by the median of the training samples in their column, or drop their rows (1)",
        ),
        ({"x": np.where(np.eye(60), np.inf, 1)}, "(inf) in row 0, column 0 (1 of 60 values there and 59 more columns)"),
        ({"y": LABELS + 0.5}, "task='regression' predicts numbers; classes of values are y = np.digitize(y, edges)"),
        (
            {"y": (LABELS + 0.5)[:, None]},
            "task='regression' predicts numbers; classes of values are y = np.digitize(y[:, 0], ",
        ),
        ({"y": np.ones((60, 2)) * 1.5}, "task='regression' predicts several numbers per sample"),
        (
            {"y": np.arange(300).reshape(60, 5) % 7 < 3},
            "task='multilabel' has several labels per sample",
        ),
        (
            {"y": np.arange(300).reshape(60, 5) % 7},
            "one integer per sample: task='language' has a token for each position",
        ),
        (
            {"y": np.full((60, 4), 0.25)},
            "probabilities of classes are not supported; the most probable class is y.argmax",
        ),
        ({"y": np.where(LABELS, 1.0, np.nan)}, "one integer per sample: 20 labels are missing: drop these samples"),
        (
            {"y": [np.datetime64("NaT", "s"), *"a" * 59]},
            "one integer per sample: 1 labels are missing: drop these samples",
        ),
        ({"y": [None, *"a" * 59]}, "one integer per sample: 1 labels are missing: drop these samples"),
        (
            {"y": LABELS - 1},
            "if -1 marks samples without a label, drop these 20 samples (y >= 0 are the others); if it is a class, use "
            "classes, y = np.unique(y",
        ),
        (
            {"y": LABELS % 2 * 2 - 1},
            "labels range from -1 to 1, but must be 0..C-1: use classes, y = np.unique(y, return",
        ),
        ({"y": np.full(60, -1)}, "-1 marks samples without a label, and all are -1: labels are needed"),
        (
            {"x_test": IMAGES, "y_test": np.full(60, -1)},
            "y_test: labels range from -1 to -1, but must be 0..C-1: -1 marks samples without a label, and all are -1: "
            "pass labelled test samples, or leave out x_test and y_test",
        ),
        ({"x_test": IMAGES, "y_test": LABELS - 1}, "drop these 20 samples (y_test >= 0 are the others)"),
        (
            {"x_test": IMAGES, "y_test": LABELS.astype(str)},
            "number them as those of y, with classes of np.unique(y): y_test = np.searchsorted(classes, y_test)",
        ),
        (
            {"y": LABELS + 1, "x_test": IMAGES, "y_test": LABELS + 1},
            "use classes, y = np.unique(y, return_inverse=True) and y_test = np.searchsorted(classes, y_test), or pass",
        ),
        ({"x": np.full((60, 4), -1)}, "if they are measurements, use x.astype('float32')"),
        (
            {"x": FLOATS / 255, "x_test": IMAGES, "y_test": LABELS},
            "the test samples are bytes (uint8), but the training",
        ),
        (
            {"x": FLOATS.reshape(60, -1) / 255, "x_test": IMAGES.reshape(60, -1).astype(int), "y_test": LABELS},
            "the test samples are tokens (int32), but the training samples floating-point numbers (float32): convert",
        ),
        (
            {"x_test": np.minimum(IMAGES, 1), "y_test": LABELS},
            "arrays: typical values are 1 in the test samples, but 1",
        ),
        (
            {"x": FLOATS / 255, "x_test": FLOATS / 255**2, "y_test": LABELS},
            "in the test samples, but 0.498 in the training samples: bring both to the same unit",
        ),
        (
            {"mean": (125.3,), "std": (63.0,)},
            "mean is 125.3, but mean and std of bytes are those of pixels in 0..1: divide",
        ),
        (
            {"x_test": with_nan()[:, :, None, None], "y_test": LABELS},
            "x_test has a value that is not finite (nan) in row 17",
        ),
        ({"x": np.full((60, 4), np.inf)}, "value that is not finite (inf) in row 0"),
        ({"x": np.arange(60)}, "x is int64 of shape (60,)"),
        ({"x": np.full((60, 2), "a")}, "x is <U1"),
        ({"x": np.full((60, 4), -1)}, "tokens must not be negative"),
        ({"x": np.full((60, 4, 4), 256)}, "pixels must be in 0..255"),
        ({"client": np.zeros(59, int)}, "labels of shape (60,) need one client id each, not shape (59,)"),
        ({"x_test": IMAGES}, "x_test and y_test belong together"),
        ({"x_test": IMAGES, "y_test": LABELS + 1}, "the test set has label 3 in row 2, outside 0..2"),
        ({"x_test": IMAGES, "y_test": LABELS[1:]}, "the test set has 60 samples but 59 labels"),
        ({"x_test": IMAGES[:, :5], "y_test": LABELS}, "training samples are (6, 5, 1), test samples (5, 5, 1)"),
        ({"client_test": LABELS}, "client_test needs client and x_test"),
        (
            {"x": [*IMAGES[:-1], IMAGES[0, :-1]]},
            "x has entries of different shapes, but an array needs one shape: crop",
        ),
        ({"y": [[0], [1, 2]]}, "y has entries of different shapes"),
        ({"client": [[0], [1, 2]]}, "client has entries of different shapes"),
        ({"mean": [[0], [1, 2]]}, "mean has entries of different shapes"),
        (
            {"client": [None, *range(59)]},
            'client: 1 of 60 are missing (the first is None in row 0): name them or drop their samples, or use ""',
        ),
        ({"client": [*["a"] * 59, np.nan]}, "client: 1 of 60 are missing (the first is nan in row 59)"),
        ({"client": np.array([*["a"] * 59, np.nan])}, "client: 1 of 60 are missing (the first is 'nan' in row 59)"),
        ({"client": np.where(LABELS, 1.0, np.nan)}, "client: 20 of 60 are missing (the first is nan in row 0)"),
        ({"client": np.ma.array(LABELS, mask=LABELS > 1)}, "client: 20 of 60 are missing (the first is None in row 2)"),
        ({"client": LABELS / 2}, "client must be whole numbers or texts, but row 1 has 0.5"),
        ({"client": np.array([b"\xff"] * 60)}, "client must be whole numbers or texts, but row 0 has b'\\xff'"),
        ({"domain": [None, *"a" * 59]}, "domain: 1 of 60 are missing (the first is None in row 0): name them or drop"),
        ({"x": np.ma.array(IMAGES, mask=IMAGES > 250)}, "x is a masked array that hides "),
        ({"y": np.ma.array(LABELS, mask=LABELS > 1)}, "y is a masked array that hides 20 values, the first in row 2"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, "the training set is empty"),
        ({"x": IMAGES[:2], "y": LABELS[:2]}, "no class has three samples, of which one is held out for the test"),
        ({"y": np.where(LABELS == 2, 10**9, LABELS)}, "labels up to 1000000000 mean 1,000,000,001 classes"),
        ({"x": np.zeros((60, 0))}, "the training set has samples of shape (0,), which hold no values"),
        ({"x": np.zeros((60, 4, 0), np.uint8)}, "samples of shape (4, 0, 1), which hold no values"),
        ({"x": np.full((60, 4), 1e300)}, "value that is too large for float32 (1e+300) in row 0"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(UserError) as caught:
        data.from_arrays(**{"x": IMAGES, "y": LABELS} | changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refuses_files(tmp_path):
    path = tmp_path / "mine.npz"

    def message():
        with pytest.raises(UserError) as caught:
            data.load(str(path))
        return str(caught.value)

    assert f"data file {path} does not exist" in message()
    np.savez(path, x=IMAGES, y=LABELS)
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"no numbers", whole[:300] + b"?" * 100 + whole[400:]):
        path.write_bytes(damaged)
        assert f"{path} is empty, truncated or not an .npz file of plain arrays" in message()
    np.savez(path, x=IMAGES, labels=LABELS)
    assert "contains ['labels', 'x']; it needs x and y" in message()
    np.savez(path, x=np.array([{}], object), y=LABELS[:1])
    assert "not an .npz file of plain arrays" in message() and "holds Python objects" in message()
    with open(path, "wb") as file:
        np.save(file, IMAGES)
    assert "not an .npz file of plain arrays" in message()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mine.parquet", 'pd.read_parquet("mine.parquet").to_csv("mine.csv", index=False); then use mine.csv as the'),
        ("x.npy", 'np.savez("x.npz", x=np.load("x.npy"), y=np.load("labels.npy")); then use x.npz as the dataset'),
    ],
)
def test_other_files_get_their_recipe(name, part):
    for call in (data.load, lambda name: (resolve(Config(dataset=name)), data.load(name))):
        with pytest.raises(UserError) as caught:
            call(name)
        assert part in str(caught.value) and "\n" not in str(caught.value)


def entry(shape, *, dtype="|u1", content=b"", magic=b"\x93NUMPY\x01\x00"):
    """The bytes of an array in an .npz file, with an arbitrary header."""
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return magic + len(header).to_bytes(2, "little") + header + content


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (entry((10**12,)), "x.npy should be uint8 of shape (1000000000000,), but has 0 bytes"),
        (entry((10**30, 0)), ""),
        (entry((2**62, 8), dtype="<f8"), "but has 0 bytes"),
        (entry((3,), content=b"12345"), "x.npy should be uint8 of shape (3,), but has 5 bytes"),
        (entry((-1,)), "but has 0 bytes"),
        (entry((-1, -5), content=b"12345"), ""),
        (entry((1,), dtype="|O", content=b"cos\nsystem\n"), "holds Python objects"),
        (entry((1,), dtype=[("a", "<i8")], content=b"12345678"), "holds Python objects or records"),
        (entry((1,), dtype="no type"), ""),
        (entry((1,), content=b"1", magic=b"\x93NUMPY\x03\x00"), "unknown format (3, 0) of an array"),
        (b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10000, ""),
        (b"plain text", "the magic string is not correct"),
        (b"", ""),
    ],
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_forged_arrays_take_no_memory(tmp_path, content, part, compression):
    path = tmp_path / "mine.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(UserError) as caught:
        data.load(str(path))
    message = str(caught.value)
    assert "not an .npz file of plain arrays" in message and part in message
    assert "\n" not in message and "pickle" not in message


def test_a_forged_list_of_contents_takes_no_memory(tmp_path):
    path = tmp_path / "mine.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", entry((2**31 - 128,)))
    listed = path.read_bytes().rindex(b"PK\x01\x02")
    content = bytearray(path.read_bytes())
    content[listed + 20 : listed + 28] = (2**31).to_bytes(4, "little") * 2
    path.write_bytes(content)
    with pytest.raises(UserError, match="its directory has an entry of impossible size"):
        data.load(str(path))
