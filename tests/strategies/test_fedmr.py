"""FedMR's recombination: properties over random models, and identities with other methods."""

import collections
import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedjax_mr import trees
from fedjax_mr.client.local import Metrics
from fedjax_mr.engine import round as engine_round
from fedjax_mr.engine.round import CohortPlan, Progress
from fedjax_mr.models import Layer
from fedjax_mr.strategies import fedmr, indep
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import Models, unit_permutations
from fedjax_mr.testing.federations import first_cohort

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


MODELS = {
    "params": {name: np.arange(5, dtype=np.float32) + 10 * number for number, name in enumerate("abc")}
}  # K = 5, three units
EACH_LEAF = tuple(Layer(name, (position,), (name,)) for position, name in enumerate("abc"))


@pytest.fixture(scope="module")
def recombination(federation):
    """(round, seed) -> the five models after the server's step, one row for each of the units a, b and c."""
    problem = dataclasses.replace(federation("linear").problem, layers=EACH_LEAF, cohort_size=5)
    strategy = fedmr.build(fedmr.Hyper(stage1_rounds=2), problem)
    update = jax.jit(strategy.server_update)

    def run(round, seed):
        new, _ = update(Models(MODELS), {"model": MODELS}, first_cohort(problem), round, jax.random.key(seed))
        return np.stack(jax.tree.leaves(new.models))

    return run


def test_every_unit_gets_a_permutation_of_its_own(recombination):
    """A common permutation of all units would only rename the models, as in Indep."""
    for seed in range(3):
        a, b, c = recombination(2, seed) - np.array([[0], [10], [20]])
        assert sorted(a) == sorted(b) == sorted(c) == [0, 1, 2, 3, 4]
        assert len({tuple(a), tuple(b), tuple(c)}) == 3


def test_every_unit_is_permuted_anew_with_another_key(recombination):
    """All three units, including the last one, move and differ between any two keys."""
    drawn = [recombination(2, seed) for seed in range(3)]
    still = np.stack(jax.tree.leaves(MODELS))
    for one, other in itertools.combinations([still, *drawn], 2):
        assert np.all(np.any(one != other, axis=1))
    np.testing.assert_array_equal(recombination(7, 1), drawn[1])  # the round does not matter, only its key


def test_models_are_averaged_while_fewer_rounds_than_stage1_rounds_are_completed(recombination):
    mean = np.repeat([[2.0], [12.0], [22.0]], 5, axis=1)
    for round in (0, 1):
        np.testing.assert_array_equal(recombination(round, 0), mean)
    assert np.all(np.sort(recombination(2, 0), axis=1) == np.stack(jax.tree.leaves(MODELS)))  # nothing is averaged


def test_the_deployed_model_is_the_mean_of_the_recombined_models(federation):
    strategy = fedmr.build(fedmr.Hyper(), federation("linear").problem)
    deployed = strategy.global_model(
        Models({"params": {"a": np.array([[1.0, 5.0], [2.0, 7.0], [6.0, 0.0]], np.float32)}})
    )
    np.testing.assert_array_equal(deployed["params"]["a"], [3.0, 4.0])


def test_the_jth_client_of_a_cohort_trains_the_jth_model(federation):
    """As it is; a client that trains in a later round gets the model of its place in that cohort."""
    strategy = fedmr.build(fedmr.Hyper(), federation("linear").problem)
    sent = strategy.dispatch(Models(MODELS), Cohort(np.array([3, 0, 4, 1, 2]), np.ones(5)), None)
    np.testing.assert_array_equal(sent["model"]["params"]["a"], [0, 1, 2, 3, 4])


def test_only_the_branches_that_return_are_stored(federation):
    """Asynchronous: branches 3 and 1 are sent and return. Here the server does not recombine them."""
    problem = dataclasses.replace(federation("linear").problem, layers=EACH_LEAF, cohort_size=2, in_flight=5)
    strategy = fedmr.build(fedmr.Hyper(server_recombines=False), problem)
    cohort = Cohort(np.arange(2), np.ones(2), branches=jnp.array([3, 1]))
    uploads = {"params": dict.fromkeys("abc", np.array([33.0, 11.0], np.float32))}
    with jax.disable_jit():
        sent = strategy.dispatch(Models(MODELS), cohort, None)["model"]["params"]["a"]
        new, _ = strategy.server_update(Models(jax.device_put(MODELS)), {"model": uploads}, cohort, 0, None)
    assert sent.tolist() == [3, 1]
    assert new.models["params"]["a"].tolist() == [0, 11, 2, 33, 4]


def test_the_server_gets_another_key_in_every_round(federation):
    """So the units are permuted anew in every round, and as in the same round of another run of the seed."""
    known = federation("linear")
    cohort = first_cohort(known.problem)
    spy = indep.build(None, known.problem)._replace(
        dispatch=lambda state, cohort, key: {},
        server_update=lambda state, uploads, cohort, round, key: (Models(jax.random.key_data(key)), {}),
    )
    constants, zeros = known._replace(build=lambda problem: spy), np.zeros(3, np.int32)
    trained = {"model": {"params": np.ones((3, 2), np.float32)}}, None, Metrics(zeros + 0.0, zeros, zeros, zeros - 1)
    plan, state = CohortPlan(cohort, np.arange(3)), Models(np.zeros(2, np.uint32))
    finish = jax.jit(lambda progress, *messages: engine_round.finish(constants, progress, *messages)[0])
    keys = {
        tuple(finish(Progress(state, None, np.int32(round)), plan, trained).server.models.tolist())
        for round in (0, 1, 2, 0)
    }
    assert len(keys) == 3


def test_one_model_is_left_as_it_is():
    models = {"params": {"a": jnp.arange(6.0).reshape(1, 6)}}
    new = jax.jit(fedmr.recombine, static_argnames="units")(models, units=((0,),), key=jax.random.key(3))
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


@pytest.mark.parametrize(
    "hyper, units",
    [
        (fedmr.Hyper(unit="leaf"), ((3,), (2,), (1,), (0,))),
        (fedmr.Hyper(unit="layer"), ((3, 2), (1, 0))),
        (fedmr.Hyper(unit="segment", segment=1.0), ((3, 2, 1, 0),)),
    ],
)
def test_the_unit_is_a_tensor_a_layer_or_a_segment_of_layers(hyper, units):
    assert fedmr.recombination_units(hyper, line_of_layers(2)) == units


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
