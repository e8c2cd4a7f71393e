"""Algebra on stacked trees, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees

TREE = {"a": np.array([[3, 4], [3, 4], [-4, 3]], np.float32), "b": np.zeros((3, 2, 2), np.float32)}
cosines, mean_pairwise_cosine, put = (jax.jit(each) for each in (trees.cosines, trees.mean_pairwise_cosine, trees.put))


def test_weighted_mean_takes_integer_weights():
    mean = trees.mean(TREE, weights=jnp.asarray([1, 1, 2], jnp.int32))
    np.testing.assert_allclose(mean["a"], [-0.5, 3.5])


def test_cosines_of_parallel_and_orthogonal_models():
    np.testing.assert_allclose(cosines(TREE), [[1, 1, 0], [1, 1, 0], [0, 0, 1]], atol=1e-6)
    np.testing.assert_allclose(mean_pairwise_cosine(TREE), 1 / 3, atol=1e-6)


def test_a_zero_model_has_cosine_zero_and_no_nan():
    tree = {"a": np.array([[0, 0], [1, 0]], np.float32)}
    np.testing.assert_array_equal(cosines(tree), [[0, 0], [0, 1]])
    assert float(mean_pairwise_cosine(tree)) == 0


@pytest.mark.parametrize("spread", [1e-3, 1.0], ids=["alike", "apart"])
def test_the_mean_cosine_is_that_of_all_pairs(spread):
    rng = np.random.default_rng(0)
    shapes = {"a": (30, 4), "b": (7,)}
    tree = {name: 1 + spread * rng.standard_normal((5, *shape)).astype(np.float32) for name, shape in shapes.items()}
    pairs = np.asarray(cosines(tree))[np.triu_indices(5, 1)]
    np.testing.assert_allclose(mean_pairwise_cosine(tree), pairs.mean(), atol=1e-6)


def test_bytes():
    assert trees.num_bytes(TREE) == 4 * (6 + 12)


def test_all_finite():
    assert bool(trees.all_finite(TREE))
    assert not bool(trees.all_finite({"a": jnp.asarray([1.0, jnp.inf])}))


def test_squared_norm_has_a_gradient_at_zero():
    assert float(trees.squared_norm(TREE)) == 75
    gradient = jax.jit(jax.grad(trees.squared_norm))(jax.tree.map(np.zeros_like, TREE))
    assert bool(trees.all_finite(gradient))


def test_put_writes_rows_and_the_mean_of_rows_named_twice():
    tree = {"a": np.zeros((4, 2), np.float32), "seen": np.zeros(4, bool)}
    new = {"a": np.array([[1, 2], [3, 4], [5, 8]], np.float32), "seen": np.ones(3, bool)}
    written = put(tree, np.array([3, 1, 3], np.int32), new)
    np.testing.assert_array_equal(written["a"], [[0, 0], [3, 4], [0, 0], [3, 5]])
    np.testing.assert_array_equal(written["seen"], [False, True, False, True])


def test_put_keeps_a_broken_row_to_itself():
    tree, rows = {"a": np.zeros((3, 1), np.float32)}, np.array([0, 2], np.int32)
    written = put(tree, rows, {"a": np.array([[np.nan], [7]], np.float32)})
    np.testing.assert_array_equal(written["a"], [[np.nan], [0], [7]])
