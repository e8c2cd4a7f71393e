"""FedCross: who collaborates with whom, by which similarity, and what it coincides with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.models import Layer
from fedjax_mr.strategies import fedavg, fedcross
from fedjax_mr.strategies.fedcross import Hyper
from fedjax_mr.strategies.interface import Cohort

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


def test_all_models_are_averaged_equally_while_fewer_rounds_than_the_warm_up_have_passed():
    hyper = Hyper(alpha=0.9, warmup_rounds=2, selection="in_order")
    weights = [fedcross.mixing(hyper, jnp.zeros((4, 4)), jnp.asarray(round)) for round in (1, 2)]
    np.testing.assert_allclose(weights[0], np.full((4, 4), 0.25))
    np.testing.assert_allclose(np.diag(weights[1]), 0.9, rtol=1e-6)


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


# Four models of two numbers x and y; their directions are 0, 18, 90 and 135 degrees.
UPLOADED = np.array([[1.0, 0.0], [3.0, 1.0], [0.0, 2.0], [-1.0, 1.0]], np.float32)
LOWEST, HIGHEST = [3, 3, 0, 0], [1, 0, 3, 2]
# The same directions in another order: among these models, the collaborators would be 2, 3, 3, 2 and 3, 2, 1, 0.
SENT = UPLOADED[[1, 2, 3, 0]]


def pairs(rows):
    return {"params": {"x": jnp.asarray(rows[:, 0]), "y": jnp.asarray(rows[:, 1])}}


def rows_of(models):
    return np.stack([np.asarray(models["params"][name]) for name in "xy"], axis=-1)


def four_models(federation, **settings):
    return dataclasses.replace(federation("linear").problem, cohort_size=4, **settings)


@pytest.mark.parametrize(
    "selection, round, collaborators",
    [
        ("lowest", 0, LOWEST),
        ("lowest", 5, LOWEST),
        ("highest", 0, HIGHEST),
        ("in_order", 0, [1, 2, 3, 0]),
        ("in_order", 1, [2, 3, 0, 1]),
        ("in_order", 2, [3, 0, 1, 2]),
        ("in_order", 3, [1, 2, 3, 0]),  # Eq. 2: i + (r mod (K - 1)) + 1 mod K
    ],
)
def test_each_uploaded_model_is_mixed_with_its_collaborator_among_the_uploaded_ones(
    federation, selection, round, collaborators
):
    """alpha v_i + (1 - alpha) v_co; the models before the training do not matter."""
    strategy = fedcross.build(Hyper(alpha=0.75, selection=selection), four_models(federation))
    state = fedcross.State(pairs(SENT), None, None)
    cohort = Cohort(np.arange(4), np.array([1, 9, 1, 9]))  # not weighted by samples
    state, _ = strategy.server_update(state, {"model": pairs(UPLOADED)}, cohort, np.int32(round), None)
    expected = 0.75 * UPLOADED + 0.25 * UPLOADED[collaborators]
    np.testing.assert_allclose(rows_of(state.models), expected, rtol=1e-6)
    np.testing.assert_allclose(rows_of(strategy.global_model(state)), expected.mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("deployed", ["mixed", "uploaded"])
def test_the_deployed_model_is_a_mean_after_or_before_the_mixing(federation, close, deployed):
    """Only the mean of the uploads is kept: that of the models follows from the state."""
    strategy = fedcross.build(Hyper(alpha=0.75, selection="highest", deployed=deployed), four_models(federation))
    state = jax.jit(strategy.init)(jax.random.key(0))
    close(strategy.global_model(state), jax.tree.map(lambda leaf: np.asarray(leaf)[0], state.models))
    cohort = Cohort(np.arange(4), np.array([1, 9, 1, 9]))
    uploads = {"model": pairs(np.array([[0, 0], [2, 1], [8, 0], [10, 1]], np.float32))}  # the mixture moves their mean
    state, _ = strategy.server_update(state, uploads, cohort, np.int32(0), None)
    assert (state.deployed is None) == (deployed == "mixed")
    means = {"mixed": rows_of(state.models).mean(axis=0), "uploaded": np.array([5.0, 0.5])}
    np.testing.assert_allclose(rows_of(strategy.global_model(state)), means[deployed], rtol=1e-6)
    assert not np.allclose(means["mixed"], means["uploaded"], atol=0.1)


@pytest.mark.parametrize(
    "selection, similarity, chosen",
    [
        ("highest", "cosine", [1, 0, 0]),
        ("highest", "authors", [0, 1, 2]),  # 0, the released similarity of a model with itself, is the highest
        ("lowest", "cosine", [1, 0, 0]),
        ("lowest", "authors", [1, 2, 0]),  # the next model wins a tie
    ],
)
def test_a_model_is_its_own_collaborator_only_in_the_released_code(selection, similarity, chosen):
    """Three models of equal and negative similarity."""
    hyper = Hyper(alpha=0.75, selection=selection, similarity=similarity)
    weights = fedcross.mixing(hyper, jnp.full((3, 3), -0.5), np.int32(0))
    np.testing.assert_allclose(weights, 0.75 * np.eye(3) + 0.25 * np.eye(3)[chosen])


def test_a_single_model_has_no_collaborator(federation):
    assert fedcross.mixing(Hyper(), jnp.ones((1, 1)), np.int32(0)).tolist() == [[1]]
    with pytest.raises(UserError, match="cohort= must be at least 2"):
        fedcross.build(Hyper(), dataclasses.replace(federation("linear").problem, cohort_size=1))
    fedcross.build(Hyper(), dataclasses.replace(federation("linear").problem, cohort_size=1, in_flight=2))


def test_a_returned_branch_is_mixed_with_the_newest_upload_of_its_collaborator(federation):
    """Asynchronous: branch 2 of four returns. Of the others, the newest uploads matter, not what was sent to them."""
    problem = dataclasses.replace(four_models(federation, in_flight=4), cohort_size=1)
    strategy = fedcross.build(Hyper(alpha=0.75, selection="highest"), problem)
    before = np.where(np.arange(4)[:, None] == 2, 7.0, UPLOADED).astype(np.float32)
    state = fedcross.State(pairs(SENT), None, pairs(before))
    cohort = Cohort(np.array([0]), np.array([5]), branches=jnp.array([2]))
    state, _ = strategy.server_update(state, {"model": pairs(UPLOADED[2:3])}, cohort, np.int32(0), None)
    np.testing.assert_array_equal(rows_of(state.newest), UPLOADED)
    expected = SENT.copy()
    expected[2] = 0.75 * UPLOADED[2] + 0.25 * UPLOADED[3]
    np.testing.assert_allclose(rows_of(state.models), expected, rtol=1e-6)


def test_the_two_propellers_of_a_model_are_others():
    """The in-order collaborator and the model after it, or the one behind that if it is the model itself."""
    hyper = Hyper(acceleration="pm", acceleration_rounds=3, start_alpha=0.4)
    for round, propellers in enumerate([[(1, 2), (2, 3), (3, 0), (0, 1)], [(2, 3), (3, 0), (0, 1), (1, 2)],
                                        [(3, 1), (0, 2), (1, 3), (2, 0)]]):  # fmt: skip
        expected = 0.4 * np.eye(4)
        for model, pair in enumerate(propellers):
            expected[model, list(pair)] = 0.3
        np.testing.assert_allclose(fedcross.mixing(hyper, jnp.zeros((4, 4)), np.int32(round)), expected, atol=1e-6)


def test_distances_need_no_pairwise_copy_of_the_models():
    """The compiled Manhattan table of 8 models of 50,000 numbers holds a few copies of them, not 8 x 8."""
    models = {"params": {"a": jax.ShapeDtypeStruct((8, 50_000), jnp.float32)}}
    table = jax.jit(lambda models: fedcross.similarities(models, "manhattan", ()))
    analysis = table.lower(models).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 3 * 8 * 50_000 * 4
