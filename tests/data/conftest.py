"""Small files in the format of each source, and a separate cache folder."""

import io
import json

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """The cache folder of decoded datasets in this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedjax_mr" / "data"


@pytest.fixture
def write_image_set(tmp_path):
    """Write a folder like TensorFlow Datasets, with records in shuffled order. Return the data_dir and the samples."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from PIL import Image
    from tensorflow_datasets.proto import tf_example_pb2

    def write(
        name="cifar10",
        *,
        version="3.0.2",
        labels=None,
        counts=(30, 12),
        side=8,
        channels=3,
        with_id=True,
        file_format="array_record",
    ):
        labels = labels or {"label": 10}
        rng = np.random.default_rng(0)
        folder = tmp_path / "tfds" / name / version
        folder.mkdir(parents=True)
        base = name.partition("/")[0]
        truth, splits = {}, []
        for split, count in zip(("train", "test"), counts, strict=True):
            x = rng.integers(0, 256, (count, side, side, channels), dtype=np.uint8)
            y = {key: rng.permutation(np.arange(count) % classes) for key, classes in labels.items()}
            truth[split] = (x, y)
            writer = ArrayRecordWriter(str(folder / f"{base}-{split}.{file_format}-00000-of-00001"), "group_size:1")
            for row in rng.permutation(count):
                png = io.BytesIO()
                Image.fromarray(x[row] if channels > 1 else x[row, ..., 0]).save(png, "PNG")
                example = tf_example_pb2.Example()
                feature = example.features.feature
                feature["image"].bytes_list.value.append(png.getvalue())
                if with_id:
                    feature["id"].bytes_list.value.append(f"{split}_{row:05d}".encode())
                for key, values in y.items():
                    feature[key].int64_list.value.append(int(values[row]))
                writer.write(example.SerializeToString())
            writer.close()
            splits.append({"name": split, "shardLengths": [str(count)], "numBytes": "1000",
                           "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"})  # fmt: skip
        features = "tensorflow_datasets.core.features."
        shape = {"dimensions": [str(side), str(side), str(channels)]}
        described = {
            "image": {"pythonClassName": f"{features}image_feature.Image", "image": {"dtype": "uint8", "shape": shape}}
        } | {
            key: {
                "pythonClassName": f"{features}class_label_feature.ClassLabel",
                "classLabel": {"numClasses": str(number)},
            }
            for key, number in labels.items()
        }
        if with_id:
            described["id"] = {"pythonClassName": f"{features}text_feature.Text", "text": {}}
        info = {"name": base, "version": version, "fileFormat": file_format, "splits": splits}
        info |= {"configName": name.partition("/")[2]} if "/" in name else {}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        whole = {"pythonClassName": f"{features}features_dict.FeaturesDict", "featuresDict": {"features": described}}
        (folder / "features.json").write_text(json.dumps(whole))
        return tmp_path / "tfds", truth

    return write


@pytest.fixture
def write_leaf(tmp_path):
    """Write {train,test}/*.json of {user: (train samples, test samples)}, two users per file. Return the folder."""

    def write(users, sample, *, name="leaf"):
        folder = tmp_path / name
        for which, part in enumerate(("train", "test")):
            (folder / part).mkdir(parents=True)
            order = list(users)
            for number in range(0, len(order), 2):
                chosen = [user for user in order[number : number + 2] if users[user][which] is not None]
                data = {user: sample(user, part, users[user][which]) for user in chosen}
                content = {
                    "users": chosen,
                    "num_samples": [len(each["y"]) for each in data.values()],
                    "user_data": data,
                }
                (folder / part / f"all_data_{number}_{part}.json").write_text(json.dumps(content))
        return folder

    return write


@pytest.fixture
def handwriting():
    """A generator of FEMNIST samples: pixels 0..1 with four decimals, as in LEAF."""

    def sample(user, part, count):
        rng = np.random.default_rng([ord(letter) for letter in user + part])
        pixels = np.round(rng.integers(0, 256, (count, 784)) / 255, 4)
        return {"x": pixels.tolist(), "y": rng.integers(0, 62, count).tolist()}

    return sample


@pytest.fixture
def lines():
    """A generator of Shakespeare samples: 80 characters and the next one."""

    def sample(user, part, count):
        text = f"{user} speaks in the {part}: To be, or not to be? [Exit]\n" * (2 + count)
        return {"x": [text[row : row + 80] for row in range(count)], "y": [text[row + 80] for row in range(count)]}

    return sample
