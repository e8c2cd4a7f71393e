"""Segmentation without a download: the embedded digits on textures, and the digit of each pixel as the target.

An image has 24 x 24 pixels and two handwritten digits at random places. The background of each client has stripes of
its own direction, width and brightness. Training images have training digits, test images test digits. The images are
made here with a constant seed; the digits are those of scikit-learn (`digits`).
"""

import dataclasses

import numpy as np

from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources import digits
from fedjax_mr.data.sources.arrays import from_arrays

SIDE, DIGIT = 24, 8  # pixels
CLIENTS = 20
TRAIN, TEST = 1600, 400  # images
SEED = 0
INK = 0.3  # pixels of a digit that are darker belong to the background; of 1


def load(request: DataRequest) -> Dataset:
    """The images, x uint8 [M, 24, 24, 1], y [M, 24, 24] int32: 0 is background, d + 1 is digit d.

    Natural clients are the 20 textures.
    """
    source = digits.load(request)
    rng = np.random.default_rng(SEED)
    texture = np.stack([rng.uniform(0, np.pi, CLIENTS), rng.uniform(3, 9, CLIENTS), rng.uniform(0.1, 0.5, CLIENTS)], 1)
    parts = []
    for x, y, count in ((source.x, source.y, TRAIN), (source.test_x, source.test_y, TEST)):
        client = np.arange(count) % CLIENTS
        images = _background(texture[client], rng)
        parts.append((*_with_digits(images, x[..., 0], y, rng), np.array([f"texture {each:02}" for each in client])))
    (x, y, client), (test_x, test_y, test_client) = parts
    dataset = from_arrays(
        x, y, task="segmentation", client=client, x_test=test_x, y_test=test_y, client_test=test_client,
        name=request.name,
    )  # fmt: skip
    return dataclasses.replace(dataset, class_names=("background", *map(str, range(10))))


def _background(texture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Stripes with noise [M, 24, 24] in 0..1, from direction, width in pixels and brightness [M, 3]."""
    direction, width, brightness = (column[:, None, None] for column in texture.T)
    row, column = np.mgrid[:SIDE, :SIDE]
    phase = rng.uniform(0, 2 * np.pi, direction.shape)
    stripes = np.sin(2 * np.pi * (row * np.sin(direction) + column * np.cos(direction)) / width + phase)
    return np.clip(brightness * (1 + stripes) / 2 + rng.normal(0, 0.08, stripes.shape), 0, 1)


def _with_digits(
    images: np.ndarray, x: np.ndarray, y: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Paste a digit of x [D, 8, 8] into each half of the images [M, 24, 24]: bytes [M, 24, 24, 1] and masks."""
    masks = np.zeros(images.shape, np.int32)
    room = SIDE // 2 - DIGIT + 1
    for image, mask in zip(images, masks, strict=True):
        for left, number in zip((0, SIDE // 2), rng.integers(len(x), size=2), strict=True):
            top, start = rng.integers(SIDE - DIGIT + 1), left + rng.integers(room)
            place = slice(top, top + DIGIT), slice(start, start + DIGIT)
            image[place] = np.maximum(image[place], x[number])
            mask[place] = np.where(x[number] > INK, y[number] + 1, 0)
    return np.round(255 * images[..., None]).astype(np.uint8), masks
