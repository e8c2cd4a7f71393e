"""Facts about samples: raw samples in the source's format are accepted, all others are refused."""

import dataclasses

import numpy as np
import pytest

from fedjax_mr import data
from fedjax_mr.data.facts import FILE, Facts
from fedjax_mr.errors import UserError

RNG = np.random.default_rng(0)
Y = np.arange(30) % 3
FLOATS = Facts.of(data.from_arrays(RNG.uniform(size=(30, 4, 4, 1)).astype(np.float32), Y, name="floats"))
BYTES = Facts.of(data.from_arrays(RNG.integers(0, 256, (30, 4, 4), dtype=np.uint8), Y, name="bytes"))
TOKENS = Facts.of(data.from_arrays(RNG.integers(0, 9, (30, 5)), Y, name="tokens"))


def test_they_outlast_the_data(tmp_path):
    for each in (FLOATS, BYTES, TOKENS):
        each.save(tmp_path)
        assert Facts.read(tmp_path) == each
    (tmp_path / FILE).unlink()
    assert Facts.read(tmp_path) is None
    for text in ("", "[]", "{}", '{"shape": 3}', (FLOATS.save(tmp_path), (tmp_path / FILE).read_text()[:-9])[1]):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UserError, match=r"samples.json is damaged"):
            Facts.read(tmp_path)


def test_a_negative_deviation_as_in_leaf_s_femnist():
    x, y = np.zeros((4, 2, 2, 1), np.float32), np.arange(4) % 2
    facts = Facts.of(data.from_arrays(x, y, x_test=x, y_test=y, mean=(0.25,), std=(-0.5,)))
    assert Facts.parse(facts.text()) == facts
    with pytest.raises(ValueError, match="std must not be 0"):
        Facts.parse(facts.text().replace("-0.5", "0"))


def test_samples_as_the_source_gives_them():
    np.testing.assert_array_equal(BYTES.samples(np.full((2, 4, 4), 255)), np.full((2, 4, 4, 1), 255, np.uint8))
    assert FLOATS.samples(np.full((2, 4, 4, 1), 1.2)).dtype == np.float32
    assert TOKENS.samples([[0, 1, 2, 3, 4]]).dtype == np.int32
    assert FLOATS.samples(np.zeros((0, 4, 4, 1))).shape == (0, 4, 4, 1)


WRONG = {
    "one sample": (FLOATS, np.zeros((4, 4, 1)), "are [n, 4, 4, 1], not [4, 4, 1]; a single sample x is x[None]"),
    "another shape": (FLOATS, np.zeros((2, 8, 8, 1)), "are [n, 4, 4, 1], not [2, 8, 8, 1]"),
    "bytes for floats": (FLOATS, np.zeros((2, 4, 4, 1), np.uint8), "are floats from 0.00"),
    "another scale": (FLOATS, np.full((2, 4, 4, 1), 255.0), "but these from 255 to 255: use the source's format"),
    "not finite": (FLOATS, np.full((2, 4, 4, 1), np.nan), "not finite"),
    "normalised": (BYTES, np.zeros((2, 4, 4, 1)), "samples of bytes are bytes, but these are float64"),
    "no bytes": (BYTES, np.full((2, 4, 4, 1), 256), "range from 0 to 255, but these from 256 to 256"),
    "no tokens": (TOKENS, np.full((2, 5), 9), "range from 0 to 8, but these from 9 to 9"),
    "texts": (TOKENS, [["a"] * 5], "are token numbers, but these are <U1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_samples_are_refused(case):
    facts, x, message = WRONG[case]
    with pytest.raises(UserError) as error:
        facts.samples(x)
    assert message in str(error.value)


def test_the_template_has_the_kind_of_the_samples():
    template = BYTES.dataset(100)
    assert (template.x.shape, template.x.dtype, len(template.y)) == ((1, 4, 4, 1), np.uint8, 100)
    assert dataclasses.replace(Facts.of(template), low=BYTES.low, high=BYTES.high) == BYTES
