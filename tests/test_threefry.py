"""The hash behind random keys, which programs of the tests call in Python: published numbers, and the bits of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.testing import threefry


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_it_has_the_published_values(key, counter, expected):
    """Known answers of Random123, the implementation of its authors."""
    assert threefry.threefry(key, counter) == expected
    rows = [np.full(3, word, np.uint32) for word in (*key, *counter)]
    for found, word in zip(threefry.threefry(rows[:2], rows[2:]), expected, strict=True):
        assert found.tolist() == [word] * 3


def draws(seed):
    """Folds of one key and of several, and numbers of several shapes."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 7), 3)
    several = jax.vmap(lambda key, n: jax.random.bits(jax.random.fold_in(key, n), (5,)))(keys, jnp.arange(3))
    many, none = (jax.random.bits(keys[2], (count,)) for count in (40_000, 0))
    return jax.random.bits(keys[0]), several, jax.random.normal(keys[1], (2, 3)), many, none


def test_a_program_calls_it_and_draws_what_jax_draws():
    """JAX writes its own hash into a program for another platform, which here runs on the CPU."""
    ours = jax.jit(draws).lower(3).compile()
    assert threefry.NAME in ours.as_text() and "shift-left" not in ours.as_text()
    ignored = [jax.export.DisabledSafetyCheck.platform()]
    theirs = jax.export.export(jax.jit(draws), platforms=["tpu"], disabled_checks=ignored)(3)
    assert threefry.NAME not in theirs.mlir_module()
    for one, other in zip(ours(3), theirs.call(3), strict=True):
        np.testing.assert_array_equal(one, other)
