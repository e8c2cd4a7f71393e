"""Folders of image files: sizes, colours, clients, and errors."""

import numpy as np
import pytest
from PIL import Image

from fedjax_mr import data
from fedjax_mr.errors import UserError

RNG = np.random.default_rng(0)


def write(folder, *, side=(6, 8), mode="L", count=5, suffix="png"):
    folder.mkdir(parents=True)
    shape = side if mode == "L" else (*side, 3)
    for number in range(count):
        pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
    return folder


def test_the_folder_is_the_class(tmp_path):
    for kind in ("night", "day"):
        write(tmp_path / "sky" / kind)
    (tmp_path / "sky" / "day" / "notes.txt").write_text("no image")
    dataset = data.from_images(tmp_path / "sky")
    assert repr(dataset) == "Dataset(sky: 8 training and 2 test samples, 6x8x1 of uint8, 2 classes)"
    assert dataset.class_names == ("day", "night")
    every = {(image.tobytes(), label) for image, label in zip(dataset.x, dataset.y, strict=True)}
    for label, kind in enumerate(dataset.class_names):
        files = [np.asarray(Image.open(path)).tobytes() for path in (tmp_path / "sky" / kind).glob("*.png")]
        assert len(every & {(image, label) for image in files}) == 4


def test_clients_colours_and_other_sizes(tmp_path):
    for client in ("anna", "ben"):
        for kind in "xyz":
            write(tmp_path / client / kind, mode="RGB" if client == "anna" else "L", side=(8, 6 + len(client)))
    with pytest.raises(UserError, match=r"0.png has 8 x 10 pixels, but .*/ben/x/0.png has 8 x 9: pass resize="):
        data.from_images(tmp_path, clients=True)
    dataset = data.from_images(tmp_path, clients=True, resize=(4, 5), name="mine")
    assert (dataset.x.shape, dataset.client_names, dataset.name) == ((24, 4, 5, 3), ("anna", "ben"), "mine")
    np.testing.assert_array_equal(np.bincount(dataset.test_client), [3, 3])


def test_a_folder_of_test_images(tmp_path):
    for part in ("train", "test"):
        for kind in "ab":
            write(tmp_path / part / kind, count=3)
    dataset = data.from_images(tmp_path / "train", test=tmp_path / "test")
    assert (len(dataset.y), dataset.test_y.tolist()) == (6, [0, 0, 0, 1, 1, 1])
    with pytest.raises(UserError, match=r"has no images in CLASS/\*.png: use .*/train, and test=.*/test"):
        data.from_images(tmp_path)


def test_a_photo_is_upright(tmp_path):
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4) * 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    for kind in "ab":
        write(tmp_path / kind, side=(4, 3))
        image.save(tmp_path / kind / "turned.png", exif=exif)
    assert data.from_images(tmp_path).x.shape[1:] == (4, 3, 1)


def test_refuses(tmp_path):
    with pytest.raises(UserError, match=r"absent is no folder of images \(CLASS/\*.png\)"):
        data.from_images(tmp_path / "absent")
    write(tmp_path / "one" / "a")
    with pytest.raises(UserError, match="one has images of one class only, a"):
        data.from_images(tmp_path / "one")
    with pytest.raises(UserError, match=r"has no images in CLASS/\*.png: use clients=True, .* in CLIENT/CLASS"):
        data.from_images(tmp_path)
    with pytest.raises(UserError, match=r"has no images in CLIENT/CLASS/\*.png: use clients=False, .* in CLASS"):
        data.from_images(tmp_path / "one", clients=True)
    broken = write(tmp_path / "one" / "b")
    (broken / "bad.png").write_bytes((broken / "0.png").read_bytes()[:60])
    with pytest.raises(UserError, match=r"bad.png is no readable image"):
        data.from_images(tmp_path / "one")
    Image.fromarray(np.zeros((6, 8), np.uint16)).save(broken / "bad.png")
    with pytest.raises(UserError, match=r"bad.png has pixels of kind I;16, not bytes: scale them to 0..255"):
        data.from_images(tmp_path / "one")
