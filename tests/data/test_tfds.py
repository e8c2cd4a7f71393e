"""Image datasets of TensorFlow Datasets: small folders in the real format, and errors."""

import hashlib
import importlib.util
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import requests

from fedjax_mr import data
from fedjax_mr.data.federated import DataRequest
from fedjax_mr.data.sources import cifar, tfds
from fedjax_mr.errors import UserError

without_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is not None, reason="shows what happens without TensorFlow"
)


def test_reads_every_sample_in_its_original_order(write_image_set):
    folder, truth = write_image_set("cifar10")
    dataset = data.load("cifar10", data_dir=folder)
    np.testing.assert_array_equal(dataset.x, truth["train"][0])
    np.testing.assert_array_equal(dataset.y, truth["train"][1]["label"])
    np.testing.assert_array_equal(dataset.test_x, truth["test"][0])
    np.testing.assert_array_equal(dataset.test_y, truth["test"][1]["label"])
    assert (dataset.x.dtype, dataset.y.dtype, dataset.num_classes) == (np.uint8, np.int32, 10)
    assert (dataset.mean, dataset.std) == ((0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(("mode", "label", "num_classes"), [("fine", "label", 100), ("coarse", "coarse_label", 20)])
def test_cifar100_has_fine_and_coarse_labels(write_image_set, mode, label, num_classes):
    folder, truth = write_image_set("cifar100", labels={"label": 100, "coarse_label": 20}, counts=(200, 100))
    dataset = data.load("cifar100", data_dir=folder, label_mode=mode)
    np.testing.assert_array_equal(dataset.y, truth["train"][1][label])
    assert dataset.num_classes == num_classes
    assert dataset.mean == (0.4914, 0.4822, 0.4465)


@pytest.mark.parametrize(
    ("name", "version", "mean"),
    [("mnist", "3.0.1", 0.1307), ("fashion_mnist", "3.0.1", 0.0), ("svhn_cropped", "3.1.0", 0.5)],
)
def test_sets_without_ids_keep_the_files_order(write_image_set, name, version, mean):
    channels = 3 if name == "svhn_cropped" else 1
    folder, truth = write_image_set(name, version=version, with_id=False, channels=channels)
    dataset = data.load(name, data_dir=folder)
    assert dataset.mean[0] == mean
    assert dataset.x.shape == truth["train"][0].shape
    assert sorted(image.tobytes() for image in dataset.x) == sorted(image.tobytes() for image in truth["train"][0])


@pytest.mark.parametrize("config", ["byclass", "letters"])
def test_emnist_is_turned_upright(write_image_set, config):
    name = "emnist" if config == "byclass" else "emnist/letters"
    folder, truth = write_image_set(f"emnist/{config}", version="3.1.0", channels=1, labels={"label": 37})
    dataset = data.load(name, data_dir=folder)
    assert dataset.num_classes == 37
    np.testing.assert_array_equal(dataset.x, truth["train"][0].swapaxes(1, 2))


def test_takes_the_newest_version_with_the_known_first_number(write_image_set):
    write_image_set("cifar10", version="3.0.10", counts=(20, 10))
    write_image_set("cifar10", version="3.0.9", counts=(30, 10))
    folder, _ = write_image_set("cifar10", version="4.0.0", counts=(40, 10))
    assert len(data.load("cifar10", data_dir=folder).y) == 20


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """Write a small archive like those of CIFAR's authors, which `prepare` then downloads. Return its rows by file."""

    def write(name):
        known, rng = cifar.ARCHIVES[name], np.random.default_rng(0)
        path = tmp_path / "server" / known.url.rpartition("/")[2]
        path.parent.mkdir(exist_ok=True)
        rows = {}
        with tarfile.open(path, "w:gz") as members:
            for member in (*reversed(known.train), *known.test, "../outside.bin"):
                labels = np.stack([rng.integers(0, count, 2) for count in known.classes.values()], axis=1)
                rows[member] = np.concatenate([labels, rng.integers(0, 256, (2, 3072))], axis=1).astype(np.uint8)
                info = tarfile.TarInfo(member)
                info.size = rows[member].nbytes
                members.addfile(info, io.BytesIO(rows[member].tobytes()))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setitem(cifar.ARCHIVES, name, known._replace(url=path.as_uri(), sha256=digest))
        return known, rows

    return write


@pytest.mark.parametrize("name, modes", [("cifar10", [{}]), ("cifar100", [{}, {"label_mode": "coarse"}])])
def test_cifar_is_prepared_and_read_without_tensorflow(archive, tmp_path, monkeypatch, name, modes):
    known, rows = archive(name)
    for module in ("tensorflow", "tensorflow_datasets"):
        monkeypatch.setitem(sys.modules, module, None)  # an import fails
    folder = tmp_path / "data"
    place = tfds.prepare(DataRequest(name, str(folder)))
    assert [place] == list(folder.iterdir())  # and nothing else is left
    assert tfds.prepare(DataRequest(name, str(folder), offline=True)) == place
    for settings in modes:
        dataset = data.load(name, data_dir=str(folder), offline=True, **settings)
        mode = settings.get("label_mode", "fine")
        train, test = (np.concatenate([rows[each] for each in part]) for part in (known.train, known.test))
        byte = list(known.classes).index(tfds.LABELS[mode])
        for x, y, part in ((dataset.x, dataset.y, train), (dataset.test_x, dataset.test_y, test)):
            np.testing.assert_array_equal(y, part[:, byte])
            assert x.shape == (len(part), 32, 32, 3) and (x.dtype, y.dtype) == (np.uint8, np.int32)
            first = len(known.classes)  # the red, then the green, then the blue bytes of an image, row by row
            np.testing.assert_array_equal(x[:, 1, 2, :], part[:, [first + 34, first + 1024 + 34, first + 2048 + 34]])
        assert dataset.num_classes == known.classes[tfds.LABELS[mode]]


def test_another_file_is_not_taken_for_the_archive_of_cifar(archive, tmp_path, monkeypatch):
    known, _ = archive("cifar10")
    monkeypatch.setitem(cifar.ARCHIVES, "cifar10", cifar.ARCHIVES["cifar10"]._replace(sha256=known.sha256))
    with pytest.raises(UserError, match=r"damaged or not the archive of file:.*: delete it and prepare it again"):
        tfds.prepare(DataRequest("cifar10", str(tmp_path / "data")))
    assert not (tmp_path / "data").exists()
    with pytest.raises(UserError, match="damaged or not the archive"):
        data.load("cifar10", data_dir=str(tmp_path / "server"))
    with pytest.raises(UserError, match=r"cifar10 is not in .*; get it with: python -m fedjax_mr.data prepare cifar10"):
        data.load("cifar10", data_dir=str(tmp_path / "nowhere"), offline=True)


class TestCache:
    def test_second_load_reads_no_source(self, write_image_set, cache_folder):
        folder, _ = write_image_set("cifar10")
        first = data.load("cifar10", data_dir=folder)
        (kept,) = cache_folder.iterdir()
        record = folder / "cifar10/3.0.2/cifar10-train.array_record-00000-of-00001"
        status = record.stat()
        record.write_bytes(bytes(status.st_size))  # same size and time: only the cache can answer now
        os.utime(record, ns=(status.st_atime_ns, status.st_mtime_ns))
        second = data.load("cifar10", data_dir=folder)
        np.testing.assert_array_equal(first.x, second.x)
        assert (first.mean, first.name, first.num_classes) == (second.mean, second.name, second.num_classes)
        kept.unlink()
        with pytest.raises(UserError, match="incomplete or damaged"):
            data.load("cifar10", data_dir=folder)

    def test_label_modes_share_the_images_and_changed_sources_are_read_anew(self, write_image_set, cache_folder):
        folder, truth = write_image_set("cifar100", labels={"label": 100, "coarse_label": 20}, counts=(200, 100))
        for _ in ("decoded", "from the cache"):
            for mode, label in (("fine", "label"), ("coarse", "coarse_label")):
                dataset = data.load("cifar100", data_dir=folder, label_mode=mode)
                np.testing.assert_array_equal(dataset.x, truth["train"][0])
                np.testing.assert_array_equal(dataset.y, truth["train"][1][label])
                np.testing.assert_array_equal(dataset.test_y, truth["test"][1][label])
        (kept,) = cache_folder.iterdir()
        (folder / "cifar100/3.0.2/label.labels.txt").write_text("apple\n")
        data.load("cifar100", data_dir=folder)
        assert len(list(cache_folder.iterdir())) == 2 and kept.exists()

    def test_a_damaged_cache_file_is_replaced(self, write_image_set, cache_folder):
        folder, truth = write_image_set("cifar10")
        data.load("cifar10", data_dir=folder)
        (kept,) = cache_folder.iterdir()
        whole = kept.read_bytes()
        for damaged in (b"", whole[:1000], whole[:-1000] + bytes(1000)):
            kept.write_bytes(damaged)
            np.testing.assert_array_equal(data.load("cifar10", data_dir=folder).x, truth["train"][0])
            assert kept.read_bytes() == whole

    def test_an_unwritable_cache_is_no_obstacle(self, write_image_set, tmp_path, monkeypatch):
        folder, truth = write_image_set("cifar10")
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        np.testing.assert_array_equal(data.load("cifar10", data_dir=folder).x, truth["train"][0])


class TestBadInput:
    @without_tensorflow
    def test_missing(self, tmp_path):
        with pytest.raises(UserError) as caught:
            data.load("svhn_cropped", data_dir=str(tmp_path))
        assert str(caught.value) == (
            f"svhn_cropped is not in {tmp_path}; get it with: pip install 'fedjax-mr[prepare]' && "
            f"python -m fedjax_mr.data prepare svhn_cropped --data_dir={tmp_path}"
        )

    def test_missing_and_offline(self, tmp_path):
        with pytest.raises(UserError, match=r"emnist/letters is not in .*; get it with: .* prepare emnist/letters"):
            data.load("emnist/letters", data_dir=str(tmp_path), offline=True)

    @pytest.mark.parametrize("name", ["cifar10", "emnist/byclass"])
    def test_one_folder_too_deep_or_too_high(self, write_image_set, name):
        folder, _ = write_image_set(name, version=tfds.IMAGE_SETS[name.partition("/")[0]].version)
        version = next((folder / name).iterdir())
        for wrong in (version, folder / name, (folder / name).parent, folder.parent):
            if wrong != folder:
                with pytest.raises(UserError) as caught:
                    data.load(name, data_dir=str(wrong))
                assert str(caught.value) == f"{name} is not in {wrong} but in {folder}: use data_dir={folder}"

    def test_another_version(self, write_image_set):
        folder, _ = write_image_set("cifar10", version="2.0.0")
        with pytest.raises(
            UserError, match=rf"contains version 2.0.0 of cifar10, but 3.0.2 is needed.*--data_dir={folder}$"
        ):
            data.load("cifar10", data_dir=folder)

    @without_tensorflow
    def test_tfrecord_without_tensorflow(self, write_image_set):
        folder, _ = write_image_set("cifar10", file_format="tfrecord")
        with pytest.raises(UserError, match=rf"TFRECORD folder, which only TensorFlow can read .*--data_dir={folder}$"):
            data.load("cifar10", data_dir=folder)

    @pytest.mark.parametrize("damage", ["no info", "broken info", "no records", "truncated records", "no label"])
    def test_damaged_folder(self, write_image_set, damage):
        folder, _ = write_image_set("cifar10")
        version = folder / "cifar10/3.0.2"
        records = version / "cifar10-test.array_record-00000-of-00001"
        match damage:
            case "no info":
                (version / "dataset_info.json").unlink()
            case "broken info":
                (version / "dataset_info.json").write_text("{")
            case "no records":
                records.unlink()
            case "truncated records":
                records.write_bytes(records.read_bytes()[:1000])
            case "no label":
                features = json.loads((version / "features.json").read_text())
                del features["featuresDict"]["features"]["label"]
                (version / "features.json").write_text(json.dumps(features))
        with pytest.raises(UserError) as caught:
            data.load("cifar10", data_dir=folder)
        assert "3.0.2 is incomplete or damaged (" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_missing_dependency_is_no_damage(self, write_image_set, monkeypatch):
        folder, _ = write_image_set("cifar10")
        monkeypatch.delattr("tensorflow_datasets.builder_from_directory")
        with pytest.raises(UserError, match="a package that TensorFlow Datasets needs is missing"):
            data.load("cifar10", data_dir=folder)

    def test_coarse_labels_elsewhere(self, write_image_set):
        folder, _ = write_image_set("cifar10")
        with pytest.raises(UserError, match="cifar10 has no setting label_mode=: it has none"):
            data.load("cifar10", data_dir=folder, label_mode="coarse")


class TestPrepare:
    @without_tensorflow
    def test_needs_tensorflow(self, tmp_path):
        with pytest.raises(UserError, match=r"mnist needs TensorFlow: pip install 'fedjax-mr\[prepare\]'"):
            tfds.prepare(DataRequest("mnist", str(tmp_path)))

    def test_what_is_there_already_is_kept(self, write_image_set):
        folder, _ = write_image_set("cifar10")
        assert tfds.prepare(DataRequest("cifar10", str(folder))) == folder / "cifar10/3.0.2"

    def test_appears_whole(self, tmp_path):
        root = tmp_path / "new" / "root"

        def build(temporary):
            made = temporary / "emnist" / "letters" / "3.1.0"
            made.mkdir(parents=True)
            (made / "dataset_info.json").write_text("{}")
            (temporary / "downloads").mkdir()
            assert not (root / "emnist").exists()
            return made

        assert tfds.build_atomically(root, build, name="emnist") == root / "emnist/letters/3.1.0"
        assert [path.name for path in root.iterdir()] == ["emnist"]
        assert (root / "emnist/letters/3.1.0/dataset_info.json").read_text() == "{}"

    @pytest.mark.parametrize("error", [ConnectionError("no route\nto host"), OSError(28, "No space left on device")])
    def test_or_not_at_all(self, tmp_path, error):
        def build(temporary):
            (temporary / "cifar10" / "3.0.2").mkdir(parents=True)
            raise error

        with pytest.raises(UserError, match=r"could not prepare cifar10 in .*(no route to host|No space left)"):
            tfds.build_atomically(tmp_path / "root", build, name="cifar10")
        assert not (tmp_path / "root").exists()

    def test_ctrl_c_leaves_nothing_although_a_download_still_writes(self, tmp_path, monkeypatch):
        late, remove = ["a.tmp", "b.tmp"], tfds.shutil.rmtree

        def rmtree(folder, **options):
            remove(folder, **options)
            if late:
                folder.mkdir()
                (folder / late.pop()).write_text("")

        def build(temporary):
            raise KeyboardInterrupt

        monkeypatch.setattr(tfds.shutil, "rmtree", rmtree)
        monkeypatch.setattr(tfds.time, "sleep", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            tfds.build_atomically(tmp_path / "root", build, name="cifar10")
        assert not late and not (tmp_path / "root").exists()

    def test_without_internet_it_fails_at_once(self, monkeypatch):
        asked, errors = [], [requests.ConnectionError(), requests.Timeout()]

        def head(url, timeout):
            asked.append(url)
            if errors:
                raise errors.pop(0)

        monkeypatch.setattr("requests.head", head)
        for part in ("no connection from a", "no answer from a"):
            with pytest.raises(UserError, match=part):
                tfds._check_connection(["http://a/1", "http://a/2", "https://b/3"])
        tfds._check_connection(["http://a/1", "http://a/2", "https://b/3"])
        assert asked == ["http://a/2", "http://a/2", "http://a/2", "https://b/3"]


@pytest.fixture(scope="module")
def numbers_builder():
    """A dataset of TensorFlow Datasets that generates its samples: a real builder without a download."""
    pytest.importorskip("tensorflow", reason="preparing needs TensorFlow (the extra 'prepare')")
    import tensorflow_datasets

    class OwnNumbers(tensorflow_datasets.core.GeneratorBasedBuilder):
        VERSION = tensorflow_datasets.core.Version("1.2.3")

        def _info(self):
            image = tensorflow_datasets.features.Image(shape=(6, 6, 1))
            label = tensorflow_datasets.features.ClassLabel(num_classes=4)
            features = tensorflow_datasets.features.FeaturesDict(
                {"image": image, "label": label, "id": tensorflow_datasets.features.Text()}
            )
            return self.dataset_info_from_configs(features=features)

        def _split_generators(self, manager):
            return {"train": self._generate_examples(20), "test": self._generate_examples(8)}

        def _generate_examples(self, count):
            for row in range(count):
                yield row, {"image": np.full((6, 6, 1), row, np.uint8), "label": row % 4, "id": f"{row:05d}"}

    return OwnNumbers


@pytest.fixture
def own_builder(numbers_builder, monkeypatch):
    """The same builder, registered in our loader."""
    monkeypatch.setitem(tfds.IMAGE_SETS, "own_numbers", tfds.ImageSet("1.2.3", (0.5,), (0.5,)))
    monkeypatch.setitem(data.SOURCES, "own_numbers", tfds.load)
    return numbers_builder


def check_numbers(dataset):
    np.testing.assert_array_equal(dataset.x[:, 0, 0, 0], np.arange(20))
    np.testing.assert_array_equal(dataset.y, np.arange(20) % 4)
    assert (len(dataset.test_y), dataset.num_classes) == (8, 4)


@pytest.mark.filterwarnings("ignore")  # TensorFlow's own
class TestWithTensorFlow:
    def test_load_prepares_what_is_missing_as_array_record(self, own_builder, tmp_path):
        check_numbers(data.load("own_numbers", data_dir=str(tmp_path / "sets")))
        assert [path.name for path in (tmp_path / "sets").iterdir()] == ["own_numbers"]
        assert list((tmp_path / "sets" / "own_numbers" / "1.2.3").glob("*.array_record-*"))

    def test_reads_a_tfrecord_folder(self, own_builder, tmp_path):
        own_builder(data_dir=tmp_path / "sets").download_and_prepare()
        assert list((tmp_path / "sets" / "own_numbers" / "1.2.3").glob("*.tfrecord-*"))
        check_numbers(data.load("own_numbers", data_dir=str(tmp_path / "sets")))

    def test_offline_prepares_nothing(self, own_builder, tmp_path):
        with pytest.raises(UserError, match="own_numbers is not in"):
            data.load("own_numbers", data_dir=str(tmp_path), offline=True)


@pytest.mark.parametrize("name", ["pythonClassName", "python_class_name", "type"])
def test_a_description_of_another_person_imports_no_other_module(name, write_image_set, tmp_path, monkeypatch):
    """TensorFlow Datasets imports the module of any class that a description names."""
    folder, _ = write_image_set()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "chosen.py").write_text("from pathlib import Path; Path('executed').touch()")
    (path,) = Path(folder).rglob("features.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: "chosen.Feature", "content": {}}))
    with pytest.raises(UserError, match=r"features.json names 'chosen.Feature', which is not of TensorFlow Datasets"):
        data.load("cifar10", data_dir=folder)
    assert not Path("executed").exists()


def test_a_folder_that_this_user_may_not_read_is_one_line(monkeypatch):
    """Such as the home folder of another user."""

    def versions(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(tfds, "_versions", versions)
    with pytest.raises(UserError, match=r"^/home/other/mnist cannot be read: this user has no permission$"):
        data.load("mnist", data_dir="/home/other")
