"""The shared parts of strategies: permutations, starts, circulating models, shares and steps, by hand."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.client import local
from fedjax_mr.strategies import STRATEGIES, Cohort, interface, parts
from fedjax_mr.strategies.parts import GlobalModel, Models, averaging, circulating
from fedjax_mr.strategies.traffic import usual_traffic
from fedjax_mr.testing.federations import default_hyper


def numbered(**fields):
    """A problem whose networks start as (a word of the key, architecture)."""

    def init(key, architecture=0):
        return {"params": {"w": jnp.stack([jax.random.uniform(key), jnp.float32(architecture)])}}

    model = SimpleNamespace(init=init, mean=lambda models: jax.tree.map(lambda leaf: leaf.mean(axis=0), models))
    return SimpleNamespace(model=model, num_branches=3, cohort_size=2, **fields)


def w_of(model):
    return np.asarray(model["params"]["w"])


def test_every_unit_and_every_key_has_a_permutation_of_its_own():
    drawn = [np.asarray(parts.unit_permutations(jax.random.key(seed), 3, 8)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(np.sort(drawn[0], axis=1), np.tile(np.arange(8), (3, 1)))
    rows = {tuple(row) for permutations in drawn for row in permutations}
    assert len(rows) == 6  # three units under two keys; the same key draws the same
    assert tuple(range(8)) not in rows


def test_clients_start_from_networks_of_their_own_and_their_own_architecture():
    problem: Any = numbered(architectures=jnp.array([0, 2, 1]), num_clients=3)
    all = w_of(parts.own_starts(problem, jax.random.key(0)))
    np.testing.assert_array_equal(all[:, 1], [0, 2, 1])
    assert len(set(all[:, 0].tolist())) == 3
    one = w_of(parts.own_start(problem, jax.random.key(0), jnp.int32(1)))
    np.testing.assert_array_equal(one, all[1])


def test_k_models_start_as_copies_or_independently():
    problem: Any = numbered()
    copies, independent = (
        w_of(start(problem, jax.random.key(0)))[:, 0] for start in (parts.copies_of_one, parts.independent_starts)
    )
    assert copies.shape == independent.shape == (3,)  # M with asynchronous clients, not K
    assert len(set(copies.tolist())) == 1 and len(set(independent.tolist())) == 3


MODELS = Models({"params": {"w": jnp.array([1.0, 2.0, 6.0])}})


def test_model_j_goes_to_client_j_and_comes_back_unchanged():
    strategy = circulating(numbered())  # pyright: ignore[reportArgumentType]
    cohort = Cohort(jnp.array([2, 0, 1]), jnp.array([5, 1, 3]))
    np.testing.assert_array_equal(w_of(strategy.dispatch(MODELS, cohort, None)["model"]), [1, 2, 6])
    uploads = {"model": {"params": {"w": jnp.array([7.0, 8.0, 12.0])}}}
    state, info = strategy.server_update(MODELS, uploads, cohort, 0, None)
    np.testing.assert_array_equal(w_of(state.models), [7, 8, 12])
    assert info == {} and float(w_of(strategy.global_model(state))) == 9  # the uniform mean, whatever the sizes


def test_asynchronous_clients_train_and_replace_the_models_of_their_branches():
    strategy = circulating(numbered())  # pyright: ignore[reportArgumentType]
    cohort = Cohort(jnp.array([0, 1]), jnp.array([5, 1]), branches=jnp.array([2, 0]))
    np.testing.assert_array_equal(w_of(strategy.dispatch(MODELS, cohort, None)["model"]), [6, 1])
    uploads = {"model": {"params": {"w": jnp.array([60.0, 10.0])}}}
    state, _ = strategy.server_update(MODELS, uploads, cohort, 0, None)
    np.testing.assert_array_equal(w_of(state.models), [10, 2, 60])


def test_the_server_steps_beyond_the_mean_but_takes_its_statistics():
    old = {"params": {"w": jnp.array(1.0)}, "batch_stats": {"var": jnp.array(5.0)}}
    mean = {"params": {"w": jnp.array(3.0)}, "batch_stats": {"var": jnp.array(2.0)}}
    new = parts.step_towards(old, mean, 1.5)
    assert (float(new["params"]["w"]), float(new["batch_stats"]["var"])) == (4.0, 2.0)


@pytest.mark.parametrize("sizes, share", [((4, 1, 2), 3 / 6), ((4, 0, 2), 2 / 6), ((0, 0, 0), 0.0)])
def test_late_clients_do_not_count_as_participants(sizes, share):
    problem: Any = SimpleNamespace(cohort_size=3, num_clients=6, num_present=6)
    taken = parts.participation(problem, Cohort(jnp.arange(3), jnp.array(sizes)))
    np.testing.assert_allclose(taken, share, rtol=1e-6)


def test_uploads_weigh_one_unless_they_have_a_freshness():
    cohort = Cohort(jnp.array([4, 2]), jnp.array([5, 1]))
    np.testing.assert_array_equal(parts.freshness(cohort), [1, 1])
    np.testing.assert_array_equal(parts.freshness(cohort._replace(freshness=jnp.array([0.5, 0.25]))), [0.5, 0.25])


def test_a_view_reads_and_replaces_one_field():
    view = interface.view("model")
    state = view.set(GlobalModel("old"), "new")
    assert (state, view.get(state), view.stacked) == (GlobalModel("new"), "new", False)


def test_averaging_trains_by_the_given_training_and_keeps_other_fields_of_the_state():
    problem: Any = numbered()
    strategy = averaging(problem, train=lambda received, data, key: ((received, data, key), "metrics"))
    assert strategy.client_update({"model": "w"}, "kept", "data", 0, "key") == (
        {"model": ("w", "data", "key")},
        "kept",
        "metrics",
    )


@pytest.mark.parametrize("weights, mean", [("samples", 3.0), ("uniform", 2.0)])
def test_averaging_weights_models_by_samples_or_equally_and_deploys_the_mean(weights, mean):
    problem: Any = numbered()
    strategy = averaging(problem, weights=weights)
    uploads = {"model": {"params": {"w": jnp.array([0.0, 4.0])}}}
    cohort = Cohort(jnp.array([2, 0]), jnp.array([1, 3]))
    state, info = strategy.server_update(GlobalModel({"params": {"w": jnp.array(9.0)}}), uploads, cohort, 0, None)
    assert float(w_of(strategy.global_model(state))) == mean and info == {}
    np.testing.assert_array_equal(w_of(strategy.dispatch(state, cohort, None)["model"]), [mean, mean])


def test_the_models_of_each_network_are_counted_with_its_bytes():
    model = SimpleNamespace(
        num_bytes=lambda: np.array([100, 7]), architecture=lambda models: models["architecture"].astype(jnp.int32)
    )
    problem: Any = SimpleNamespace(model=model)
    sent = parts.models_sent(problem, {"architecture": jnp.array([1, 0, 1])})
    assert [(int(each.count), each.size) for each in sent] == [(1, 100), (2, 7)]


def test_validation_samples_are_counted_or_zero():
    problem: Any = SimpleNamespace(sizes=jnp.array([3, 4]), validation_sizes=None)
    assert parts.kept_for_validation(problem).tolist() == [0, 0]
    problem.validation_sizes = jnp.array([1, 2])
    assert parts.kept_for_validation(problem).tolist() == [1, 2]


def test_before_its_first_training_a_client_has_a_model_of_zeros_that_counts_as_untrained():
    problem: Any = SimpleNamespace(model=SimpleNamespace(shapes=lambda: {"params": jnp.ones(2)}))
    memory = parts.untrained(problem)
    assert memory.model["params"].tolist() == [0, 0] and not memory.trained


@pytest.mark.parametrize(
    "when, training, upload, exchanges", [("before_upload", 0, 1, 2), ("before_training", 1, 0, 2), ("both", 1, 1, 4)]
)
def test_an_exchange_happens_when_it_says_and_counts_each_layer_as_sent_and_received(when, training, upload, exchanges):
    exchange = interface.LayerExchange(lambda payloads, key: (payloads, {}), when, share=0.25, repetitions=2)
    assert (exchange.before_training, exchange.before_upload) == (training, upload)
    parcels = exchange.parcels({"params": {"w": jnp.zeros((3, 10))}})
    assert (int(parcels.count), parcels.size) == (1, 2 * exchanges * 0.25 * 120)


def test_a_round_sends_one_parcel_a_client_each_way():
    down, up = {"model": jnp.zeros((3, 5)), "control": jnp.zeros((3, 2))}, {"model": jnp.zeros((3, 5))}
    traffic = usual_traffic(down, up)
    assert [(int(each.count), each.size) for each in (*traffic.down, *traffic.up)] == [(3, 28), (3, 20)]
    assert traffic.num_bytes() == (84, 60, 0) and usual_traffic({}, up).down == ()


OF_ONE_MODEL = [
    *("fedavg", "fedexp", "clusamp", "fedprox", "scaffold", "moon", "fedgen", "feddyn", "feddc", "fedntd", "fedlc"),
    *("fedasam", "fedsam", "mofedsam", "fedgamma", "fedspeed", "fedsmoo", "fedswa", "fedmoswa"),
    *("fedasync", "fedbuff", "fedsa", "centralized", "fedsubavg"),
]


@pytest.mark.parametrize("name", OF_ONE_MODEL)
def test_a_client_trains_the_received_model_on_its_samples_with_its_key_and_uploads_the_result(tiny, monkeypatch, name):
    """The training adds 1 to all numbers, and the received model consists of threes."""
    calls = []

    def run(local_step, setting, start, data, key):
        calls.append((start, data, key))
        one, trained = jnp.int32(1), jax.tree.map(lambda leaf: leaf + 1, start)
        return trained, local.Metrics(jnp.float32(0), one, one, one - 2)

    monkeypatch.setattr(local, "run", run)
    row = STRATEGIES[name]
    strategy = row.build(default_hyper(name), tiny.problem(width=2))
    filled = lambda tree, number: jax.tree.map(lambda leaf: jnp.full(leaf.shape, number, leaf.dtype), tree)
    payload = jax.eval_shape(
        lambda key: strategy.dispatch(strategy.init(key), Cohort(jnp.arange(2), jnp.ones(2)), key), jax.random.key(0)
    )
    payload = filled(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), payload), 3)
    memory = strategy.init_memory and filled(jax.eval_shape(strategy.init_memory, jax.random.key(0), jnp.int32(0)), 0)
    own, key = tiny.client(client_id=1), jax.random.key(7)
    upload, _, _ = strategy.client_update(payload, memory, own, jnp.int32(1), key)
    ((start, data, used),) = calls
    numbers = lambda tree: {float(number) for leaf in jax.tree.leaves(tree) for number in np.ravel(leaf)}
    assert numbers(start[0] if name == "fedsmoo" else start) == {3}
    assert numbers(upload["trained" if name == "centralized" else "model"]) == {4}
    np.testing.assert_array_equal(jax.random.key_data(used), jax.random.key_data(key))
    assert data.samples is own.samples and int(data.client_id) == 1
