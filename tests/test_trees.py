"""Algebra on stacked trees, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees

TREE = {"a": jnp.asarray([[3.0, 4.0], [3.0, 4.0], [-4.0, 3.0]]), "b": jnp.zeros((3, 2, 2))}


def test_weighted_mean_takes_integer_weights():
    mean = trees.mean(TREE, weights=jnp.asarray([1, 1, 2], jnp.int32))
    np.testing.assert_allclose(mean["a"], [-0.5, 3.5])


def test_cosines_of_parallel_and_orthogonal_models():
    np.testing.assert_allclose(trees.cosines(TREE), [[1, 1, 0], [1, 1, 0], [0, 0, 1]], atol=1e-6)
    np.testing.assert_allclose(trees.mean_pairwise_cosine(TREE), 1 / 3, atol=1e-6)


def test_a_zero_model_has_cosine_zero_and_no_nan():
    tree = {"a": jnp.asarray([[0.0, 0.0], [1.0, 0.0]])}
    np.testing.assert_array_equal(trees.cosines(tree), [[0, 0], [0, 1]])
    assert trees.mean_pairwise_cosine(tree) == 0


@pytest.mark.parametrize("spread", [1e-3, 1.0], ids=["alike", "apart"])
def test_the_mean_cosine_is_that_of_all_pairs(spread):
    rng = np.random.default_rng(0)
    shapes = {"a": (30, 4), "b": (7,)}
    tree = {name: 1 + spread * rng.standard_normal((5, *shape)).astype(np.float32) for name, shape in shapes.items()}
    pairs = np.asarray(trees.cosines(tree))[np.triu_indices(5, 1)]
    np.testing.assert_allclose(trees.mean_pairwise_cosine(tree), pairs.mean(), atol=1e-6)


def test_bytes():
    assert trees.num_bytes(TREE) == 4 * (6 + 12)


def test_all_finite():
    assert bool(trees.all_finite(TREE))
    assert not bool(trees.all_finite({"a": jnp.asarray([1.0, jnp.inf])}))


def test_squared_norm_has_a_gradient_at_zero():
    assert float(trees.squared_norm(TREE)) == 75
    gradient = jax.grad(trees.squared_norm)(trees.zeros_like(TREE))
    assert bool(trees.all_finite(gradient))


def test_put_writes_rows_and_the_mean_of_rows_named_twice():
    tree = {"a": jnp.zeros((4, 2)), "seen": jnp.zeros(4, bool)}
    new = {"a": jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 8.0]]), "seen": jnp.ones(3, bool)}
    put = trees.put(tree, jnp.asarray([3, 1, 3]), new)
    np.testing.assert_array_equal(put["a"], [[0, 0], [3, 4], [0, 0], [3, 5]])
    np.testing.assert_array_equal(put["seen"], [False, True, False, True])


def test_put_keeps_a_broken_row_to_itself():
    put = trees.put({"a": jnp.zeros((3, 1))}, jnp.asarray([0, 2]), {"a": jnp.asarray([[jnp.nan], [7.0]])})
    np.testing.assert_array_equal(put["a"], [[np.nan], [0], [7]])
