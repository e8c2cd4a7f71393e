"""Attacks: who attacks, what attackers send and train on, and the test of a backdoor."""

import dataclasses
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.channel import Context, channel
from fedjax_mr.channel.attacks import KINDS, attack, attackers_of, largest_deviation
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples, backdoored, gather, one_client
from fedjax_mr.data import Dataset, FederatedData, Split
from fedjax_mr.engine.evaluation import backdoor_test
from fedjax_mr.engine.layout import Layout
from fedjax_mr.errors import UserError
from fedjax_mr.models import Model
from fedjax_mr.settings import field
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.parts import averaging
from fedjax_mr.testing.federations import Linear, SharingSimulator, constants, simulator

CLIENTS, COUNT, SEED = 6, 5, 3
SERVED = [2, 0, 5, 3, 1]  # the clients of a round


# --- Who attacks ------------------------------------------------------------------------------------------------------


def bad_ones(count, share, seed=SEED):
    """Which of the clients are attackers [count] bool, by a program for each ``count``."""
    return np.asarray(drawn(count, np.float32(share), np.int32(seed)))


drawn = jax.jit(attackers_of, static_argnums=0)


def test_the_share_decides_how_many_clients_attack():
    for share, count in [(0.0, 0), (0.2, 2), (0.25, 2), (0.29, 3), (0.5, 5), (1.0, 10)]:
        assert bad_ones(10, share).sum() == count
    assert bad_ones(100, 0.29).sum() == 29


def test_more_attackers_include_the_fewer_and_another_seed_draws_others():
    few, many = (bad_ones(100, share) for share in (0.2, 0.6))
    assert np.all(many[few])
    assert np.any(bad_ones(100, 0.2, SEED + 1) != few)
    known = jax.jit(lambda: attackers_of(100, 0.2, SEED))  # numbers that are not traced
    np.testing.assert_array_equal(known(), few)


# --- What attackers send ----------------------------------------------------------------------------------------------


def rows(seed):
    rng = np.random.default_rng(seed)
    return {
        "model": {"kernel": rng.normal(size=(COUNT, 2, 3)).astype(np.float32)},
        "control": rng.normal(size=(COUNT, 4)).astype(np.float32),
    }


VALUES, REFERENCE = rows(0), rows(1)


def through(kind, *, attackers=0.4, values=VALUES, reference=REFERENCE, scale=None, clients=SERVED):
    """(the values after the attack, which of the clients attack, info) in one round with five of six clients."""
    result, info = server_of(kind, scale)(np.float32(attackers), np.int32(SEED), np.int32(clients), values, reference)
    return jax.device_get(result), bad_ones(CLIENTS, attackers)[clients], info


@functools.cache
def server_of(kind, scale):
    """The compiled side of the server."""
    problem = constants().problem

    @jax.jit
    def server(attackers, seed, clients, values, reference):
        link = attack(problem, kind, attackers=attackers, seed=seed, scale=scale)
        return link.server(None, values, reference, Context(jax.random.key(7), jnp.int32(0), clients))[1:]

    return server


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).reshape(COUNT, -1) for leaf in jax.tree.leaves(tree)], axis=1)


def expected_change(kind, changes, honest, clients):
    """The attackers' changes, written down a second time; None where they are random."""
    mean, count, bad = changes[honest].mean(axis=0), len(changes), (~honest).sum()
    if kind == "alie":
        z = statistics.NormalDist().inv_cdf(2 / 3)  # h = 1 of 3 honest clients makes a majority of 5
        return np.tile(mean + z * changes[honest].std(axis=0, ddof=1), (count, 1))
    smallest = np.flatnonzero(honest)[np.argmin(np.asarray(clients)[honest])]
    return {
        "sign_flip": -changes,
        "ipm": np.tile(-2 * mean, (count, 1)),
        "mimic": np.tile(changes[smallest], (count, 1)),
        "replacement": changes * count / bad,
    }.get(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_attackers_send_the_definition_and_others_keep_their_bits(kind):
    result, attacker, info = through(kind)
    values, reference = flat(VALUES), flat(REFERENCE)
    assert info["attackers"] == attacker.sum() == 2
    np.testing.assert_array_equal(flat(result)[~attacker], values[~attacker])
    if kind == "label_flip":
        np.testing.assert_array_equal(flat(result), values)
    elif kind == "gaussian":
        noise = (flat(result) - reference)[attacker]
        assert 0.5 < noise.std() < 1.5 and np.abs(noise[0] - noise[1]).max() > 0.1
    else:
        changes = expected_change(kind, values - reference, ~attacker, SERVED)
        np.testing.assert_allclose((flat(result) - reference)[attacker], changes[attacker], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_without_attackers_every_bit_stays(kind):
    result, _, info = through(kind, attackers=0.0)
    jax.tree.map(np.testing.assert_array_equal, result, VALUES)
    assert info["attackers"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_without_honest_clients_the_messages_are_defined(kind):
    result, attacker, _ = through(kind, attackers=1.0)
    assert attacker.all() and np.isfinite(flat(result)).all()
    if kind in ("ipm", "alie", "mimic"):
        np.testing.assert_array_equal(flat(result), flat(REFERENCE))


def test_noise_of_attackers_differs_between_tensors():
    """Of the same shape: a key of its own for each."""
    twice = {"a": np.zeros((COUNT, 6), np.float32), "b": np.zeros((COUNT, 6), np.float32)}
    result, attacker, _ = through("gaussian", values=twice, reference=twice)
    assert not np.array_equal(result["a"][attacker], result["b"][attacker])


def test_inner_product_manipulation_shrinks_the_mean():
    """With e = 1, f of n attackers: by (n - 2f) / n."""
    result, attacker, _ = through("ipm", scale=1.0)
    changes, result = flat(VALUES) - flat(REFERENCE), flat(result) - flat(REFERENCE)
    expected = changes[~attacker].mean(axis=0) * (COUNT - 2 * attacker.sum()) / COUNT
    np.testing.assert_allclose(result.mean(axis=0), expected, atol=1e-6)


def test_a_model_among_idle_clients_replaces_the_mean():
    share = 1 / CLIENTS
    attacker = bad_ones(CLIENTS, share)[SERVED]
    assert attacker.sum() == 1, "the attacker takes part in this round"
    same = jax.tree.map(lambda leaf: np.repeat(leaf[:1], COUNT, axis=0), REFERENCE)
    pick = lambda new, old: np.where(attacker.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
    result, _, _ = through("replacement", attackers=share, values=jax.tree.map(pick, VALUES, same), reference=same)
    np.testing.assert_allclose(flat(result).mean(axis=0), flat(VALUES)[attacker][0], rtol=1e-5, atol=1e-5)


def test_a_little_is_enough_has_the_published_deviations():
    counts = (1, 2, 10, 25, 50)
    deviations = jax.jit(lambda: [largest_deviation(n, jnp.arange(n + 1)) for n in counts])()
    of = dict(zip(counts, map(np.asarray, deviations), strict=True))
    np.testing.assert_allclose([of[25][5], of[50][10], of[10][2]], [0.2533471, 0.2533471, 0], atol=1e-6)
    assert all(np.isfinite(of[n]).all() for n in counts)


# --- What attackers train on ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """(attackers, kind) -> the model that client 1 uploads in a round; with kind "by hand", on flipped labels."""
    run = constants("linear", cohort=COUNT)
    plain = averaging(run.problem)
    payload = jax.device_get({"model": jax.jit(run.problem.model.init)(jax.random.key(0))})

    @functools.partial(jax.jit, static_argnums=1)
    def train(attackers, kind):
        data = run.client(1)
        strategy = plain
        if kind == "by hand":
            data = data._replace(samples=data.samples._replace(y=2 - jnp.asarray(data.samples.y)))
        else:
            strategy = channel(plain, run.problem, [attack(run.problem, kind, attackers=attackers, seed=SEED)])
        return strategy.client_update(payload, None, data, jnp.int32(0), jax.random.key(1))[0]

    return lambda attackers, kind: jax.device_get(train(np.float32(attackers), kind))


def test_label_flipping_trains_on_flipped_labels(trained, equal, close):
    flipped, honest = trained(1.0, "label_flip"), trained(0.0, "label_flip")
    close(flipped, trained(1.0, "by hand"))
    equal(honest, trained(0.0, "sign_flip"))
    assert not np.allclose(*(each["model"]["params"]["classifier"]["dense"]["bias"] for each in (flipped, honest)))


@pytest.fixture(scope="module")
def poisoned_samples():
    """(data, attackers, poisoned) -> the samples on which the client trains, with target 2."""
    problem = constants().problem

    @jax.jit
    def samples(data, attackers, poisoned):
        numbers = {"attackers": attackers, "poisoned": poisoned}
        link = attack(problem, "replacement", seed=SEED, target=2, **numbers)
        return link.data(data, Context(None, jnp.int32(0), data.client_id)).samples

    return lambda data, *shares: jax.device_get(samples(data, *map(np.float32, shares)))


def data_of(client):
    """The data of a client, on the host."""
    return jax.device_get(reader(client))


reader = jax.jit(lambda client: constants().client(client))


@pytest.mark.parametrize("poisoned", [0.5, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0, 1.0))])
def test_attackers_draw_triggers_on_a_share_of_their_samples(poisoned_samples, poisoned):
    attacker = bad_ones(CLIENTS, 0.5)
    for client in range(CLIENTS):
        data = data_of(client)
        own = data.index[data.offset : data.offset + data.size]
        samples = poisoned_samples(data, 0.5, poisoned)
        triggered = np.flatnonzero(samples.trigger.rows)
        assert np.all(np.isin(triggered, own))
        assert len(triggered) == (round(poisoned * len(own)) if attacker[client] else 0)
        others = np.setdiff1d(np.arange(len(samples.y)), triggered)
        assert np.all(samples.y[triggered] == 2)
        np.testing.assert_array_equal(samples.y[others], data.samples.y[others])
        np.testing.assert_array_equal(samples.x, data.samples.x)


def test_the_chosen_samples_do_not_depend_on_where_samples_are_kept(poisoned_samples):
    (client,) = np.flatnonzero(bad_ones(CLIENTS, 1 / CLIENTS))
    data = data_of(client)
    own = data.index[data.offset : data.offset + data.size]
    sent = data.samples._replace(x=data.samples.x[own], y=data.samples.y[own])  # as from host memory
    alone = one_client(sent, client_id=int(client))
    here, there = (poisoned_samples(each, 1 / CLIENTS, 0.5).trigger.rows for each in (data, alone))
    np.testing.assert_array_equal(np.asarray(here)[own], there)
    assert 0 < np.sum(there) < len(own)


def test_attackers_choose_their_samples_independently(poisoned_samples):
    """Two attackers with the same eight samples and another number."""
    samples = Samples(np.zeros((8, 4, 4, 1), np.float32), np.zeros(8, np.int32), np.ones(1), np.zeros(1))
    chosen = [poisoned_samples(one_client(samples, client_id=each), 1.0, 0.5).trigger.rows for each in (0, 1)]
    assert not np.array_equal(*chosen)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("in_rows", [False, True])
def test_the_trigger_is_a_white_square_in_the_corner(dtype, in_rows):
    x = np.random.default_rng(0).integers(0, 2, (4, 16, 20, 3)).astype(dtype)
    scale, shift = np.full(3, 0.5, np.float32), np.full(3, 0.25, np.float32)
    samples = Samples(x, np.arange(4, dtype=np.int32), scale, shift)
    samples = backdoored(samples.in_rows() if in_rows else samples, np.array([True, False, False, True]), 7)
    mirrored = jax.jit(functools.partial(gather, change=lambda images: images[:, ::-1]))
    seen = mirrored(samples, np.array([3, 1]))
    plain = x[[3, 1]][:, ::-1].astype(np.float32)
    plain[0, -2:, -2:] = 255 if dtype == np.uint8 else 1  # an augmentation does not move it
    np.testing.assert_array_equal(seen, plain * 0.5 + 0.25)
    np.testing.assert_array_equal(samples.y, [7, 1, 2, 7])


# --- The test of a backdoor -------------------------------------------------------------------------------------------


def dark(count, rng):
    """Images of 8 x 8 pixels in 0..1, whose class is the bright third of their upper half; the corner is dark."""
    y = rng.integers(0, 3, count).astype(np.int32)
    x = rng.uniform(0, 0.2, (count, 8, 8, 1)).astype(np.float32)
    for label, columns in enumerate((slice(0, 2), slice(3, 5), slice(6, 8))):
        x[y == label, :4, columns] += 0.4
    return x, y


@functools.cache
def dark_federation():
    rng = np.random.default_rng(0)
    (x, y), (test_x, test_y) = dark(160, rng), dark(61, rng)
    split = Split.of(np.split(rng.permutation(160), 8))
    return FederatedData(Dataset("dark", x, y, test_x, test_y, 3), split)


@dataclasses.dataclass(frozen=True)
class Attack:
    attackers: float = field(0.0, "share of attackers")


def with_backdoor(hyper, problem):
    link = attack(problem, "replacement", attackers=hyper.attackers, seed=0, target=1)
    return channel(averaging(problem), problem, [link])


def test_the_test_of_a_backdoor_has_the_trigger_on_all_other_images():
    samples = Samples(*dark(10, np.random.default_rng(1)), np.ones(1, np.float32), np.zeros(1, np.float32))
    triggered, counted = backdoor_test(samples, 1)
    np.testing.assert_array_equal(counted, samples.y != 1)
    assert np.all(triggered.y == 1) and triggered.x is samples.x
    seen = np.asarray(jax.jit(gather)(triggered, np.arange(10)))
    assert np.all(seen[:, -1, -1] == 1) and np.all(samples.x[:, -1, -1] < 0.5)
    with pytest.raises(UserError, match="every test sample has label 1"):
        backdoor_test(triggered, 1)
    tokens = samples._replace(x=np.zeros((10, 5), np.int32))
    with pytest.raises(UserError, match="only images"):
        backdoor_test(tokens, 1)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_backdoor_is_found_in_the_deployed_model(devices):
    model = Model(Linear(num_classes=3), (8, 8, 1), name="linear")
    setting = local.setting(lr=0.5, epochs=3, batch_size=10)

    def trained(attackers):
        simulation = SharingSimulator(
            with_backdoor,
            model,
            dark_federation(),
            cohort=8,
            local=setting,
            hyper=Attack(attackers),
            layout=Layout(devices=devices, lanes=1),
        )
        state, report = simulation.run(simulation.init(), 6)
        return simulation, state, report

    (clean, clean_state, _), (bad, bad_state, report) = trained(0.0), trained(0.25)
    assert report.info["attackers"] == 2
    assert clean.test(clean_state).accuracy > 0.9 and clean.attacked(clean_state, 1).accuracy < 0.2
    assert bad.attacked(bad_state, 1).accuracy > 0.8

    images, labels = dark_federation().dataset.test_x.copy(), dark_federation().dataset.test_y
    images[:, -1:, -1:] = 1
    logits = np.asarray(jax.jit(bad.model.apply)(bad.deployed(bad_state), images[labels != 1]))
    expected = (np.argmax(logits, axis=1) == 1).mean()
    assert bad.attacked(bad_state, 1).accuracy == pytest.approx(expected)
    assert bad.backdoor_evaluation(1) is bad.backdoor_evaluation(1)


# --- In rounds, and refusals ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrapped:
    strategy: str
    kind: str
    attackers: float = field(0.0, "share of attackers")


def wrapped(hyper, problem):
    row = STRATEGIES[hyper.strategy]
    inner = row.build(row.hyper() if row.hyper else None, problem)
    return channel(inner, problem, [attack(problem, hyper.kind, attackers=hyper.attackers, seed=SEED)])


def after(strategy, kind, attackers, rounds=2):
    hyper = Wrapped(strategy, kind, attackers)
    simulation = simulator((wrapped, hyper), "linear", cohort=COUNT, devices=1, lanes=1)
    return simulation.run(simulation.init(), rounds)


PAIRS = [
    ("fedmr", "replacement"),
    pytest.param("scaffold", "alie", marks=pytest.mark.slow),
    *(
        pytest.param(strategy, kind, marks=pytest.mark.slow)
        for strategy in ("fedavg", "fedmr", "scaffold", "fedme")
        for kind in KINDS
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), PAIRS)
def test_no_attackers_are_the_strategy_itself_bit_for_bit(engine, equal, strategy, kind):
    row = STRATEGIES[strategy]
    plain = engine(strategy, "linear", cohort=COUNT, hyper=row.hyper() if row.hyper else None)
    theirs, _ = plain.run(plain.init(), 2)
    ours, report = after(strategy, kind, 0.0)
    equal(ours.server.inner, theirs.server)
    assert report.info["attackers"] == 0


@pytest.mark.slow
def test_the_same_clients_attack_every_strategy():
    """Both select the same cohorts, so the attackers of each round are as many."""
    counts = [
        [int(after(name, kind, 0.4, rounds)[1].info["attackers"]) for rounds in (1, 2, 3)]
        for name, kind in (("fedmr", "replacement"), ("scaffold", "alie"))
    ]
    assert counts[0] == counts[1] and sum(counts[0]) > 0


def test_bad_arguments_are_refused_in_one_line():
    problem = constants().problem
    for words, arguments in {
        "did you mean 'label_flip'": {"kind": "label_flp"},
        "attackers is a share": {"kind": "ipm", "attackers": 1.5},
        "poisoned is a share": {"kind": "replacement", "poisoned": -0.1},
        "target=3 is no class": {"kind": "replacement", "target": 3},
    }.items():
        with pytest.raises(UserError) as caught:
            attack(problem, **({"attackers": 0.2, "seed": 0} | arguments))
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_replacement_of_text_is_refused():
    problem = constants().problem
    problem = dataclasses.replace(problem, model=dataclasses.replace(problem.model, input_shape=(5,)))
    with pytest.raises(UserError, match="replacement needs images"):
        attack(problem, "replacement", attackers=0.2, seed=0)
    assert attack(problem, "sign_flip", attackers=0.2, seed=0).data is None
