"""Algebra on stacked trees, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mr import trees

TREE = {"a": np.array([[3, 4], [3, 4], [-4, 3]], np.float32), "b": np.zeros((3, 2, 2), np.float32)}
cosines, mean_pairwise_cosine, put = (jax.jit(each) for each in (trees.cosines, trees.mean_pairwise_cosine, trees.put))
mix = jax.jit(trees.mix, static_argnames="units")


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


# --- mix --------------------------------------------------------------------------------------------------------------


@st.composite
def maps(draw, count=5):
    """A map of some models in all its forms, as a matrix [R, K], and the models."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31 - 1)))
    rows, most = draw(st.sampled_from([1, 5, 6])), draw(st.sampled_from([1, 4]))  # each shape is compiled
    ids = rng.integers(0, count, (rows, most)).astype(np.int32)
    weights = rng.dirichlet(np.ones(most), rows).astype(np.float32)
    matrix = np.zeros((rows, count), np.float32)
    np.add.at(matrix, (np.arange(rows)[:, None], ids), weights)
    models = {
        name: rng.normal(size=(count, *shape)).astype(np.float32) for name, shape in {"a": (3,), "b": (2, 2)}.items()
    }
    return trees.Neighbours(ids, weights), matrix, models


def doubly_stochastic(rng, count):
    """A mean of permutations, whose rows and columns sum to one."""
    shares = rng.dirichlet(np.ones(4))
    matrix = sum(share * np.eye(count)[rng.permutation(count)] for share in shares)
    return matrix.astype(np.float32)


def near(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-5), a, b)


@settings(max_examples=20, deadline=None)
@given(maps())
def test_neighbours_and_their_matrix_are_the_same_map_and_means_stay_in_range(drawn):
    neighbours, matrix, models = drawn
    found = mix(models, neighbours)
    near(found, mix(models, matrix))
    for old, new in zip(jax.tree.leaves(models), jax.tree.leaves(found), strict=True):
        new = np.asarray(new)
        assert np.all(old.min(axis=0) - 1e-5 <= new) and np.all(new <= old.max(axis=0) + 1e-5)


@settings(max_examples=20, deadline=None)
@given(maps(), st.integers(0, 2**31 - 1))
def test_sums_stay_if_columns_sum_to_one_and_maps_compose(drawn, seed):
    models, rng = drawn[2], np.random.default_rng(seed)
    first, second = doubly_stochastic(rng, 5), doubly_stochastic(rng, 5)
    once = jax.device_get(mix(models, first))
    near(jax.tree.map(lambda leaf: leaf.sum(axis=0), models), jax.tree.map(lambda leaf: leaf.sum(axis=0), once))
    near(mix(once, second), mix(models, second @ first))
    names = rng.permutation(5).astype(np.int32)  # other numbers of the clients give the same models
    renamed = mix(mix(models, names), first[names][:, names])
    near(renamed, mix(once, names))


@settings(max_examples=20, deadline=None)
@given(maps(), st.integers(0, 2**31 - 1))
def test_a_permutation_moves_bits_and_each_unit_has_its_own_map(drawn, seed):
    models, rng = drawn[2], np.random.default_rng(seed)
    orders = np.stack([rng.permutation(5), rng.permutation(5)]).astype(np.int32)
    found = mix(models, orders, units=((1,), (0,)))
    np.testing.assert_array_equal(found["b"], models["b"][orders[0]])
    np.testing.assert_array_equal(found["a"], models["a"][orders[1]])
    of_units = trees.Neighbours(orders[:, :, None], np.ones((2, 5, 1), np.float32))
    near(found, mix(models, of_units, units=((1,), (0,))))


def test_weights_of_one_sum_have_no_rows():
    np.testing.assert_allclose(mix(TREE, np.float32([0.5, 0.5, 0.0]))["a"], [3, 4])
