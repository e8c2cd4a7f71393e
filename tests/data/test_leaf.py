"""LEAF's JSON: users sorted by id, exact pixels and characters, and errors that name the file."""

import functools
import json
import os
import tracemalloc

import numpy as np
import pytest

from fedjax_mr import data
from fedjax_mr.data import tokens
from fedjax_mr.data.sources import leaf
from fedjax_mr.errors import UserError

USERS = {"f3": (5, 2), "f1": (4, 1), "f2": (7, 3)}


@pytest.fixture
def femnist_folder(write_leaf, handwriting):
    return write_leaf(USERS, handwriting)


@pytest.fixture
def shakespeare_folder(write_leaf, lines):
    return write_leaf(USERS, lines)


def test_femnist(femnist_folder, handwriting):
    dataset = data.load("femnist", data_dir=str(femnist_folder))
    assert dataset.client_names == ("f1", "f2", "f3")
    assert (dataset.x.shape, dataset.x.dtype, dataset.num_classes) == ((16, 28, 28, 1), np.uint8, 62)
    np.testing.assert_array_equal(np.bincount(dataset.client), [4, 7, 5])
    np.testing.assert_array_equal(np.bincount(dataset.test_client), [1, 3, 2])
    for number, user in enumerate(dataset.client_names):
        sample = handwriting(user, "train", USERS[user][0])
        mine = dataset.client == number
        np.testing.assert_array_equal(dataset.y[mine], sample["y"])
        normalised = (dataset.x[mine].reshape(-1, 784) / 255 - dataset.mean[0]) / dataset.std[0]
        np.testing.assert_allclose(normalised, 1 - 2 * np.array(sample["x"]), atol=1.01e-4)  # the file's four decimals


def test_shakespeare(shakespeare_folder, lines):
    dataset = data.load("shakespeare", data_dir=str(shakespeare_folder))
    assert (dataset.x.shape, dataset.x.dtype, dataset.num_classes, dataset.vocabulary) == ((16, 80), np.int32, 80, 80)
    sample = lines("f2", "test", 3)
    mine = dataset.test_client == 1
    assert ["".join(leaf.LETTERS[letter] for letter in row) for row in dataset.test_x[mine]] == sample["x"]
    assert [leaf.LETTERS[letter] for letter in dataset.test_y[mine]] == sample["y"]


def test_folder_may_be_inside_data_dir(write_leaf, handwriting, tmp_path):
    write_leaf(USERS, handwriting, name="femnist/data")
    assert len(data.load("femnist", data_dir=str(tmp_path)).y) == 16


def test_is_cached_until_a_file_changes(femnist_folder, handwriting, cache_folder):
    first = data.load("femnist", data_dir=str(femnist_folder))
    second = data.load("femnist", data_dir=str(femnist_folder))
    assert len(list(cache_folder.iterdir())) == 1
    assert second.client_names == first.client_names
    np.testing.assert_array_equal(second.test_client, first.test_client)
    new = {"users": ["f9"], "num_samples": [2], "user_data": {"f9": handwriting("f9", "train", 2)}}
    (femnist_folder / "train" / "more.json").write_text(json.dumps(new))
    assert len(data.load("femnist", data_dir=str(femnist_folder)).y) == 18


def test_a_client_without_training_samples_is_left_out(write_leaf, handwriting):
    folder = write_leaf({"a": (6, 3), "b": (None, 3), "c": (5, 1)}, handwriting)
    dataset = data.load("femnist", data_dir=str(folder))
    federated = data.federate(dataset, partition="natural", num_clients=0)
    assert federated.names == ("a", "c") and len(federated.dataset.test_y) == 4
    assert federated.notes == ("natural clients of femnist without training samples are left out: 1",)
    with pytest.raises(UserError, match="has 2 natural clients with training samples, too few for 3 clients"):
        data.federate(dataset, partition="natural", num_clients=3)


@pytest.mark.parametrize("client_test_share", [0.0, 0.25])
def test_a_split_by_user_is_tested_on_all_test_samples(write_leaf, handwriting, client_test_share):
    """LEAF's ``-t user``: no client has both training and test samples."""
    folder = write_leaf({"a": (8, None), "c": (None, 5), "b": (4, None), "d": (None, 2)}, handwriting)
    dataset = data.load("femnist", data_dir=str(folder))
    federated = data.federate(dataset, partition="natural", num_clients=0, client_test_share=client_test_share)
    assert federated.names == ("a", "b") and len(federated.dataset.test_y) == 7
    assert any("so the models are tested on all 7 test samples" in note for note in federated.notes)
    assert federated.own_test == (client_test_share > 0)
    assert client_test_share == 0 or len(federated.test.index) == 3


def test_min_samples_counts_training_and_test(write_leaf, handwriting):
    folder = write_leaf({"a": (6, 3), "b": (8, 1), "c": (6, 2), "d": (5, 3)}, handwriting)
    dataset = data.load("femnist", data_dir=str(folder))
    federated = data.federate(dataset, partition="natural", num_clients=0, min_samples_per_client=9)
    assert federated.names == ("a", "b")
    assert len(federated.dataset.test_y) == 4  # the union of the chosen clients' test samples


def test_shakespeare_as_a_language_model(shakespeare_folder):
    labels = data.load("shakespeare", data_dir=str(shakespeare_folder))
    found = data.load("shakespeare", data_dir=str(shakespeare_folder), task="language")
    assert (found.task.name, found.task.width, found.y.shape) == ("language", 80, labels.x.shape)
    for x, y, label in ((found.x, found.y, labels.y), (found.test_x, found.test_y, labels.test_y)):
        np.testing.assert_array_equal(y[:, :-1], x[:, 1:])
        np.testing.assert_array_equal(y[:, -1], label)
    with pytest.raises(UserError, match="shakespeare has targets for classification, not for task=regression"):
        data.load("shakespeare", data_dir=str(shakespeare_folder), task="regression")


def test_a_tokenizer_reads_the_texts_of_which_the_samples_are_windows(write_leaf):
    said = {"a": "To be, or not to be. " * 5, "b": "The rest is silence! " * 5}

    def windows(user, part, count):
        text = said[user][:: 1 if part == "train" else -1]
        return {"x": [text[i : i + 80] for i in range(count)], "y": [text[i + 80] for i in range(count)]}

    folder = str(write_leaf({"a": (9, 2), "b": (20, 4)}, windows))
    load = functools.partial(data.load, "shakespeare", data_dir=folder, text_length=32)
    dataset = load(task="language", tokenizer=tokens.BYTES)
    assert (dataset.x.shape, dataset.num_classes, dataset.client.tolist()) == ((7, 32), 257, [0, 0, 0, 1, 1, 1, 1])
    for client, (user, count) in enumerate((("a", 9), ("b", 20))):
        mine = dataset.client == client
        spoken = dataset.y[mine][dataset.y[mine] != -1]
        assert tokens.decode(dataset.x[mine][0, :1], tokens.BYTES) == said[user][0]
        assert tokens.decode(spoken, tokens.BYTES) == said[user][1 : 80 + count]
    for refused in ({}, {"task": "language"}, {"tokenizer": tokens.BYTES}):
        with pytest.raises(UserError, match="text_length= of shakespeare needs task='language' and a tokenizer"):
            load(**refused)


@pytest.mark.parametrize(("name", "kind"), [("femnist", "handwriting"), ("shakespeare", "lines")])
def test_a_user_may_have_samples_in_one_part_alone(write_leaf, request, name, kind):
    folder = write_leaf({"a": (6, 3), "b": (4, 0), "c": (0, 2), "d": (5, 1)}, request.getfixturevalue(kind))
    dataset = data.load(name, data_dir=str(folder))
    assert dataset.client_names == ("a", "b", "c", "d")
    np.testing.assert_array_equal(np.bincount(dataset.client, minlength=4), [6, 4, 0, 5])
    np.testing.assert_array_equal(np.bincount(dataset.test_client, minlength=4), [3, 0, 2, 1])


class TestBadInput:
    def refuse(self, folder, *parts, name="femnist"):
        with pytest.raises(UserError) as caught:
            data.load(name, data_dir=None if folder is None else str(folder))
        assert "\n" not in str(caught.value)
        for part in parts:
            assert part in str(caught.value)

    def test_no_folder(self, tmp_path):
        self.refuse(None, "femnist needs data_dir=", "./preprocess.sh")
        self.refuse(tmp_path, f"{tmp_path} has no train/*.json of femnist", "-k 100 -t sample")
        self.refuse(tmp_path / "absent", "has no train/*.json of shakespeare", name="shakespeare")

    def test_one_folder_too_deep_or_too_high(self, femnist_folder):
        for wrong in (femnist_folder / "train", femnist_folder.parent):
            self.refuse(wrong, f"{wrong} has no train/*.json; did you mean data_dir={femnist_folder}?")

    def test_no_test_part(self, femnist_folder):
        for path in (femnist_folder / "test").iterdir():
            path.unlink()
        self.refuse(femnist_folder, "has train/*.json but no test/*.json")

    def test_a_pipe(self, femnist_folder):
        """Opening one waits without end."""
        path = femnist_folder / "train" / "pipe.json"
        os.mkfifo(path)
        self.refuse(femnist_folder, str(path), "it is not a file")

    @pytest.mark.parametrize("size", [0, 1000])
    def test_empty_or_truncated(self, femnist_folder, size):
        path = femnist_folder / "train" / "all_data_2_train.json"
        path.write_bytes(path.read_bytes()[:size])
        self.refuse(femnist_folder, str(path), "empty, truncated or not a LEAF file")

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"y": [1, 2, 3]}, "user 'f2': 7 samples but 3 labels"),
            ({"y": [0.5] * 7}, "labels must be integers"),
            ({"y": [62] * 7}, "label 62"),
            ({"y": [10**12] * 7}, "label 1000000000000"),
            ({"y": [[1]] * 7}, "labels must be integers, not int64 of shape (7, 1)"),
            ({"y": [10**30] * 7}, "labels must be integers, not object"),
            ({"x": [[10**400] * 784] * 7}, "user 'f2': "),
            ({"x": [[0.0] * 783] * 7}, "a sample has 783 pixels, not 784"),
            ({"x": [[0.0] * 784] * 6 + [[0.0]]}, "user 'f2': "),
            ({"x": [[float("nan")] * 784] * 7}, "outside 0..1 or not finite"),
            ({"x": [[1.5] * 784] * 7}, "outside 0..1 or not finite"),
            ({"x": None}, "user 'f2': "),
        ],
    )
    def test_bad_samples(self, femnist_folder, change, part):
        path = femnist_folder / "train" / "all_data_2_train.json"
        content = json.loads(path.read_text())
        content["user_data"]["f2"] |= change
        path.write_text(json.dumps(content))
        self.refuse(femnist_folder, part)

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"x": ["short"]}, "the same number of characters"),
            ({"y": ["ab"]}, "each label must be one character"),
            ({"x": ["é" * 80]}, "character 'é' is not in LEAF's vocabulary"),
            ({"y": ["\u20ac"]}, "is not in LEAF's vocabulary"),
        ],
    )
    def test_bad_text(self, shakespeare_folder, change, part):
        path = shakespeare_folder / "test" / "all_data_2_test.json"
        content = json.loads(path.read_text())
        user = content["user_data"]["f2"]
        for key, value in change.items():
            user[key] = value + user[key][1:]
        path.write_text(json.dumps(content))
        self.refuse(shakespeare_folder, part, name="shakespeare")

    def test_a_listed_user_without_data(self, femnist_folder):
        path = femnist_folder / "train" / "all_data_0_train.json"
        content = json.loads(path.read_text())
        del content["user_data"]["f1"]
        path.write_text(json.dumps(content))
        self.refuse(femnist_folder, "user 'f1': 'f1' is missing")

    def test_numbers_among_the_users_are_texts_and_missing_ones_are_named(self, femnist_folder):
        for path in sorted((femnist_folder / "train").iterdir()):
            content = json.loads(path.read_text())
            content["users"] = [int(user[1:]) for user in content["users"]]
            content["user_data"] = {user[1:]: data for user, data in content["user_data"].items()}
            path.write_text(json.dumps(content))
        dataset = data.load("femnist", data_dir=str(femnist_folder))
        assert dataset.client_names == ("1", "2", "3", "f1", "f2", "f3")
        path.write_text(json.dumps(content | {"users": [None]}))
        self.refuse(femnist_folder, f"{path}: users: 1 of 1 are missing (the first is None in row 0)")

    def test_no_user_with_samples(self, write_leaf, handwriting):
        folder = write_leaf({"a": (6, 0), "b": (4, 0)}, handwriting)
        self.refuse(folder, f"{folder}/test/all_data_0_test.json has no users with samples")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_files(write_leaf, handwriting):
    """A file of 200 samples needs about 6 MB as text and Python objects, and 0.16 MB as bytes."""
    sample = functools.cache(lambda user, part, count: handwriting("f", part, count))
    peaks = []
    for files in (1, 9):
        folder = write_leaf({f"f{number}": (100, 1) for number in range(2 * files)}, sample, name=f"{files}")
        tracemalloc.start()
        assert len(data.load("femnist", data_dir=str(folder)).y) == 200 * files
        peaks.append(tracemalloc.get_traced_memory()[1] / 1e6)
        tracemalloc.stop()
    assert peaks[0] > 4  # what one file needs is seen
    assert peaks[1] - peaks[0] < 8  # the bytes of eight more files, twice; all their objects would be about 48
