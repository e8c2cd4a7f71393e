"""FedCross: who collaborates with whom, by which similarity, and what it coincides with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.models import Layer
from fedjax_mr.strategies import fedavg, fedcross
from fedjax_mr.strategies.base import Cohort
from fedjax_mr.strategies.fedcross import Hyper

KINDS = ("cosine", "printed", "authors", "euclidean", "manhattan")


similarities = jax.jit(fedcross.similarities, static_argnames=("kind", "layers"))
least_similar, most_similar = (
    jax.jit(choose, static_argnames="released") for choose in (fedcross.least_similar, fedcross.most_similar)
)


def after(engine, count):
    return engine.run(engine.init(), count)[0]


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["in_order", "lowest"])
def test_alpha_one_is_indep(engine, close, selection):
    alone = after(engine("fedcross", "perceptron", hyper=Hyper(alpha=1.0, selection=selection)), 3)
    close(alone.server.models, after(engine("indep", "perceptron"), 3).server.models)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_two_models_and_alpha_one_half_are_uniform_fedavg(engine, close, network):
    crossing = engine("fedcross", network, cohort=2, hyper=Hyper(alpha=0.5))
    crossed = after(crossing, 3)
    averaged = after(engine("fedavg", network, cohort=2, hyper=fedavg.Hyper(weights="uniform")), 3).server.model
    close(crossing.deployed(crossed), averaged)
    close(trees.take(crossed.server.models, 1), averaged)


@pytest.mark.slow
def test_warmup_is_uniform_fedavg(engine, close):
    warming = engine("fedcross", "perceptron", hyper=Hyper(warmup_rounds=2))
    close(
        warming.deployed(after(warming, 2)),
        after(engine("fedavg", "perceptron", hyper=fedavg.Hyper(weights="uniform")), 2).server.model,
    )


@pytest.mark.parametrize("deployed", ["mixed", "uploaded"])
def test_the_deployed_model_is_a_mean_after_or_before_the_mixing(federation, close, deployed):
    """Only the mean of the uploads is kept: that of the models follows from the state."""
    problem = federation("perceptron").problem
    strategy = fedcross.build(Hyper(alpha=0.7, selection="highest", deployed=deployed), problem)
    state, global_model = jax.jit(strategy.init)(jax.random.key(0)), jax.jit(strategy.global_model)
    close(global_model(state), jax.tree.map(lambda leaf: np.asarray(leaf)[0], state.models))
    rng = np.random.default_rng(1)
    normal = lambda leaf: np.asarray(leaf) + rng.normal(size=leaf.shape).astype(np.float32)
    uploads = {"model": jax.tree.map(normal, state.models)}
    ids = jnp.arange(problem.cohort_size, dtype=jnp.int32)
    cohort = Cohort(ids, problem.sizes[ids])
    update = jax.jit(lambda state, uploads: strategy.server_update(state, uploads, cohort, jnp.int32(0), None)[0])
    state = update(state, uploads)
    assert (state.deployed is None) == (deployed == "mixed")
    mean = lambda models: jax.tree.map(lambda leaf: np.mean(leaf, axis=0), models)
    means = {"mixed": mean(state.models), "uploaded": mean(uploads["model"])}
    close(global_model(state), means[deployed])
    assert not np.allclose(*(jax.tree.leaves(mean)[1] for mean in means.values()), atol=1e-3)


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_in_order_everyone_meets_everyone(count):
    in_order = jax.jit(fedcross.in_order, static_argnums=1)
    met = np.stack([in_order(jnp.asarray(round), count) for round in range(7, 7 + count - 1)])
    for model in range(count):
        assert sorted(met[:, model]) == [other for other in range(count) if other != model]
    assert all(sorted(row) == list(range(count)) for row in met)  # a permutation in each round


# Four models of two tensors each, as long as each other or not, on which the similarities rank the others differently.
A = np.array([[1.0, 0.0], [10.0, 8.0], [0.6, -0.2], [1.0, -1.5]], np.float32)
B = np.array([[2.0], [3.0], [1.0], [1.9]], np.float32)
MODELS = {"params": {"first": jnp.asarray(A), "second": jnp.asarray(B)}}
LAYERS = (Layer("second", (1,), ("second",)), Layer("first", (0,), ("first",)))


def by_hand(kind):
    x = np.concatenate([A, B], axis=1).astype(np.float64)
    norms = np.linalg.norm(x, axis=1)
    if kind == "cosine":
        return x @ x.T / (norms[:, None] * norms)
    if kind == "printed":
        return x @ x.T / (norms[:, None] + norms)
    if kind == "authors":  # one pair of tensors, which is also the last chunk
        return 2 * by_hand("cosine")
    difference = x[:, None] - x[None]
    return -np.linalg.norm(difference, axis=2) if kind == "euclidean" else -np.abs(difference).sum(2)


@pytest.mark.parametrize("kind", KINDS)
def test_similarities_against_their_definitions(kind):
    np.testing.assert_allclose(similarities(MODELS, kind, LAYERS), by_hand(kind), rtol=1e-5, atol=1e-5)


def test_the_similarities_choose_different_collaborators():
    chosen = {kind: most_similar(jnp.asarray(by_hand(kind)), released=False)[0] for kind in KINDS}
    assert int(chosen["cosine"]) == 2  # nearest in direction
    assert int(chosen["printed"]) == 1  # the longest
    assert int(chosen["euclidean"]) == 2
    worst = {kind: least_similar(jnp.asarray(by_hand(kind)), released=False)[0] for kind in KINDS}
    assert int(worst["cosine"]) == 1
    assert int(worst["printed"]) == 2  # the shortest
    assert int(worst["manhattan"]) == 1


def cosine(x):
    x = x.astype(np.float64)
    norms = np.linalg.norm(x, axis=1)
    return x @ x.T / (norms[:, None] * norms)


def test_released_similarity_takes_pairs_of_tensors_in_forward_order():
    """Three tensors: one pair and a single one, which counts once."""
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=(3, 4)).astype(np.float32) for _ in range(3)]
    models = {"params": {name: jnp.asarray(leaf) for name, leaf in zip("abc", leaves, strict=True)}}
    layers = (Layer("c", (2,), ("c",)), Layer("ba", (1, 0), ("b", "a")))  # forward order c, b, a
    expected = cosine(np.concatenate([leaves[2], leaves[1]], 1)) + cosine(leaves[0])
    np.testing.assert_allclose(similarities(models, "authors", layers), expected, rtol=1e-5)


def released_similarity(leaves):
    """The released loop over the tensors of two models, transcribed, here for all pairs of models at once."""
    total, chunk = 0.0, np.empty(())
    for number, leaf in enumerate(leaves):
        if number % 2 == 0:
            chunk = leaf
        else:
            chunk = np.concatenate([chunk, leaf], axis=1)
            total = total + cosine(chunk)
    return total + cosine(chunk)  # after the loop: an even number of tensors has its last pair twice


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 24, 25])
def test_released_similarity_equals_the_released_loop(count):
    """For even and odd numbers of tensors; and "lowest" and "highest" then choose the same collaborators."""
    rng = np.random.default_rng(count)
    leaves = [rng.normal(size=(6, size)).astype(np.float32) for size in rng.integers(1, 9, count)]
    models = {"params": {f"{number:02}": jnp.asarray(leaf) for number, leaf in enumerate(leaves)}}
    layers = tuple(Layer(f"{number:02}", (number,), ("leaf",)) for number in range(count))
    table, expected = similarities(models, "authors", layers), released_similarity(leaves)
    np.testing.assert_allclose(table, expected, rtol=1e-4, atol=1e-5)
    for lowest, choose in ((True, least_similar), (False, most_similar)):
        if count > 1:  # one tensor may be one number, whose cosines are all 1 or -1
            assert choose(table, released=True).tolist() == scan(expected, lowest=lowest)


def scan(table, lowest):
    """The released scan, transcribed: lowest starts at the next model, highest at model 0; the diagonal is 0."""
    count = len(table)
    table = np.where(np.eye(count, dtype=bool), 0.0, table)
    chosen = []
    for i in range(count):
        best = (i + 1) % count if lowest else 0
        for p in range(count):
            if lowest and p != i and table[i, p] < table[i, best]:
                best = p
            if not lowest and table[i, p] > table[i, best]:
                best = p
        chosen.append(best)
    return chosen


def test_released_choices_equal_the_released_scan():
    rng = np.random.default_rng(0)
    for _ in range(40):
        table = rng.integers(-2, 3, (5, 5)).astype(np.float32)  # many ties
        assert least_similar(jnp.asarray(table), released=True).tolist() == scan(table, lowest=True)
        assert most_similar(jnp.asarray(table), released=True).tolist() == scan(table, lowest=False)


@pytest.mark.parametrize("acceleration", ["none", "pm", "da", "pm_da"])
def test_mixing_weights(acceleration):
    """Every row sums to 1; the acceleration begins at start_alpha, ends where it should, and then is gone."""
    hyper = Hyper(acceleration=acceleration, acceleration_rounds=20, selection="in_order")
    mixing = jax.jit(functools.partial(fedcross.mixing, hyper, jnp.zeros((4, 4))))
    weights = np.stack([mixing(jnp.asarray(round)) for round in range(30)])
    np.testing.assert_allclose(weights.sum(2), 1, atol=1e-6)
    own = weights[:, 0, 0]
    np.testing.assert_allclose(own[20:], 0.99, atol=1e-6)
    helpers = (weights[:, 0] > 1e-6).sum(1) - 1
    expected = {"none": (0.99, 0.99), "pm": (0.5, 0.5), "da": (0.5, 0.745), "pm_da": (0.5, 0.5)}[acceleration]
    np.testing.assert_allclose((own[0], own[10]), expected, atol=1e-6)
    assert helpers[0] == (2 if "pm" in acceleration else 1)
    assert helpers[19] == (2 if acceleration == "pm" else 1)
    if acceleration == "pm_da":
        np.testing.assert_allclose(own[15], (0.5 + 0.99) / 2, atol=1e-6)


def test_cross_aggregation_uses_the_uploaded_models(close):
    weights = jnp.asarray([[0.9, 0.1], [0.1, 0.9]])
    mixed = trees.mix({"a": jnp.asarray([[1.0, 2.0], [3.0, 6.0]])}, weights)
    close(mixed, {"a": jnp.asarray([[1.2, 2.4], [2.8, 5.6]])})


def test_distances_need_no_pairwise_copy_of_the_models():
    """The compiled Manhattan table of 8 models of 50,000 numbers holds a few copies of them, not 8 x 8."""
    models = {"params": {"a": jax.ShapeDtypeStruct((8, 50_000), jnp.float32)}}
    table = jax.jit(lambda models: fedcross.similarities(models, "manhattan", ()))
    analysis = table.lower(models).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 3 * 8 * 50_000 * 4
