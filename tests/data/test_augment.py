"""Crop and flip: the same pixels at other positions, all equally likely. CutMix: which pixels are kept."""

import jax
import numpy as np
import pytest

from fedjax_mr.data.augment import crop_flip, cutmix

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


def kept(alpha, probability=1.0, shape=(1, 20, 30, 3), count=400):
    """Which pixels cutmix keeps, of many batches: [count, H, W]."""
    draw = jax.jit(jax.vmap(lambda key: cutmix(key, np.zeros(shape), alpha=alpha, probability=probability)))
    return np.asarray(draw(jax.random.split(jax.random.key(0), count)))[:, 0, :, :, 0]


def test_cutmix_cuts_one_box_of_the_shape_of_the_image():
    for pixels in kept(1.0):
        rows, columns = (~pixels).any(axis=1), (~pixels).any(axis=0)
        np.testing.assert_array_equal(~pixels, rows[:, None] & columns[None])
        assert np.abs(np.diff(rows.astype(int), prepend=0, append=0)).sum() in (0, 2)  # no gap
    whole = [
        (~pixels).sum() for pixels in kept(1000.0) if not (~pixels)[[0, -1]].any() and not (~pixels)[:, [0, -1]].any()
    ]
    assert np.mean(whole) / 600 == pytest.approx(0.5, abs=0.05)  # lambda is about 1/2; the sides are even numbers


def test_the_share_of_cutmix_is_that_of_its_beta_distribution_but_for_the_border():
    cut = (~kept(1.0, count=4000)).mean(axis=(1, 2))
    side = np.sqrt(1 - np.random.default_rng(0).beta(1, 1, 4000))
    inside = lambda side, draw: (
        np.minimum(draw + side / 2, 1) - np.maximum(draw - side / 2, 0)
    )  # centre uniform in 0..1
    expected = np.mean([inside(side, draw) for draw in np.linspace(0.001, 0.999, 99)], axis=0) ** 2
    assert cut.mean() == pytest.approx(expected.mean(), abs=0.03)
    assert (cut == 0).mean() < 0.05 and cut.max() > 0.6


def test_batches_are_mixed_with_a_probability():
    assert kept(1.0, probability=0.0).all()
    mixed = (~kept(1000.0, probability=0.3, count=2000)).any(axis=(1, 2)).mean()
    assert mixed == pytest.approx(0.3, abs=0.05)
