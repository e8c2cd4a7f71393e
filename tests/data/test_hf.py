"""Folders of Hugging Face's datasets: texts, images, and what is refused."""

import io
import json
import sys
import types

import numpy as np
import pytest
from PIL import Image

from fedjax_mr import data
from fedjax_mr.data.sources import hf
from fedjax_mr.errors import UserError

RNG = np.random.default_rng(0)


def rows(count):
    return [{"text": f"text {i}", "label": i % 3, "client": i % 2} for i in range(count)]


@pytest.mark.parametrize(
    ("features", "missing", "remedy"),
    [
        ({"x": "float32"}, "text", "only texts and images are read from hf: folders, so pass numbers as arrays"),
        ({"video": "Video", "file": "string"}, "text", "pass numbers as arrays: fmr.from_arrays(x, y)"),
        ({"img": "Image", "label": "int64"}, "image", "rename one: dataset.rename_column('img', 'image')"),
        ({"sentence": "string", "label": "int64"}, "text", "rename one: dataset.rename_column('sentence', 'text')"),
        ({"title": "string", "body": "large_string"}, "text", "rename one: dataset.rename_column(OLD, 'text')"),
        ({"text": "string", "stars": "ClassLabel"}, "label", "rename one: dataset.rename_column('stars', 'label')"),
        ({"text": "string", "stars": "int64"}, "label", "rename one: dataset.rename_column(OLD, 'label')"),
    ],
)
def test_the_remedy_for_a_missing_column_fits_the_other_columns(features, missing, remedy):
    value = lambda kind: type(
        "Value" if kind[0].islower() else kind, (), {"dtype": kind if kind[0].islower() else "dict"}
    )
    assert remedy in hf._remedy({name: value(kind)() for name, kind in features.items()}, missing)


@pytest.mark.parametrize(
    ("parts", "warning"),
    [
        (["train", "test"], ""),
        (["train", "validation", "test"], "only train and test are read, not validation\n"),
        (["train", "dev", "more"], "not dev, more; to test on dev, rename it: parts['test'] = parts.pop('dev')"),
    ],
)
def test_unused_parts_of_a_folder_are_named(tmp_path, caplog, parts, warning):
    hf._tell_of_unused_parts(tmp_path, parts)
    assert warning in caplog.text and bool(caplog.text) == bool(warning)


def test_texts(tmp_path, caplog):
    datasets = pytest.importorskip("datasets")
    columns = {name: [line[name] for line in rows(20)] for name in ("text", "label", "client")}
    whole = datasets.Dataset.from_dict(columns).cast_column("label", datasets.ClassLabel(num_classes=4))
    datasets.DatasetDict(whole.train_test_split(6, seed=0)).save_to_disk(str(tmp_path / "parts"))
    dataset = data.load(f"hf:{tmp_path / 'parts'}", text_length=4)
    assert (dataset.x.shape, dataset.test_x.shape, dataset.num_classes) == ((14, 4), (6, 4), 4)
    assert dataset.client_names == ("0", "1") and dataset.test_client is not None
    train, test = whole.select(range(14)), whole.select(range(14, 20)).remove_columns("client")
    datasets.DatasetDict(train=train, test=test).save_to_disk(str(tmp_path / "without"))
    dataset = data.load(f"hf:{tmp_path / 'without'}", text_length=4)
    assert dataset.client_names == ("0", "1") and dataset.test_client is None and len(dataset.test_x) == 6
    datasets.DatasetDict(train=train, test=test.rename_column("text", "s")).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"other \(test\) has the columns s, label, but text is needed; rename one"):
        data.load(f"hf:{tmp_path / 'other'}")
    whole.remove_columns("label").save_to_disk(str(tmp_path / "unlabelled"))
    assert data.load(f"hf:{tmp_path / 'unlabelled'}", text_length=4, task="language").y.shape == (16, 4)
    datasets.DatasetDict(train=train, test=test, validation=test).save_to_disk(str(tmp_path / "three"))
    for _ in range(2):  # also from the cache
        caplog.clear()
        assert len(data.load(f"hf:{tmp_path / 'three'}").test_y) == 6
        assert "three: only train and test are read, not validation" in caplog.text
    hidden = test.remove_columns("label").add_column("label", [-1] * 6)
    datasets.DatasetDict(train=train, test=hidden).save_to_disk(str(tmp_path / "hidden"))
    with pytest.raises(
        UserError, match=r"-1 marks samples without a label, and all are -1: pass labelled test samples"
    ):
        data.load(f"hf:{tmp_path / 'hidden'}")
    labels = whole.remove_columns("label").add_column("label", ["good", "bad"] * 10)
    labels.save_to_disk(str(tmp_path / "labels"))
    with pytest.raises(UserError, match=r"has labels as texts: use dataset.class_encode_column\('label'\)"):
        data.load(f"hf:{tmp_path / 'labels'}")
    names = ["a", None] * 10
    whole.remove_columns("client").add_column("client", names).save_to_disk(str(tmp_path / "missing"))
    with pytest.raises(
        UserError, match=r"missing \(train\): client: 10 of 20 are missing \(the first is None in row 1\)"
    ):
        data.load(f"hf:{tmp_path / 'missing'}")
    whole.rename_column("text", "sentence").save_to_disk(str(tmp_path / "one"))
    with pytest.raises(UserError, match=r"has the columns sentence, label, client, but text is needed; rename one"):
        data.load(f"hf:{tmp_path / 'one'}")
    with pytest.raises(UserError, match=r"is no folder of datasets.save_to_disk"):
        data.load(f"hf:{tmp_path}")


def test_a_changed_description_of_a_folder_of_datasets_is_read_again_and_any_failure_is_one_line(
    tmp_path, monkeypatch, cache_folder
):
    """The JSON files name the classes; a cache of the Arrow files alone would keep the old ones."""

    class Part:
        column_names = ("text", "label")

        def __getitem__(self, name):
            return {"text": list("abcdefghij"), "label": [0, 1] * 5}[name]

        @property
        def features(self):
            return {"label": types.SimpleNamespace(num_classes=json.loads((tmp_path / "info.json").read_text()))}

    def load(path):
        if not (tmp_path / "info.json").exists():
            raise TypeError("a traceback of Arrow")
        return Part()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_from_disk=load))
    with pytest.raises(UserError, match=r"is no folder of datasets.save_to_disk"):
        data.load(f"hf:{tmp_path}")
    (tmp_path / "data.arrow").write_bytes(b"x")
    for classes in (2, 30):
        (tmp_path / "info.json").write_text(str(classes))
        assert data.load(f"hf:{tmp_path}").num_classes == classes


# --- Images -----------------------------------------------------------------------------------------------------------


def pictures(count, *, mode="L", side=(6, 8)):
    shape = side if mode == "L" else (*side, 3)
    return [Image.fromarray(RNG.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count)]


def dataset_of(images, **columns):
    datasets = pytest.importorskip("datasets")
    count = len(images)
    columns = {"image": images, "label": [i % 2 for i in range(count)]} | columns
    made = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    kinds = {"label": datasets.ClassLabel(names=["cat", "dog"])}
    return made.cast_column("label", kinds["label"]) if "label" in columns and columns["label"][0] in (0, 1) else made


def save(folder, form, **parts):
    import datasets

    if form == "disk":
        datasets.DatasetDict(parts).save_to_disk(str(folder))
    for name, part in parts.items() if form == "parquet" else ():
        (folder / "data").mkdir(parents=True, exist_ok=True)
        half = len(part) // 2
        for number, shard in enumerate((part.select(range(half)), part.select(range(half, len(part))))):
            shard.to_parquet(str(folder / "data" / f"{name}-0000{number}-of-00002.parquet"))
    return f"hf:{folder}"


@pytest.mark.parametrize("form", ["disk", "parquet"])
def test_images_are_those_of_the_folder_with_classes_and_clients(form, tmp_path):
    train, test = pictures(12), pictures(4)
    clients = [f"site {i % 3}" for i in range(12)]
    name = save(tmp_path / "pets", form, train=dataset_of(train, client=clients), test=dataset_of(test))
    for _ in range(2):  # also from the cache
        dataset = data.load(name)
        assert (dataset.name, dataset.class_names, dataset.num_classes) == ("pets", ("cat", "dog"), 2)
        assert dataset.client_names == ("site 0", "site 1", "site 2") and dataset.test_client is None
        for found, images in ((dataset.x, train), (dataset.test_x, test)):
            np.testing.assert_array_equal(found[..., 0], np.stack([np.asarray(image) for image in images]))
        assert dataset.y.tolist() == [0, 1] * 6 and dataset.client.tolist() == [0, 1, 2] * 4


def test_one_colour_image_makes_all_of_them_rgb_and_a_fifth_is_held_out(tmp_path):
    images = pictures(9) + pictures(1, mode="RGB")
    dataset = data.load(save(tmp_path / "mixed", "disk", train=dataset_of(images)))
    assert dataset.x.shape == (8, 6, 8, 3) and dataset.test_x.shape == (2, 6, 8, 3)


def test_other_tasks_have_their_targets(tmp_path):
    ages = [20.5 + i for i in range(30)]
    dataset = data.load(save(tmp_path / "ages", "disk", train=dataset_of(pictures(30), label=ages)), task="regression")
    assert dataset.task.name == "regression" and sorted([*dataset.y[:, 0], *dataset.test_y[:, 0]]) == ages


def test_images_that_cannot_be_used_are_refused_in_one_line(tmp_path):
    wide = dataset_of(pictures(3) + pictures(1, side=(6, 9)))
    with pytest.raises(
        UserError, match=r"\(train\): the image of row 0 has 6 x 8 .* row 3 has 6 x 9: resize all: dataset"
    ):
        data.load(save(tmp_path / "sizes", "disk", train=wide))
    png = io.BytesIO()
    pictures(1)[0].save(png, "png")
    broken = dataset_of([{"bytes": png.getvalue()[:60], "path": None}] * 4)
    with pytest.raises(UserError, match=r"\(train\): the image of row 0 is no readable image"):
        data.load(save(tmp_path / "broken", "parquet", train=broken))
    with pytest.raises(UserError, match=r"\(train\): the image of row 2 is missing: save the dataset with its images"):
        data.load(save(tmp_path / "none", "disk", train=dataset_of([*pictures(2), None, None])))
    with pytest.raises(UserError, match=r"columns img, label, but image is needed; .*rename_column\('img', 'image'\)"):
        data.load(save(tmp_path / "img", "disk", train=dataset_of(pictures(4)).rename_column("image", "img")))
    with pytest.raises(UserError, match=r"\(test\) has the columns image, but label is needed"):
        parts = {"train": dataset_of(pictures(4)), "test": dataset_of(pictures(2)).remove_columns("label")}
        data.load(save(tmp_path / "unlabelled", "disk", **parts))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "train.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"empty is no folder of datasets.save_to_disk"):
        data.load(f"hf:{tmp_path / 'empty'}")
