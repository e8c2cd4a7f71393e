"""FedSubAvg by hand: rows of embeddings move as their clients move them, all else as in FedAvg."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.client import local
from fedjax_mr.strategies import Cohort, fedavg, fedsubavg
from fedjax_mr.strategies.fedsubavg import Hyper, State

CLIENTS, FILMS = 4, 6
SEEN = [[0, 1], [0, 2], [0, 1, 3], [0]]  # by client; nobody has seen film 4, and -1 is a film without a number


@pytest.fixture(scope="module")
def simulator():
    """Four clients, who rate films, with a network of two embeddings."""
    rng = np.random.default_rng(0)
    rows = [(client, film) for client, films in enumerate(SEEN) for film in [*films, -1] for _ in range(2 + client)]
    x, owner = np.array(rows, np.float32), np.array([client for client, _ in rows])
    y = rng.normal(size=len(x)).astype(np.float32)
    dataset = fmr.from_arrays(
        x, y, task="regression", client=owner, x_test=x, y_test=y, categories=(CLIENTS, FILMS), name="ratings"
    )
    federated = fmr.data.federate(dataset, partition="natural", num_clients=0)

    def make(hyper, cohort=CLIENTS):
        setting = local.setting(lr=0.1, epochs=2, batch_size=4)
        strategy = "fedsubavg" if hyper else "fedavg"
        return fmr.Simulator(
            strategy, "mlp_table", federated, cohort=cohort, local=setting, hyper=hyper, layout=fmr.Layout(devices=1)
        )

    return make


def row_of(model, film):
    return np.asarray(model["params"]["columns"]["column1"]["embedding"])[film]


@pytest.mark.parametrize("heat", ["seen", "round"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_with_all_clients_a_row_moves_by_the_mean_change_of_those_that_have_it(simulator, heat, weights):
    """N / n_m times the mean over all N clients, as in the paper."""
    one = simulator(Hyper(heat, weights))
    problem, strategy = one.problem, fedsubavg.build(Hyper(heat, weights), one.problem)
    state = jax.jit(strategy.init)(jax.random.key(0))
    rng, models = np.random.default_rng(1), []
    for films in SEEN:
        change = lambda leaf: leaf + rng.normal(size=leaf.shape).astype(np.float32)
        model = jax.tree.map(change, state.model)
        old, table = np.asarray(state.model["params"]["columns"]["column1"]["embedding"]), np.zeros(0)
        table = np.where(np.isin(np.arange(FILMS), films)[:, None], change(old), old)
        model["params"]["columns"]["column1"]["embedding"] = table
        models.append(model)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    cohort = Cohort(jnp.arange(CLIENTS), problem.sizes)
    shares = np.asarray(problem.sizes, np.float64) if weights == "samples" else np.ones(CLIENTS)
    new, _ = jax.jit(strategy.server_update)(state, {"model": stacked}, cohort, jnp.asarray(0), jax.random.key(0))
    for film in range(FILMS):
        having = [client for client, films in enumerate(SEEN) if film in films]
        rows = [row_of(models[client], film) for client in having] or [row_of(state.model, film)]
        expected = np.average(rows, axis=0, weights=shares[having] if having else None)
        np.testing.assert_allclose(row_of(new.model, film), expected, rtol=1e-4, atol=1e-5)
    for layer in ("hidden1", "classifier"):  # the others as in FedAvg
        for (path, found), each in zip(
            jax.tree_util.tree_leaves_with_path(new.model["params"][layer]),
            jax.tree.leaves(stacked["params"][layer]),
            strict=True,
        ):
            np.testing.assert_allclose(
                found, np.average(each, axis=0, weights=shares), rtol=1e-4, atol=1e-5, err_msg=path
            )


@pytest.mark.parametrize(("heat", "moved"), [("seen", 0.5 / (3 / 8)), ("round", 0.5 / (2 / 4))])
def test_a_row_is_as_hot_as_its_uploads_of_all_rounds_or_of_this_one(simulator, heat, moved):
    """Film 3: one of four uploads in the rounds before, and now two of four, which change one number of its row."""
    strategy = fedsubavg.build(Hyper(heat, "uniform"), simulator(Hyper(heat, "uniform")).problem)
    name = "columns/column1/embedding"
    state = jax.device_get(jax.jit(strategy.init)(jax.random.key(0)))
    state = state._replace(heat=state.heat | {name: np.float32(np.arange(FILMS) == 3)}, uploads=np.float32(4))
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * CLIENTS), state.model)
    stacked["params"]["columns"]["column1"]["embedding"][:2, 3, 0] += 1
    cohort = Cohort(np.arange(CLIENTS), np.full(CLIENTS, 5))
    new, _ = jax.jit(strategy.server_update)(state, {"model": stacked}, cohort, jnp.asarray(0), None)
    change = row_of(new.model, slice(None)) - row_of(state.model, slice(None))
    assert change[3, 0] == pytest.approx(moved, rel=1e-4)
    change[3, 0] = 0
    np.testing.assert_allclose(change, 0, atol=1e-6)


def test_the_heat_approaches_the_clients_that_have_a_feature(simulator):
    """In training: with one client per round, n_m / N is the share of the rounds so far that changed a row."""
    one = simulator(Hyper(weights="uniform"), cohort=1)
    progress = one.init()
    seen = np.zeros(FILMS)
    for number in range(1, 13):
        progress, _ = one.run(progress, 1)
        heat = np.array(progress.server.heat["columns/column1/embedding"])
        assert set(heat - seen) <= {0.0, 1.0} and np.flatnonzero(heat - seen).tolist() in SEEN
        seen = heat
        assert float(progress.server.uploads) == number
    assert seen[0] == 12 and seen[4] == seen[5] == 0


def test_the_server_without_embeddings_is_that_of_fedavg(federation, close, sent_after):
    problem = federation("normed").problem
    ours, average = fedsubavg.build(Hyper(), problem), fedavg.build(fedavg.Hyper(), problem)
    close(sent_after(ours, problem), sent_after(average, problem))
    state = jax.eval_shape(ours.init, jax.random.key(0))
    assert isinstance(state, State) and state.heat == {}


@pytest.mark.slow  # quick: the server
def test_without_embeddings_it_is_fedavg(engine, close):
    ours, average = engine("fedsubavg", "thin"), engine("fedavg", "thin")
    close(ours.run(ours.init(), 2)[0].server.model, average.run(average.init(), 2)[0].server.model)
    assert isinstance(ours.init().server, State) and ours.init().server.heat == {}


@pytest.mark.slow  # quick: the mean of changes by hand, and the rows that a training changes
def test_rare_rows_move_further_than_in_fedavg(simulator):
    """Film 3 belongs to one client of four: FedAvg moves it by a share of what FedSubAvg moves it."""
    moved = {}
    for name, hyper in (("ours", Hyper()), ("fedavg", None)):
        one = simulator(hyper)
        start = jax.device_get(one.init())
        end, _ = one.run(start, 1)
        changes = (row_of(end.server.model, film) - row_of(start.server.model, film) for film in (0, 3))
        moved[name] = [np.linalg.norm(change) for change in changes]
    sizes = [len(films) + 1 for films in SEEN]
    share = sizes[2] * 4 / sum(count * (2 + client) for client, count in enumerate(sizes))
    assert moved["ours"][0] == pytest.approx(moved["fedavg"][0], rel=1e-4)  # everybody has film 0
    assert moved["ours"][1] == pytest.approx(moved["fedavg"][1] / share, rel=1e-3)
