"""Crop and flip: the same pixels at other positions; all positions and both sides are equally likely."""

import jax
import numpy as np
import pytest

from fedjax_mr.data.augment import crop_flip

PAD, BATCH = 2, 6000


@pytest.fixture(scope="module")
def one_pixel():
    """Many copies of a 6 x 5 image whose only bright pixel is at (3, 1), augmented."""
    x = np.zeros((BATCH, 6, 5, 1), np.uint8)
    x[:, 3, 1] = 200
    return np.asarray(jax.jit(lambda key, x: crop_flip(key, x, pad=PAD))(jax.random.key(0), x))


def test_keeps_shape_type_and_values(one_pixel):
    assert one_pixel.shape == (BATCH, 6, 5, 1)
    assert one_pixel.dtype == np.uint8
    assert set(np.unique(one_pixel)) == {0, 200}


def test_moves_by_up_to_pad_and_mirrors_equally_often(one_pixel):
    expected = np.zeros((6, 5))
    for down in range(-PAD, PAD + 1):
        for right in range(-PAD, PAD + 1):
            row, column = 3 + down, 1 + right
            if 0 <= row < 6 and 0 <= column < 5:
                expected[row, column] += 0.5 / 25
                expected[row, 4 - column] += 0.5 / 25
    found = (one_pixel[..., 0] > 0).mean(axis=0)
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.04 / BATCH))  # five standard errors
    assert (found[expected == 0] == 0).all()


def test_samples_are_independent_and_the_key_decides():
    x = np.arange(4 * 6 * 5 * 3, dtype=np.float32).reshape(1, 24, 5, 3)
    augment = jax.jit(lambda key: crop_flip(key, np.concatenate([x] * 16), pad=4))
    first, same, other = (np.asarray(augment(jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    assert len({image.tobytes() for image in first}) > 8
