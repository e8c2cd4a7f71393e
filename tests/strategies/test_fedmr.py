"""FedMR's recombination: properties over random models, and identities with other methods."""

import collections
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjax_mr import trees
from fedjax_mr.models import Layer
from fedjax_mr.strategies import fedmr
from fedjax_mr.strategies.base import unit_permutations
from fedjax_mr.testing.federations import first_cohort, random_like

shapes = st.lists(st.lists(st.integers(1, 3), min_size=0, max_size=3), min_size=1, max_size=6)


@st.composite
def stacked_models(draw):
    """K random models of random nested structure, with their layers in a random forward order."""
    count, rng = draw(st.integers(1, 6)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tree, names = {"params": {}, "batch_stats": {}}, []
    for number, shape in enumerate(draw(shapes)):
        module = f"module{draw(st.integers(0, 3))}"
        collection = draw(st.sampled_from(["params", "batch_stats"]))
        leaf = rng.normal(size=(count, *shape)).astype(np.float32)
        tree[collection].setdefault(module, {})[f"leaf{number}"] = leaf
        names.append(module)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    modules = draw(st.permutations(sorted(set(names))))
    layers = []
    for module in modules:
        leaves = tuple(position for position, path in enumerate(paths) if path[1].key == module)
        layers.append(Layer(module, leaves, tuple(f"leaf{position}" for position in leaves)))
    return tree, tuple(layers), count


hypers = st.one_of(
    st.builds(fedmr.Hyper, unit=st.sampled_from(["leaf", "layer"])),
    st.builds(
        fedmr.Hyper,
        unit=st.just("segment"),
        segment=st.sampled_from([0.05, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.7, 1.0]),
        segment_of=st.sampled_from(["layers", "leaves"]),
    ),
)
examples = functools.partial(hypothesis.settings, deadline=None, derandomize=True)  # each one compiles a program


def copies(leaves, unit, count):
    """The multiset of a unit's copies, bit for bit."""
    rows = (b"".join(np.asarray(leaves[position][row]).tobytes() for position in unit) for row in range(count))
    return collections.Counter(rows)


@functools.partial(jax.jit, static_argnames="units")
def recombined(models, key, *, units):
    """The recombined models, and the means before and after."""
    new = fedmr.recombine(models, units, key)
    return new, trees.mean(models), trees.mean(new)


@examples(max_examples=12)
@hypothesis.given(stacked_models(), hypers, st.integers(0, 2**31 - 1))
def test_each_unit_keeps_its_copies_and_every_sum(drawn, hyper, seed):
    check_recombination(drawn, hyper, seed)


@pytest.mark.slow
@examples(max_examples=100)
@hypothesis.given(stacked_models(), hypers, st.integers(0, 2**31 - 1))
def test_each_unit_keeps_its_copies_and_every_sum_of_many_models(drawn, hyper, seed):
    check_recombination(drawn, hyper, seed)


def check_recombination(drawn, hyper, seed):
    models, layers, count = drawn
    units = fedmr.recombination_units(hyper, layers)
    mixed, deployed, kept = jax.device_get(recombined(models, jax.random.key(seed), units=units))
    old, new = jax.tree.leaves(models), jax.tree.leaves(mixed)
    assert sorted(position for unit in units for position in unit) == list(range(len(old)))
    for unit in units:
        assert copies(old, unit, count) == copies(new, unit, count)  # the tensors of a unit stay together
    point = np.float64(0.3)
    for before, after in zip(old, new, strict=True):
        before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
        np.testing.assert_allclose(before.sum(0), after.sum(0), atol=1e-9)
        np.testing.assert_allclose(((before - point) ** 2).sum(), ((after - point) ** 2).sum(), atol=1e-9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), deployed, kept)


def test_all_get_the_mean_in_the_first_stage_and_recombined_models_afterwards(federation, close):
    problem = federation("linear").problem
    strategy = fedmr.build(fedmr.Hyper(stage1_rounds=2), problem)
    state, cohort = jax.jit(strategy.init)(jax.random.key(0)), first_cohort(problem)
    uploads = random_like(jax.device_get(state.models))
    update = jax.jit(lambda round: strategy.server_update(state, {"model": uploads}, cohort, round, jax.random.key(1)))
    averaged, mixed = update(1)[0].models, update(2)[0].models
    close(averaged, trees.broadcast(trees.mean(uploads), problem.cohort_size))
    for sent, new in zip(jax.tree.leaves(uploads), jax.tree.leaves(mixed), strict=True):
        assert copies([sent], (0,), len(sent)) == copies([new], (0,), len(sent))
    assert any(not np.array_equal(*pair) for pair in zip(jax.tree.leaves(uploads), jax.tree.leaves(mixed), strict=True))


def test_one_model_is_left_as_it_is():
    models = {"params": {"a": jnp.arange(6.0).reshape(1, 6)}}
    new = fedmr.recombine(models, ((0,),), jax.random.key(3))
    np.testing.assert_array_equal(new["params"]["a"], models["params"]["a"])


def test_units_are_permuted_uniformly_and_independently():
    """Over 6,000 keys each of the 6 permutations of 3 models, and each pair of two units' ones, comes equally often."""
    keys = jax.random.split(jax.random.key(0), 6000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: unit_permutations(key, 3, 3)))(keys))
    code = drawn @ np.array([9, 3, 1])  # a number per permutation
    for unit in range(3):
        counts = np.unique(code[:, unit], return_counts=True)[1]
        assert len(counts) == 6
        assert scipy.stats.chisquare(counts).pvalue > 1e-3
    for a, b in ((0, 1), (0, 2), (1, 2)):
        counts = np.unique(code[:, a] * 100 + code[:, b], return_counts=True)[1]
        assert len(counts) == 36
        assert scipy.stats.chisquare(counts).pvalue > 1e-3


def line_of_layers(count, leaves_per_layer=2):
    """Layers whose leaves are numbered backwards, so that forward order is not the order of the tree."""
    total = count * leaves_per_layer
    numbers = [total - 1 - position for position in range(total)]
    return tuple(
        Layer(str(j), tuple(numbers[j * leaves_per_layer : (j + 1) * leaves_per_layer]), ("kernel", "bias"))
        for j in range(count)
    )


@pytest.mark.parametrize("count", [1, 2, 4, 5, 10, 42])
@pytest.mark.parametrize("numerator, denominator", [(1, 10), (1, 5), (1, 4), (1, 3), (1, 2), (7, 10), (1, 1)])
def test_segments_follow_the_papers_formula(count, numerator, denominator):
    """Layer j of N is in segment ceil(j / (x N)), here in whole-number arithmetic."""
    layers = line_of_layers(count)
    hyper = fedmr.Hyper(unit="segment", segment=numerator / denominator)
    expected = collections.defaultdict(list)
    for j, layer in enumerate(layers, start=1):
        expected[-(-j * denominator // (numerator * count))] += layer.leaves
    assert fedmr.recombination_units(hyper, layers) == tuple(map(tuple, expected.values()))


@pytest.mark.parametrize("count", [1, 5, 10, 59])
@pytest.mark.parametrize("numerator, denominator", [(1, 10), (1, 5), (1, 3), (1, 2), (1, 1)])
def test_segments_of_leaves_start_where_the_released_code_starts_them(count, numerator, denominator):
    """A new permutation begins at the first leaf i (from 0) with i >= c x M, c = 1, 2, ..."""
    layers = line_of_layers(count)
    leaves = [leaf for layer in layers for leaf in layer.leaves]
    expected, boundary = [], 0
    for i, leaf in enumerate(leaves):
        if i * denominator >= boundary * numerator * len(leaves):
            expected.append(())
            boundary += 1
        expected[-1] += (leaf,)
    hyper = fedmr.Hyper(unit="segment", segment=numerator / denominator, segment_of="leaves")
    assert fedmr.recombination_units(hyper, layers) == tuple(expected)
