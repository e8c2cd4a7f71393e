"""The privacy link: clipping, noise, adaptive clipping, refusals, and an audit of its guarantee."""

import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
from scipy import stats

from fedjax_mr import trees
from fedjax_mr.channel import accounting, base, channel, links
from fedjax_mr.channel.base import Context
from fedjax_mr.channel.privacy import (
    clip_change,
    draw_secret,
    exponential,
    hides_cohorts,
    multipliers,
    normal,
    poisson,
    privacy,
    refusal,
    secret_key,
    secretly_selected,
    uniform_weights,
)
from fedjax_mr.client.samples import Samples, one_client
from fedjax_mr.engine.round import client_key
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES, Cohort, fedavg, fedcross, fedmr
from fedjax_mr.testing.federations import constants, default_hyper, simulator

QUICK = ("fedavg", "scaffold")
REFUSED = ("local", "hypcluster", "ifca", "pfedhr", "centralized")  # by every channel: nothing to clip against


def inner_strategy(name, problem, hyper=None):
    return STRATEGIES[name].build(default_hyper(name) if hyper is None else hyper, problem)


def norms(tree):
    """The norms of K stacked trees [K]."""
    leaves = [np.asarray(leaf, np.float64).reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(leaves, axis=1), axis=1)


def as_vectors(tree):
    leaves = [np.asarray(leaf, np.float64).reshape(len(leaf), -1) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=1)


@functools.cache
def messages_of(name, network):
    """(clip, noise, round, seed) -> (values that leave the K clients, their reference), in one compiled program."""
    known = constants(network, cohort=4, seed=1)
    known = known._replace(federation=jax.tree.map(jnp.asarray, known.federation))
    problem = known.problem
    count = problem.cohort_size

    @jax.jit
    def messages(clip, noise, round, seed):
        strategy = channel(inner_strategy(name, problem), problem, [privacy(problem, clip=clip, noise=noise)])
        cohort = Cohort(jnp.arange(count, dtype=jnp.int32), problem.sizes[:count])
        key = jax.random.key(0)
        payloads = strategy.dispatch(strategy.init(key), cohort, key)

        def one(payload, client_id):
            memory = None if strategy.init_memory is None else strategy.init_memory(key, client_id)
            own = client_key(jax.random.key(seed), round, client_id, 0)
            return strategy.client_update(payload, memory, known.client(client_id), round, own)[0]

        uploads = jax.vmap(one)(payloads, cohort.ids)
        values, others = base.split(uploads)
        return values, base.received(values, others, payloads)

    return messages


# --- Clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in STRATEGIES
        if name not in REFUSED and not STRATEGIES[name].adapters
    ],
)
def test_the_change_of_an_upload_is_clipped_as_one_vector(equal, name):
    """Control variates and prototypes included; the direction stays, and shorter changes keep their bits."""
    run = messages_of(name, "linear" if name in QUICK else "perceptron")
    whole, reference = run(jnp.float32(np.inf), jnp.float32(0), jnp.int32(0), 0)
    change = as_vectors(jax.tree.map(jnp.subtract, whole, reference))
    lengths = np.linalg.norm(change, axis=1)
    moved = lengths > 0  # with FedLC, a client with a single class learns nothing
    assert np.sum(moved) >= 3
    clip = np.float32(0.5 * np.min(lengths[moved]))
    clipped, _ = run(clip, jnp.float32(0), jnp.int32(0), 0)
    after = as_vectors(jax.tree.map(jnp.subtract, clipped, reference))
    rounding = 1e-6 * np.max(norms(reference), initial=0)
    np.testing.assert_array_less(np.linalg.norm(after, axis=1), clip * (1 + 1e-5) + rounding)
    np.testing.assert_allclose(
        after, change * (clip / np.where(moved, lengths, 1))[:, None], rtol=1e-3, atol=1e-5 * clip + rounding
    )
    equal(run(np.float32(1.01 * np.max(lengths)), jnp.float32(0), jnp.int32(0), 0)[0], whole)


def test_only_longer_changes_are_scaled():
    reference = {"model": {"w": np.full(3, 0.1, np.float32)}, "control": np.zeros(2, np.float32)}
    values = {"model": {"w": np.float32([0.4, 0.1, 0.1])}, "control": np.float32([0.4, 0.0])}  # norm 0.5
    clipped = jax.jit(clip_change)
    same, norm = clipped(values, reference, np.float32(0.51))
    np.testing.assert_allclose(norm, 0.5, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, same, values)
    half, _ = clipped(values, reference, np.float32(0.25))
    np.testing.assert_allclose(half["model"]["w"], [0.25, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(half["control"], [0.2, 0.0], rtol=1e-6)
    three, _ = clipped({"model": np.float32([6, 8])}, {"model": np.zeros(2, np.float32)}, np.float32(5))
    np.testing.assert_allclose(three["model"], [3, 4], rtol=1e-6)


@pytest.mark.parametrize("bound", [1.0, np.inf])
@pytest.mark.parametrize("broken", [np.nan, np.inf, 3e38])
def test_a_change_without_a_finite_norm_is_replaced_by_zero(federation, broken, bound):
    """Otherwise a diverged client would be visible."""
    reference = {"model": np.full(3, 0.1, np.float32)}
    values = {"model": np.float32([0.2, broken, -broken])}
    sent, _ = jax.jit(clip_change)(values, reference, np.float32(bound))
    np.testing.assert_array_equal(sent["model"], reference["model"])
    message, clipped, bit = adaptively_clipped(problem_of(federation).cohort_size, values, reference, np.float32(bound))
    np.testing.assert_array_equal(message["model"], reference["model"])
    assert clipped == 1 and bit == 0


@functools.partial(jax.jit, static_argnums=0)
def adaptively_clipped(cohort, values, reference, bound):
    """The message of a client, whether its change is too long, and its bit, without noise."""
    link = privacy(SimpleNamespace(cohort_size=cohort), clip=9.0, quantile=0.5)
    sent = link.client(values, reference, None, Context(jax.random.key(0), None, None, bound))
    return sent.values, sent.info["clipped"], sent.note


def test_an_infinite_norm_clips_nothing_and_allows_no_noise(federation):
    values = {"model": np.float32([0.2, 3e18])}
    sent, _ = jax.jit(clip_change)(values, {"model": np.zeros(2, np.float32)}, np.float32(np.inf))
    np.testing.assert_array_equal(sent["model"], values["model"])
    with pytest.raises(UserError, match="noise needs a finite clipping norm"):
        privacy(problem_of(federation), clip=np.inf, noise=1.0)


# --- Noise ------------------------------------------------------------------------------------------------------------

LARGE = {"model": {"a": np.zeros((300, 300), np.float32), "b": np.zeros(20_000, np.float32)}}  # 110,000 numbers


def problem_of(federation, cohort=4):
    return federation("linear", cohort=cohort, seed=1).problem


def noise_of(link, keys, note=None):
    """The noise [len(keys), 110,000] that a link adds to a change of zero."""
    client = lambda key: link.client(LARGE, LARGE, None, Context(key, jnp.int32(0), jnp.int32(0), note)).values
    return as_vectors(jax.jit(jax.vmap(client))(keys))


def test_noise_is_gaussian_and_independent(federation):
    """Mean, standard deviation and tail within four standard errors, and no correlation between any two vectors."""
    noise = noise_of(privacy(problem_of(federation), clip=0.5, noise=3.0), jax.random.split(jax.random.key(1), 3))
    count = noise.shape[1]
    assert count > 100_000
    for each in noise:
        assert abs(np.std(each) / 1.5 - 1) < 4 / np.sqrt(2 * count)
        assert abs(np.mean(each) / 1.5) < 4 / np.sqrt(count)
        tail = 2 * stats.norm.sf(2)
        assert abs(np.mean(np.abs(each) > 3.0) - tail) < 4 * np.sqrt(tail / count)
    parts = np.concatenate([noise[:, :20_000], noise[:, -20_000:]])  # of both leaves
    correlations = np.corrcoef(parts) - np.eye(len(parts))
    assert np.max(np.abs(correlations)) < 5 / np.sqrt(20_000)


def test_noise_has_the_distribution_and_the_tails_of_a_normal():
    """The normals of JAX in float32 end at 5.4, and no more than one of 2^23 numbers exceeds 5.2."""
    noise = np.asarray(jax.jit(normal, static_argnums=1)(jax.random.key(4), (60_000,)), np.float64)
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    words = np.array([[0, 0, 2**31, 2**30], [0, 1, 5, 0], [0, 7, 7, 7], [1, 0, 9, 9]], np.uint32)  # four numbers
    drawn = np.asarray(jax.jit(exponential)(words, np.float32([0, 0.5, 0.5, 0])))
    halvings = np.array([128, 64, 1, 2])  # 3 * 32 + 31 + 1; 32 + 31 + 1; none before the first 1; one
    np.testing.assert_allclose(drawn, halvings * np.log(2) - np.log([1, 1.5, 1.5, 1]), rtol=1e-6)
    assert np.sqrt(2 * drawn[0]) > 13.3
    largest = np.nextafter(np.ones(4, np.float32), np.float32(0))
    assert np.all(np.asarray(jax.jit(exponential)(np.full((4, 4), 2**31, np.uint32), largest)) >= 0)


def test_normals_have_the_radius_of_an_exponential_and_a_uniform_angle(monkeypatch):
    """With -log(u) = 50, their length is 10. So no number that JAX itself takes for a normal is behind them."""
    asked = []
    fixed = lambda words, fraction: asked.append(words.shape) or jnp.full(fraction.shape, 50.0)
    monkeypatch.setattr(sys.modules["fedjax_mr.channel.privacy"], "exponential", fixed)
    noise = np.asarray(jax.jit(lambda key: normal(key, (400,)))(jax.random.key(0)))
    assert asked == [(4, 400)]
    assert 9.9 < noise.max() <= 10 and -10 <= noise.min() < -9.9 and abs(np.mean(noise > 0) - 0.5) < 0.1


def test_a_secret_decides_the_noise_and_the_seed_does_not_reveal_it():
    """The key of a round, its secret, or only the second word of the secret: each gives other noise."""

    @jax.jit
    def noise(key, secret):
        zero = {"model": jnp.zeros(40)}
        link = privacy(SimpleNamespace(cohort_size=4), clip=1.0, noise=1.0, secret=secret)
        return link.client(zero, zero, None, Context(jax.random.key(key), 0, 0)).values["model"]

    words = lambda *each: np.asarray(each, np.uint32)
    drawn = [noise(0, words(1, 2)), noise(1, words(1, 2)), noise(0, words(1, 3)), noise(0, words(2, 2))]
    assert np.max(np.abs(np.corrcoef(np.stack(drawn)) - np.eye(4))) < 0.75
    np.testing.assert_array_equal(noise(0, words(1, 2)), drawn[0])
    known = jax.random.key(3)
    assert secret_key(known, None) is known


def test_a_secret_decides_who_is_selected(federation):
    problem = problem_of(federation)
    inner = inner_strategy("fedmr", problem)
    assert inner.select is None
    one, two = np.array([[5, 1], [5, 2]], np.uint32)

    @jax.jit
    def selected(secret, key):
        return secretly_selected(inner, problem, secret).select(None, None, jax.random.key(key)).ids

    ids = lambda secret, key: np.asarray(selected(secret, key)).tolist()
    assert len({str(ids(one, 0)), str(ids(one, 1)), str(ids(two, 0))}) == 3
    assert ids(one, 0) == ids(one, 0) and len(set(ids(one, 0))) == problem.cohort_size
    joined = poisson(inner, problem, 0.4)

    @jax.jit
    def hidden_and_seen(key):
        hidden = secretly_selected(joined, problem, one).select(None, None, key)
        return hidden, joined.select(None, None, secret_key(key, one))

    hidden, seen = hidden_and_seen(jax.random.key(0))
    np.testing.assert_array_equal(hidden.ids, seen.ids)
    np.testing.assert_array_equal(hidden.sizes, seen.sizes)


def test_the_system_draws_a_secret():
    first, second = draw_secret(), draw_secret()
    assert first.shape == (2,) and first.dtype == np.uint32 and not np.array_equal(first, second)


def test_clients_rounds_and_runs_have_different_noise():
    run = messages_of("fedavg", "linear")
    drawn = []
    for round, seed in ((0, 0), (1, 0), (0, 1)):
        noisy, quiet = (run(jnp.float32(1), jnp.float32(each), jnp.int32(round), seed)[0] for each in (2.0, 0.0))
        drawn.append(as_vectors(jax.tree.map(jnp.subtract, noisy, quiet)))
    correlations = np.corrcoef(np.concatenate(drawn)) - np.eye(12)
    assert np.max(np.abs(correlations)) < 0.75  # of 51 numbers: five standard errors
    again = as_vectors(run(jnp.float32(1), jnp.float32(2), jnp.int32(0), 0)[0])
    np.testing.assert_array_equal(again, as_vectors(run(jnp.float32(1), jnp.float32(2), jnp.int32(0), 0)[0]))


@pytest.mark.parametrize("noise_on, power", [("upload", 0.5), ("mean", 1.0)])
def test_noise_of_the_mean_of_the_uploads(federation, noise_on, power):
    """With the same multiplier, the mean of noisy uploads has sqrt(K) times the noise of a trusted server's mean."""
    link = privacy(problem_of(federation), clip=0.5, noise=3.0, noise_on=noise_on)
    mean = np.mean(noise_of(link, jax.random.split(jax.random.key(2), 4)), axis=0)
    assert abs(np.std(mean) / (1.5 / 4**power) - 1) < 4 / np.sqrt(2 * mean.size)


def test_the_mean_of_clipped_changes_is_that_of_optax(federation):
    link = privacy(problem_of(federation), clip=0.7)
    numbers = np.random.default_rng(0).normal(size=(4, 5)) * [[0.01], [0.3], [1], [9]]
    changes, zero = {"model": {"a": np.float32(numbers)}}, {"model": {"a": np.zeros(5, np.float32)}}
    aggregate = optax.contrib.differentially_private_aggregate(l2_norm_clip=0.7, noise_multiplier=0.0, key=0)

    @jax.jit
    def both(changes):
        context = Context(jax.random.key(0), jnp.int32(0), jnp.int32(0))
        ours = jax.vmap(lambda change: link.client(change, zero, None, context).values)(changes)
        return trees.mean(ours), aggregate.update(changes, aggregate.init(zero))[0]

    ours, theirs = both(changes)
    np.testing.assert_allclose(ours["model"]["a"], theirs["model"]["a"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name, quantile", [("fedavg", 0.5), pytest.param("fedmr", None, marks=pytest.mark.slow)])
def test_without_noise_and_clipping_a_run_keeps_its_bits(engine, equal, name, quantile):
    plain = engine(name, "linear", cohort=4, seed=1)
    wrapped = private_engine(name, quantile)
    expected, _ = plain.run(plain.init(), 2)
    result, report = wrapped.run(wrapped.init(), 2)
    equal(result.server.inner, expected.server)
    assert report.info["clipped"] == 0


@functools.cache
def private_engine(name, quantile):
    def build(hyper, problem):
        link = privacy(problem, clip=1e9, quantile=quantile)
        return channel(STRATEGIES[name].build(hyper, problem), problem, [link])

    options = {"devices": 1, "lanes": 1, "seed": 1, "cohort": 4}
    return simulator((build, default_hyper(name)), "linear", **options).rounds


# --- Adaptive clipping ------------------------------------------------------------------------------------------------


def test_change_and_bit_together_cost_what_the_change_alone_would():
    """Andrew et al., Theorem 1; in their example the noise of the change hardly grows."""
    changed, bit = multipliers(100, 0.6162, noise_on="mean")
    np.testing.assert_allclose([changed, bit * 10], [0.6174, 5.0], rtol=1e-4)
    for noise_on, counted in (("mean", np.sqrt(10)), ("upload", 1.0)):
        for noise in (0.1, 1.0, 30.0):
            changed, bit = multipliers(10, noise, noise_on=noise_on)
            np.testing.assert_allclose(changed**-2 + (2 * bit * counted) ** -2, noise**-2, rtol=1e-5)
            assert changed < 1.06 * noise
    assert multipliers(10, 0.0, noise_on="mean") == multipliers(10, 0.0, noise_on="mean", quantile_noise=0.0) == (0, 0)
    with pytest.raises(UserError, match="omit quantile_noise"):
        multipliers(10, 1.0, noise_on="mean", quantile_noise=0.5)


@functools.partial(jax.jit, static_argnums=0)
def clipping_norms(cohort, quantile):
    """The clipping norm after 300 rounds, and in each the norm and the share of changes that it clips."""
    link = privacy(SimpleNamespace(cohort_size=cohort), clip=0.1, quantile=quantile)
    values = {"model": jnp.arange(1.0, 12.0)[:, None]}
    zero = {"model": jnp.zeros(1)}

    def round(bound, key):
        note = link.announce(bound, jnp.int32(0))
        context = lambda note: Context(key, jnp.int32(0), jnp.int32(0), note)
        sent = jax.vmap(lambda value: link.client(value, zero, None, context(note)))(values)
        new, _, info = link.server(bound, sent.values, values, context(sent.note))
        return new, (info["clip_norm"], jnp.mean(sent.info["clipped"]))

    return jax.lax.scan(round, link.init(jax.random.key(0)), jax.random.split(jax.random.key(0), 300))


@pytest.mark.parametrize("quantile, low, high", [(0.5, 5.0, 7.0), (0.2, 2.0, 4.0), (1.0, 11.0, 14.0)])
def test_the_clipping_norm_converges_to_the_quantile_of_the_norms(federation, quantile, low, high):
    """Norms 1 to 11, without noise. For quantile 1 it grows until no change is clipped, and then stays."""
    bound, (bounds, clipped) = jax.device_get(clipping_norms(problem_of(federation).cohort_size, np.float32(quantile)))
    assert bounds[0] == np.float32(0.1) and clipped[0] == 1
    assert low <= np.min(bounds[-20:]) and np.max(bounds[-20:]) <= high
    if quantile == 1:
        assert np.all(np.diff(bounds) >= 0) and bound == bounds[-1] and clipped[-1] == 0


def test_bits_are_noisy_and_the_old_norm_clips(federation):
    """K / 20 = 2 is the noise of the sum of 40 bits; the mean of many bits is the share of short changes."""
    problem = problem_of(federation)
    link = privacy(problem, clip=9.0, noise=0.1, noise_on="mean", quantile=0.5, quantile_noise=2.0)
    keys = jax.random.split(jax.random.key(3), 20_000)
    context = lambda key: Context(key, jnp.int32(0), jnp.int32(0), jnp.float32(2))
    short = {"model": np.ones(1, np.float32)}
    sent = jax.jit(jax.vmap(lambda key: link.client(short, {"model": jnp.zeros(1)}, None, context(key)).note))
    notes = np.asarray(sent(keys))
    assert abs(np.std(notes) / (2.0 / np.sqrt(problem.cohort_size)) - 1) < 4 / np.sqrt(40_000)
    assert abs(np.mean(notes) - 1) < 4 * 1.0 / np.sqrt(20_000)
    server = jax.jit(lambda key, notes: link.server(jnp.float32(2), None, None, Context(key, 0, None, notes)))
    state, _, info = server(jax.random.key(3), np.float32([1.0, 0.0, 0.3]))
    assert info["clip_norm"] == 2
    np.testing.assert_allclose(state, 2 * np.exp(-0.2 * (1.3 / 3 - 0.5)), rtol=1e-6)


def test_a_run_announces_the_norm_and_stores_the_next(federation):
    wrapped = private_engine("fedavg", 0.5)
    result, report = wrapped.run(wrapped.init(), 2)
    np.testing.assert_allclose(report.info["clip_norm"], 1e9 * np.exp(-0.1), rtol=1e-5)
    np.testing.assert_allclose(result.server.links[0], 1e9 * np.exp(-0.2), rtol=1e-5)


# --- Poisson sampling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability, slots", [(0.1, 12), (0.3, 4)])
def test_clients_join_independently_up_to_the_slots(federation, probability, slots):
    problem = federation("linear", sizes=(9, 5, 8, 7, 6, 9, 4, 8, 7, 9, 6, 5), cohort=slots, seed=1).problem
    strategy = poisson(inner_strategy("fedavg", problem), problem, probability)
    select = jax.jit(jax.vmap(lambda key: strategy.select(None, None, key)))
    cohorts = jax.device_get(select(jax.random.split(jax.random.key(0), 20_000)))
    present = cohorts.sizes > 0
    counts = np.bincount(present.sum(axis=1), minlength=13)
    expected = stats.binom.pmf(np.arange(13), 12, probability)
    expected = np.append(expected[:slots], expected[slots:].sum()) if slots < 12 else expected
    assert stats.chisquare(counts[:4], expected[:4] * sum(counts[:4]) / sum(expected[:4])).pvalue > 1e-3
    assert counts[slots + 1 :].sum() == 0
    assert abs(counts[slots] - 20_000 * expected[-1]) < 5 * np.sqrt(20_000 * expected[-1]) + 1
    per_client = np.bincount(cohorts.ids[present], minlength=12)
    assert np.ptp(per_client) < 8 * np.sqrt(per_client.mean())
    np.testing.assert_array_equal(cohorts.sizes[present], np.asarray(problem.sizes)[cohorts.ids[present]])


def rarely(hyper, problem):
    return poisson(fedavg.build(hyper, problem), problem, 1e-6)


def test_a_round_without_clients_changes_nothing_and_sends_nothing():
    simulation = simulator((rarely, fedavg.Hyper(weights="uniform")), network="linear", cohort=4, seed=1, lanes=1)
    start = jax.device_get(simulation.init())
    state, report = simulation.run(simulation.init(), 2)
    jax.tree.map(np.testing.assert_array_equal, state.server, start.server)
    assert report.traffic.num_bytes() == (0, 0, 0) and report.images == 0


def test_a_probability_that_does_not_fit_the_slots_is_refused(federation):
    problem = federation("linear", cohort=4, seed=1).problem
    for probability, words in ((0.0, "must be positive"), (0.9, "pass a larger cohort")):
        with pytest.raises(UserError, match=words):
            poisson(inner_strategy("fedavg", problem), problem, probability)


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, network, noise_on, words",
    [
        ("fedavg", "normed", "upload", "batch_stats (BatchNorm)"),
        ("fedavg", "linear", "upload", "numbers of samples"),
        ("clusamp", "linear", "upload", "selects clients itself"),
        ("fedme", "linear", "upload", "between rounds"),
        ("hypcluster", "linear", "upload", "upload cluster"),
        ("local", "linear", "upload", "nothing that noise could protect"),
        ("fedmr", "linear", "mean", "more than the uniform mean"),
        ("fedmr", "linear", "upload", None),
        ("scaffold", "linear", "mean", None),
        ("feddyn", "linear", "upload", None),  # its server asks whether clients have samples at all
    ],
)
def test_strategies_outside_the_guarantee_are_refused_in_one_line(federation, name, network, noise_on, words):
    problem = federation(network, cohort=4, seed=1).problem
    reason = refusal(inner_strategy(name, problem), problem, noise_on=noise_on)
    if words is None:
        assert reason is None
    else:
        assert words in reason and "\n" not in reason


def test_uniform_weights_make_a_mean_uniform(federation):
    problem = problem_of(federation)
    strategy = inner_strategy("fedprox", problem)
    assert "uniform_weights" in refusal(strategy, problem)
    assert refusal(uniform_weights(strategy), problem, noise_on="mean") is None
    uniform = fedavg.build(fedavg.Hyper(weights="uniform"), problem)
    assert refusal(uniform, problem, noise_on="mean") is None
    uploads = {"model": {"params": {"w": np.float32([[1], [2], [3], [6]])}}}
    cohort = Cohort(np.arange(4, dtype=np.int32), np.asarray(problem.sizes)[:4])

    @jax.jit
    def updated(key):
        return uniform_weights(strategy).server_update(uniform.init(key), uploads, cohort, jnp.int32(0), key)[0]

    state = updated(jax.random.key(0))
    np.testing.assert_allclose(state.model["params"]["w"], [3.0])


@pytest.mark.parametrize(
    "name, hyper", [("fedmr", fedmr.Hyper(stage1_rounds=5)), ("fedcross", fedcross.Hyper(warmup_rounds=5))]
)
def test_a_server_that_uses_the_mean_in_its_first_rounds_only_is_refused(federation, name, hyper):
    problem = problem_of(federation)
    assert "more than the uniform mean" in refusal(inner_strategy(name, problem, hyper), problem, noise_on="mean")


def test_poisson_sampling_needs_a_server_that_does_not_see_who_is_absent(federation):
    """FedAsync keeps its model if the only client is absent, and there is no noise on it then."""
    problem = problem_of(federation)
    strategy = inner_strategy("fedasync", problem)
    assert hides_cohorts(strategy, problem) and not hides_cohorts(strategy, problem, sampling="poisson")
    uniform = inner_strategy("fedavg", problem, fedavg.Hyper(weights="uniform"))
    assert hides_cohorts(uniform, problem, sampling="poisson")


def test_label_counts_are_found_in_the_problem(federation):
    """FedGen's server reads them; equal sizes do not help."""
    problem = problem_of(federation)
    assert "label counts" in refusal(uniform_weights(inner_strategy("fedgen", problem)), problem)


@pytest.mark.parametrize("name, hidden", [("fedmr", True), ("scaffold", False), ("fedmerge", False)])
def test_cohorts_are_hidden_without_memory_and_client_ids(federation, name, hidden):
    problem = problem_of(federation)
    assert hides_cohorts(inner_strategy(name, problem), problem) == hidden


@pytest.mark.parametrize("kind", ["int8", "qsgd", "sign", "topk", "randk"])
@pytest.mark.parametrize("name", ["fedmr", "fedcross", "fedavg"])
def test_compression_hides_cohorts_as_well(federation, name, kind):
    problem = problem_of(federation)
    both = [privacy(problem, clip=1.0, noise=1.0), links.compression(problem, kind=kind, ratio=0.5)]
    assert hides_cohorts(channel(inner_strategy(name, problem), problem, both), problem)


@pytest.mark.parametrize("name", ["fedmr", "fedavg"])
def test_error_feedback_reveals_cohorts(federation, name):
    """A client's memory shows whether it took part before."""
    problem = problem_of(federation)
    inner = inner_strategy(name, problem)
    memory = links.compression(problem, kind="topk", ratio=0.5, feedback="ef")
    assert not hides_cohorts(channel(inner, problem, [memory]), problem)


def test_batchnorm_is_refused_by_the_channel(federation):
    problem = federation("normed", cohort=4, seed=1).problem
    with pytest.raises(UserError, match="use GroupNorm"):
        channel(inner_strategy("fedavg", problem), problem, [privacy(problem, clip=1.0)])


@pytest.mark.parametrize(
    "numbers, words",
    [
        ({"clip": 0.0}, "must be positive"),
        ({"noise": -1.0}, "must not be negative"),
        ({"noise_on": "sum"}, "unknown noise_on"),
        ({"quantile": 1.5}, "lies in 0..1"),
        ({"quantile": 0.5, "quantile_noise": 0.1, "noise": 1.0}, "omit quantile_noise"),
    ],
)
def test_numbers_out_of_range(federation, numbers, words):
    with pytest.raises(UserError, match=words):
        privacy(problem_of(federation), **{"clip": 1.0, **numbers})


# --- Audit ------------------------------------------------------------------------------------------------------------

CLAIMED_NOISE, CANARY_CLIP = 4.0, 0.05


def lowest_epsilon(first, second, delta):
    """A lower bound of epsilon at 95 percent: P(first) <= e^epsilon P(second) + delta for every event.

    The event is a threshold that is chosen on one half. On the other half, Clopper-Pearson bounds both probabilities.
    """
    half = len(first) // 2

    def bound(first, second, threshold):
        hits, false, count = np.sum(first > threshold), np.sum(second > threshold), len(first)
        lowest = stats.beta.ppf(0.025, hits, count - hits + 1) if hits else 0.0
        highest = stats.beta.ppf(0.975, false + 1, count - false) if false < count else 1.0
        return np.log(max(lowest - delta, 1e-9) / highest)

    thresholds = np.quantile(np.concatenate([first[:half], second[:half]]), np.linspace(0.01, 0.99, 99))
    best = max(thresholds, key=lambda threshold: bound(first[:half], second[:half], threshold))
    return bound(first[half:], second[half:], best)


def test_an_audit_stays_below_the_claimed_epsilon(federation):
    """One client's data are replaced: all its labels change. The attacker knows everything but its noise.

    Of 1,000 uploads per case, the projection onto the difference of the two noiseless uploads is the best statistic.
    """
    problem = problem_of(federation)
    x = np.repeat(np.float32([1, 2]), 4)[:, None, None, None] * np.ones((4, 4, 1), np.float32)

    @jax.jit
    def uploads(label, noise, keys):
        link = privacy(problem, clip=CANARY_CLIP, noise=noise)
        strategy = channel(inner_strategy("fedmr", problem), problem, [link])
        key = jax.random.key(0)
        cohort = Cohort(jnp.arange(4, dtype=jnp.int32), problem.sizes[:4])
        payload = trees.take(strategy.dispatch(strategy.init(key), cohort, key), jnp.int32(0))
        data = one_client(Samples(jnp.asarray(x), jnp.full(8, label, jnp.int32), jnp.ones(1), jnp.zeros(1)))

        def one(key):
            message = strategy.client_update(payload, None, data, jnp.int32(0), key)[0]
            return jax.tree.map(jnp.subtract, message["model"]["params"], payload["model"]["params"])

        return jax.vmap(one)(keys)

    def audit(noise):
        keys = jax.random.split(jax.random.key(5), 2000)
        quiet = [np.mean(as_vectors(uploads(label, np.float32(0), keys[:1000])), axis=0) for label in (0, 2)]
        direction = quiet[0] - quiet[1]
        assert np.linalg.norm(direction) > 1.5 * CANARY_CLIP  # of at most 2
        first, second = (
            as_vectors(uploads(label, np.float32(noise), each)) @ direction
            for label, each in ((0, keys[:1000]), (2, keys[1000:]))
        )
        return lowest_epsilon(first, second, 1e-5)

    claimed = accounting.epsilon(
        1, noise=CLAIMED_NOISE, delta=1e-5, num_clients=6, cohort=4, sampling="public", participations=1
    )
    assert 0 < audit(CLAIMED_NOISE) < claimed
    assert audit(CLAIMED_NOISE / 10) > claimed
    assert audit(0.0) > claimed


@pytest.mark.parametrize("other", ["compression", "robust", "attack"])
def test_noise_on_the_mean_excludes_what_changes_the_uploads_before_it(other):
    """Each upload then has too little noise for itself, and a sign or a median of them is no function of their mean.

    Attackers add no noise, so the mean of K uploads would have that of fewer.
    """
    problem = constants("linear").problem
    strategy = fedavg.build(fedavg.Hyper(weights="uniform"), problem)
    second = {
        "compression": links.compression(problem, "sign"),
        "robust": links.robust(problem, "median", outliers=1, stacked=False),
        "attack": links.attack(problem, "label_flip", attackers=0.2, seed=0),
    }[other]
    for noise_on, allowed in (("upload", True), ("mean", False)):
        both = [links.privacy(problem, clip=1.0, noise=1.0, noise_on=noise_on), second]
        if allowed:
            channel(strategy, problem, both)
        else:
            with pytest.raises(UserError, match="noise_on=upload"):
                channel(strategy, problem, both)
