"""Robust rules against definitions in NumPy and ByzFL, their identities, and the link in rounds."""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import sys
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.channel import Context, channel
from fedjax_mr.channel.attacks import attack
from fedjax_mr.channel.compression import compression
from fedjax_mr.channel.exchange import exchange
from fedjax_mr.channel.robust import (
    BEFORE,
    RULES,
    bucketing,
    centered_clip,
    geometric_median,
    krum_scores,
    nearest_neighbour_mixing,
    neighbourhoods,
    pairwise_squares,
    robust,
)
from fedjax_mr.client import local
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES, dpsgd, graphs
from fedjax_mr.strategies.graphs import graph_of
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import averaging
from fedjax_mr.testing.federations import constants, simulator

COUNT, OUTLIERS = 7, 2


def rows(seed=0, count=COUNT):
    """Rows [count, 11] in float64 that float32 holds exactly."""
    return np.random.default_rng(seed).normal(size=(count, 11)).astype(np.float32).astype(np.float64)


def stacked(flat):
    """The rows [K, 11] as a tree of two leaves."""
    flat = np.asarray(flat, np.float32)
    return {"bias": flat[:, :3], "kernel": flat[:, 3:].reshape(-1, 2, 4)}


def flat(tree):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    if leaves[0].ndim == 1:
        return np.concatenate([leaf.ravel() for leaf in leaves])
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


@jax.jit
def everything(tree):
    """All rules and steps at once, so that they are compiled once."""
    zero_row = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), tree)
    results = {name: rule(tree, OUTLIERS) for name, rule in RULES.items()}
    results["byzfl_geometric_median"] = geometric_median(tree, start=zero_row, smoothing=0.1, steps=3)
    results["byzfl_centered_clip"] = centered_clip(tree, radius=2.0, steps=2)
    results["nnm"] = nearest_neighbour_mixing(tree, OUTLIERS)
    return results


def applied(rule, x):
    return flat(everything(stacked(x))[rule])


# --- The definitions, written down a second time in float64 -----------------------------------------------------------


def squares_of(x):
    return np.array([[np.sum((a - b) ** 2) for b in x] for a in x])


def best_of(x, f=OUTLIERS):
    """The rows in the order of Krum's scores."""
    others = np.sort(squares_of(x), axis=1)[:, 1 : len(x) - f]
    return np.argsort(others.mean(axis=1))


def weiszfeld(x, smoothing, steps, z):
    for _ in range(steps):
        weights = 1 / np.maximum(np.linalg.norm(x - z, axis=1), smoothing)
        z = weights @ x / weights.sum()
    return z


def clipped_steps(x, steps, radius=None):
    v = np.zeros(x.shape[1])
    for _ in range(steps):
        lengths = np.linalg.norm(x - v, axis=1)
        bound = np.median(lengths) if radius is None else radius
        v = v + (np.minimum(1, bound / lengths)[:, None] * (x - v)).mean(axis=0)
    return v


DEFINITIONS = {
    "median": lambda x, f=OUTLIERS: np.median(x, axis=0),
    "trimmed_mean": lambda x, f=OUTLIERS: np.sort(x, axis=0)[f : len(x) - f].mean(axis=0),
    "krum": lambda x, f=OUTLIERS: x[best_of(x, f)[0]],
    "multi_krum": lambda x, f=OUTLIERS: x[best_of(x, f)[: len(x) - f]].mean(axis=0),
    "geometric_median": lambda x, f=OUTLIERS: weiszfeld(x, 1e-6, 8, np.median(x, axis=0)),
    "centered_clip": lambda x, f=OUTLIERS: clipped_steps(x, 3),
    "byzfl_geometric_median": lambda x, f=OUTLIERS: weiszfeld(x, 0.1, 3, np.zeros(x.shape[1])),
    "byzfl_centered_clip": lambda x, f=OUTLIERS: clipped_steps(x, 2, 2.0),
    "nnm": lambda x, f=OUTLIERS: np.array([x[np.argsort(each)[: len(x) - f]].mean(axis=0) for each in squares_of(x)]),
}


@pytest.mark.parametrize("rule", DEFINITIONS)
@pytest.mark.parametrize("seed", range(3))
def test_rules_are_their_definitions(rule, seed):
    np.testing.assert_allclose(applied(rule, rows(seed)), DEFINITIONS[rule](rows(seed)), rtol=1e-6, atol=1e-6)


def test_the_median_of_an_even_number_is_the_midpoint():
    x = rows(1, count=6)
    median = jax.jit(RULES["median"])(stacked(x), OUTLIERS)
    np.testing.assert_allclose(flat(median), np.median(x, axis=0), rtol=1e-6)


@functools.cache
def byzfl():
    """Its aggregators and the steps before them. Not its __init__.py, which needs torchvision for the rest of it."""
    if (spec := importlib.util.find_spec("byzfl")) is None:
        pytest.skip("compares with ByzFL: pip install --no-deps byzfl==0.0.11")
    package = types.ModuleType("byzfl")
    package.__path__ = spec.submodule_search_locations
    sys.modules["byzfl"] = package
    names = "byzfl.aggregators.aggregators", "byzfl.aggregators.preaggregators"
    return tuple(map(importlib.import_module, names))


@pytest.mark.parametrize("seed", range(3))
def test_rules_equal_byzfl(seed):
    """Its objects get copies, because some of them write into their input."""
    aggregators, preaggregators = byzfl()
    theirs = {
        "median": aggregators.Median(),
        "trimmed_mean": aggregators.TrMean(OUTLIERS),
        "krum": aggregators.Krum(OUTLIERS),
        "multi_krum": aggregators.MultiKrum(OUTLIERS),
        "byzfl_geometric_median": aggregators.GeometricMedian(nu=0.1, T=3),
        "byzfl_centered_clip": aggregators.CenteredClipping(L=2, tau=2.0),
        "nnm": preaggregators.NNM(OUTLIERS),
    }
    for name, rule in theirs.items():
        np.testing.assert_allclose(applied(name, rows(seed)), rule(rows(seed)), rtol=1e-6, atol=1e-6, err_msg=name)


# --- Identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_clients_does_not_matter(rule):
    x, order = rows(), np.random.default_rng(5).permutation(COUNT)
    np.testing.assert_allclose(applied(rule, x[order]), applied(rule, x), rtol=1e-6, atol=1e-6)


def test_mixing_follows_the_order_of_the_clients():
    x, order = rows(), np.random.default_rng(5).permutation(COUNT)
    np.testing.assert_allclose(applied("nnm", x[order]), applied("nnm", x)[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_equal_rows_give_that_row(rule):
    x = np.repeat(rows()[:1], COUNT, axis=0)
    np.testing.assert_allclose(applied(rule, x), x[0], rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1e9, -1e9])
def test_two_rows_of_a_billion_are_harmless(rule, size):
    x = rows()
    x[[1, 4]] = size
    honest = np.delete(x, [1, 4], axis=0)
    result = applied(rule, x)
    if rule in ("median", "trimmed_mean"):
        assert np.all((result >= honest.min(axis=0)) & (result <= honest.max(axis=0)))
    elif rule == "krum":
        assert np.any(np.all(honest == result, axis=1))
    elif rule == "multi_krum":
        np.testing.assert_allclose(result, honest.mean(axis=0), rtol=1e-5, atol=1e-6)
    else:
        assert np.linalg.norm(result) < 2 * np.linalg.norm(honest, axis=1).max()


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "nnm"])
def test_a_translation_of_the_rows_translates_the_result(rule):
    """Not centered_clip, which starts at 0."""
    shift = rows(9)[0]
    np.testing.assert_allclose(applied(rule, rows() + shift), applied(rule, rows()) + shift, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [*RULES, "nnm"])
@pytest.mark.parametrize("factor", [-0.25, 1000.0])
def test_rules_scale_with_the_rows(rule, factor):
    np.testing.assert_allclose(applied(rule, factor * rows()), factor * applied(rule, rows()), rtol=2e-5, atol=1e-5)


def test_mixing_without_outliers_and_one_bucket_are_the_mean():
    x = rows()
    mixed = jax.jit(lambda rows: nearest_neighbour_mixing(rows, 0))(stacked(x))
    np.testing.assert_allclose(flat(mixed), np.tile(x.mean(axis=0), (COUNT, 1)), atol=1e-6)
    one, _ = jax.jit(lambda rows: bucketing(rows, jax.random.key(0), size=COUNT))(stacked(x))
    np.testing.assert_allclose(flat(one), x.mean(axis=0)[None], atol=1e-6)


def test_buckets_are_means_of_different_pairs_and_of_the_last_row():
    x, drawn = rows(), jax.jit(lambda rows, key: bucketing(rows, key)[0])
    buckets = flat(drawn(stacked(x), jax.random.key(1)))
    assert buckets.shape == (4, 11)
    sums = {(i, j): (x[i] + x[j]) / 2 for i, j in itertools.combinations(range(COUNT), 2)}
    found = [next(pair for pair, mean in sums.items() if np.allclose(mean, each, atol=1e-6)) for each in buckets[:3]]
    (alone,) = (i for i in range(COUNT) if np.allclose(x[i], buckets[3], atol=1e-6))
    assert sorted([*itertools.chain(*found), alone]) == list(range(COUNT))
    assert not np.allclose(flat(drawn(stacked(x), jax.random.key(2))), buckets)


def test_small_distances_of_long_rows_are_exact():
    """Inner products of rows of length 1e4 in float32 would round such distances to 0 or to negative numbers."""
    x = 4096 + np.arange(COUNT)[:, None] * np.full(11, 2.0**-10)
    squares = np.asarray(jax.jit(pairwise_squares)(stacked(x)))
    np.testing.assert_allclose(squares, squares_of(x), rtol=1e-6)


# --- Attackers that send nothing new, or no numbers -------------------------------------------------------------------

HONEST = np.array([[1.0, 2.0, 4.0], [1.5, 2.5, 3.5], [0.5, 1.5, 4.5], [1.0, 2.5, 4.0], [1.5, 2.0, 4.5]])
BAD = {"silent": 0.0, "nan": np.nan}  # their two attackers' changes


@pytest.fixture(scope="module")
def changes_after():
    """(rule, changes [7, 3], several) -> the changes after the server's side, where every client has received 10."""
    reference = {"model": np.full((COUNT, 3), 10, np.float32)}
    context = Context(jax.random.key(0), jnp.int32(0), jnp.arange(COUNT, dtype=jnp.int32))

    @functools.partial(jax.jit, static_argnums=(0, 2, 3))
    def server(rule, values, several, before):
        link = robust(None, rule, outliers=OUTLIERS, before=before, stacked=several)
        return link.server(None, {"model": values}, reference, context)[1]["model"]

    def changes(rule, changes, several=False, before="none"):
        return np.asarray(server(rule, np.float32(10 + changes), several, before), np.float64) - 10

    return changes


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("rule", RULES)
def test_attackers_that_send_nothing_new_do_not_stop_a_rule(changes_after, rule, kind):
    """They send back what they received, or NaN. Each number of the result lies between those of honest clients."""
    result = changes_after(rule, np.concatenate([HONEST, np.full((OUTLIERS, 3), BAD[kind])]))[-1]
    low, high = HONEST.min(axis=0), HONEST.max(axis=0)
    slack = 0.4 * low if (rule, kind) == ("centered_clip", "silent") else 1e-5  # it takes three short steps from 0
    assert np.all((result >= low - slack) & (result <= high + slack))


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("rule", RULES)
def test_attackers_that_send_nothing_new_leave_honest_models_as_they_are(changes_after, rule, kind):
    """Screening of several models: an honest change stays within the honest ones, and an attacker's is not used."""
    attacked = np.concatenate([HONEST, np.full((OUTLIERS, 3), BAD[kind])])
    result = changes_after(rule, attacked, several=True)
    if rule != "krum":  # it keeps a single message
        np.testing.assert_allclose(result[: len(HONEST)], HONEST, atol=0.51 if rule == "trimmed_mean" else 1e-5)
    if kind == "nan":
        np.testing.assert_array_equal(result[len(HONEST) :], 0)


@pytest.mark.parametrize("rule", [*RULES, "nnm"])
@pytest.mark.parametrize(("lost", "is_near"), [(1, False), (3, True)])
def test_rows_that_are_not_usable_do_not_count(rule, lost, is_near):
    """The others are combined as if there were no more of them. Each unusable row is one of the f outliers."""
    x = rows(4, count=COUNT - lost)
    unusable = x.mean(axis=0) if is_near else 50.0
    padded, usable = np.insert(x, [2] * lost, unusable, axis=0), np.insert(np.ones(len(x), bool), [2] * lost, False)
    results = without(stacked(padded), usable)
    found = flat(results[rule])
    np.testing.assert_array_equal(np.isinf(results["scores"]), ~usable)
    expected = DEFINITIONS[rule](x, max(OUTLIERS - lost, 0))
    np.testing.assert_allclose(found[usable] if rule == "nnm" else found, expected, rtol=1e-5, atol=1e-5)


@jax.jit
def without(tree, usable):
    results = {name: rule(tree, OUTLIERS, usable) for name, rule in RULES.items()}
    mixed = nearest_neighbour_mixing(tree, OUTLIERS, usable)
    return results | {"nnm": mixed, "scores": krum_scores(tree, OUTLIERS, usable)}


@pytest.mark.parametrize("rule", RULES)
def test_without_any_usable_message_the_result_is_what_was_received(changes_after, rule):
    np.testing.assert_array_equal(changes_after(rule, np.full((COUNT, 3), np.inf)), 0)


def test_a_bucket_without_a_usable_message_does_not_count(changes_after):
    """All but one are refused, so the one is alone in its bucket, and its bucket alone."""
    x = np.full((COUNT, 3), np.nan)
    x[4] = HONEST[0]
    np.testing.assert_allclose(changes_after("median", x, before="bucketing"), np.tile(HONEST[0], (COUNT, 1)))


# --- The link ---------------------------------------------------------------------------------------------------------


def through(rule, values, reference, *, several, outliers=OUTLIERS, before="none"):
    """The values [K, 11] after the server's side, and the share of rejected ones."""
    context = Context(jax.random.key(0), np.int32(0), np.arange(COUNT, dtype=np.int32))
    server = server_of(rule, outliers, before, several)
    _, result, info = server(None, {"model": stacked(values)}, {"model": stacked(reference)}, context)
    return flat(result), float(info["rejected"])


@functools.cache
def server_of(rule, outliers, before, several):
    """The compiled side of the server."""
    return jax.jit(robust(None, rule, outliers=outliers, before=before, stacked=several).server)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "geometric_median", "centered_clip"])
def test_one_model_gets_the_reference_plus_the_result(rule):
    reference = np.tile(rows(7)[:1], (COUNT, 1))
    result, _ = through(rule, reference + rows(), reference, several=False)
    expected = reference + DEFINITIONS[rule](rows())
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before", BEFORE[1:])
def test_steps_before_a_rule_keep_the_number_of_messages(before):
    x = rows()
    x[0] = 1e9
    reference = np.tile(rows(7)[:1], (COUNT, 1))
    result, rejected = through("trimmed_mean", x, reference, several=False, outliers=1, before=before)
    assert np.ptp(result, axis=0).max() == 0 and np.abs(result).max() < 10 and rejected == 0


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_accepted_messages_of_one_model_keep_their_bits(rule):
    reference = np.tile(rows(7)[:1], (COUNT, 1))
    values = np.asarray(stacked_bits(reference + rows()))
    result, rejected = through(rule, values, reference, several=False)
    count = 1 if rule == "krum" else COUNT - OUTLIERS
    kept = best_of(values - reference)[:count]
    others = np.setdiff1d(np.arange(COUNT), kept)
    np.testing.assert_array_equal(result[kept], values[kept])
    np.testing.assert_allclose(result[others], np.tile(values[kept].mean(axis=0), (len(others), 1)), atol=1e-5)
    assert rejected == pytest.approx(len(others) / COUNT)


def stacked_bits(x):
    """The numbers as float32 rounds them."""
    return np.asarray(x, np.float32).astype(np.float64)


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_rejected_messages_of_several_models_become_what_was_received(rule):
    reference = rows(7)
    values = stacked_bits(reference + rows())
    result, rejected = through(rule, values, reference, several=True)
    kept = best_of(stacked_bits(values - reference))[: 1 if rule == "krum" else COUNT - OUTLIERS]
    expected = reference.copy()
    expected[kept] = values[kept]
    np.testing.assert_array_equal(result, expected)
    assert rejected == pytest.approx(1 - len(kept) / COUNT)


def test_numbers_of_several_models_are_clipped_to_what_trimming_keeps():
    reference = rows(7)
    values = stacked_bits(reference + rows())
    changes = stacked_bits(values - reference)
    low, high = np.sort(changes, axis=0)[[OUTLIERS, -OUTLIERS - 1]]
    outside = (changes < low) | (changes > high)
    result, rejected = through("trimmed_mean", values, reference, several=True)
    np.testing.assert_array_equal(result[~outside], values[~outside])
    np.testing.assert_allclose(result - reference, np.clip(changes, low, high), atol=1e-6)
    assert rejected == pytest.approx(2 * OUTLIERS / COUNT)


@pytest.mark.parametrize("rule", ["median", "geometric_median", "centered_clip"])
def test_changes_of_several_models_are_pulled_to_the_centre(rule):
    reference = rows(7)
    values = stacked_bits(reference + rows())
    changes = stacked_bits(values - reference)
    centre = DEFINITIONS[rule](changes)
    distances = np.linalg.norm(changes - centre, axis=1)
    radius = np.sort(distances)[COUNT - OUTLIERS - 1]
    near = distances <= radius * (1 + 1e-5)
    result, rejected = through(rule, values, reference, several=True)
    np.testing.assert_array_equal(result[near], values[near])
    factors = np.minimum(1, radius / distances)[:, None]
    np.testing.assert_allclose(result - reference, centre + factors * (changes - centre), atol=2e-6)
    assert rejected == pytest.approx(OUTLIERS / COUNT)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "krum"])
def test_without_outliers_several_models_keep_their_bits(rule):
    reference, values = rows(7), rows()
    result, rejected = through(rule, values, reference, several=True, outliers=0)
    np.testing.assert_array_equal(result, values)
    assert rejected == 0


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_messages_that_are_not_finite_are_dropped(rule, several, bad):
    reference, values = np.zeros((COUNT, 11)), rows()
    values[3, 5] = bad
    result, rejected = through(rule, values, reference, several=several)
    assert np.abs(result).max() < 10
    assert rejected >= 1 / COUNT


# --- Refusals ---------------------------------------------------------------------------------------------------------


def refusal(rule, *, cohort=5, outliers=1, before="none", secure=False):
    problem = dataclasses.replace(constants().problem, cohort_size=cohort)
    inner = averaging(problem)
    inner = channel(inner, problem, [exchange(problem)]) if secure else inner
    with pytest.raises(UserError) as caught:
        channel(inner, problem, [robust(problem, rule, outliers=outliers, before=before, stacked=False)])
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_too_many_outliers_are_refused_with_the_smallest_cohort():
    assert "cohort=7" in refusal("median", cohort=6, outliers=3)
    assert "cohort=5" in refusal("multi_krum", cohort=4)
    assert "cohort=5" in refusal("trimmed_mean", cohort=4, before="bucketing")
    assert "outliers=-1" in refusal("median", outliers=-1)


@pytest.mark.parametrize(
    ("rule", "cohort", "before"), [("median", 3, "none"), ("krum", 5, "nnm"), ("median", 5, "bucketing")]
)
def test_the_smallest_cohort_is_accepted(rule, cohort, before):
    problem = dataclasses.replace(constants().problem, cohort_size=cohort)
    inner = averaging(problem)
    assert channel(inner, problem, [robust(problem, rule, outliers=1, before=before, stacked=False)]) is not inner


def test_an_exchange_of_layers_is_refused():
    assert "one attacker is in all of them" in refusal("median", secure=True)


def test_unknown_names_and_mixing_of_several_models_are_refused():
    for arguments in ({"rule": "medain"}, {"rule": "median", "before": "nmm"}):
        with pytest.raises(UserError, match="did you mean"):
            robust(None, outliers=1, stacked=False, **arguments)
    for before in BEFORE[1:]:
        with pytest.raises(UserError, match=f"{before} makes the models of this method nearly equal"):
            robust(None, "median", outliers=1, before=before, stacked=True)


# --- In rounds --------------------------------------------------------------------------------------------------------

EIGHT = (8, 9, 7, 8, 10, 8, 9, 7)
ALL_EIGHT = dict(network="linear", sizes=EIGHT, cohort=8, seed=0, devices=1, lanes=1)


def plain(hyper, problem):
    return STRATEGIES["fedmr"].build(hyper, problem)


def screened_without_outliers(hyper, problem):
    link = robust(problem, "multi_krum", outliers=0, stacked=True)
    return channel(plain(hyper, problem), problem, [link])


def attacked(hyper, problem):
    link = attack(problem, "sign_flip", attackers=0.25, seed=0, scale=4.0)
    return channel(plain(hyper, problem), problem, [link])


def defended(hyper, problem):
    link = attack(problem, "sign_flip", attackers=0.25, seed=0, scale=4.0)
    screen = robust(problem, "multi_krum", outliers=2, stacked=True)
    return channel(plain(hyper, problem), problem, [link, screen])


def averaged(rule, hyper, problem):
    share = 0.0 if rule == "honest" else 0.25
    links = [attack(problem, "sign_flip", attackers=share, seed=0, scale=4.0)]
    links += [robust(problem, rule, outliers=2, stacked=False)] if rule in RULES else []
    return channel(averaging(problem), problem, links)


def run(build, rounds=10, **options):
    simulation = simulator((build, STRATEGIES["fedmr"].hyper()), **ALL_EIGHT, **options)
    state, report = simulation.run(simulation.init(), rounds)
    return simulation.test(state).accuracy, state, report


@pytest.mark.slow
def test_fedmr_without_outliers_is_fedmr_bit_for_bit(equal):
    ours, theirs = run(screened_without_outliers, 2), run(plain, 2)
    equal(ours[1].server.inner, theirs[1].server)
    assert ours[2].info["rejected"] == 0


@pytest.mark.slow  # quick: the rules by hand
def test_multi_krum_restores_the_accuracy_under_sign_flip():
    good, bad = run(plain)[0], run(attacked)[0]
    saved, state, report = run(defended)
    assert bad < good - 0.2
    assert saved > good - 0.1
    assert report.info["rejected"] == pytest.approx(0.25) and report.info["attackers"] == 2
    assert bool(trees.all_finite(state.server.inner.models))


def controlled(rule, hyper, problem):
    inner = STRATEGIES["scaffold"].build(STRATEGIES["scaffold"].hyper(), problem)
    return channel(inner, problem, [robust(problem, rule, outliers=1, stacked=False)])


@pytest.mark.slow
def test_clients_whose_message_was_refused_are_as_if_they_had_not_trained():
    """SCAFFOLD's invariant: the server's control variate is the mean of the clients'."""
    options = dict(ALL_EIGHT, cohort=5)
    simulation = simulator((functools.partial(controlled, "multi_krum"), STRATEGIES["fedmr"].hyper()), **options)
    state, _ = simulation.run(simulation.init(), 6)
    (refused,), memory = state.server.links, state.memory
    assert 0 < np.sum(refused) < len(EIGHT)
    valid = jax.vmap(trees.where)(refused, memory.before, memory.inner)
    for control, mean, last in zip(
        *map(jax.tree.leaves, (state.server.inner.control, trees.mean(valid), trees.mean(memory.inner))), strict=True
    ):
        np.testing.assert_allclose(control, mean, atol=1e-6)
        assert np.max(np.abs(control - last)) > 1e-3  # what the clients last computed is not in the server's


def test_a_client_that_sent_nothing_stays_refused():
    """A late or lost client has no samples in the round. The last message that it really sent was refused."""
    options = dict(ALL_EIGHT, cohort=5)
    simulation = simulator((functools.partial(controlled, "multi_krum"), STRATEGIES["fedmr"].hyper()), **options)
    strategy, cohort = simulation.rounds.strategy, Cohort(np.arange(5, dtype=np.int32), np.int32([0, 0, 5, 5, 5]))

    @jax.jit
    def refused_after(key):
        state = strategy.init(key)._replace(links=(jnp.ones(8, bool),))
        payloads = strategy.dispatch(state, cohort, key)
        messages = {name: payloads[name] for name in ("model", "control")}
        return strategy.receive(state, messages, payloads, cohort, jnp.int32(0), key)[0].links[0]

    refused = np.asarray(refused_after(jax.random.key(0)))
    assert refused[:2].all() and not refused[2:5].all()


def test_a_refused_client_also_restores_its_compression_error():
    """Without training: its change is 1 in all numbers. Top-k sends the larger one of the two errors plus 1."""
    problem = constants("linear").problem
    shapes = jax.eval_shape(problem.model.init, jax.random.key(0))
    report = local.Metrics(jnp.zeros(()), jnp.int32(0), jnp.int32(0), jnp.int32(-1))
    trained = lambda payload, memory, data, round, key: (trees.add(payload, ones_like(payload)), memory, report)
    ones_like = functools.partial(jax.tree.map, jnp.ones_like)
    inner = averaging(problem)._replace(client_update=trained)
    stages = [compression(problem, "topk", ratio=0.01, feedback="ef")]
    stages += [robust(problem, "multi_krum", outliers=1, stacked=False)]
    strategy = channel(inner, dataclasses.replace(problem, cohort_size=5), stages)

    @jax.jit
    def errors(refused, before, after):
        """What the client keeps after one more round, of one that was refused or not: errors of all numbers."""
        payload = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), {"model": shapes})
        memory = strategy.init_memory(jax.random.key(0), jnp.int32(0))
        filled = lambda tree, value: jax.tree.map(lambda leaf: jnp.full_like(leaf, value), tree)
        memory = memory._replace(links=filled(memory.links, after), links_before=filled(memory.links, before))
        announced = payload | {"channel": {"robust": refused}}
        data = SimpleNamespace(client_id=jnp.int32(0))
        kept = strategy.client_update(announced, memory, data, jnp.int32(0), jax.random.key(0))[1]
        largest = lambda tree: jnp.max(jnp.stack([jnp.max(leaf) for leaf in jax.tree.leaves(tree)]))
        return largest(kept.links), largest(kept.links_before)

    assert errors(True, 3.0, 5.0) == (4, 3) and errors(False, 3.0, 5.0) == (6, 5)


def test_rules_without_refusals_are_refused_for_control_variates():
    with pytest.raises(UserError, match="add their control to their memory, which median on the server cannot follow"):
        simulator((functools.partial(controlled, "median"), STRATEGIES["fedmr"].hyper()), **ALL_EIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_regains_most_of_what_an_attack_takes(rule):
    """Not all of it: the attackers are all on one side, so a median is closer to them than the honest mean."""
    accuracy = lambda name: run(functools.partial(averaged, name), 30)[0]
    good, bad = accuracy("honest"), accuracy("undefended")
    assert bad < good - 0.4
    assert accuracy(rule) > (good + bad) / 2


# --- Without a server -------------------------------------------------------------------------------------------------


def by_neighbours(rule, outliers, models, graph):
    """Each client's result in NumPy: an independent loop over clients and neighbours. ``models`` [N, P]."""
    new = []
    for i, own in enumerate(models):
        ids = [j for j in range(len(models)) if j != i and graph.weights[0, i, j] > 0]
        others = np.array([models[j] for j in ids])
        stack = np.vstack([own, others])
        order = np.sort(stack, axis=0)
        if rule == "median":
            new.append(np.median(stack, axis=0))
        elif rule == "trimmed_mean":
            new.append(order[outliers : len(stack) - outliers].mean(axis=0))
        elif rule == "krum":
            apart = ((stack[:, None] - stack[None]) ** 2).sum(axis=2)
            new.append(stack[np.argmin(np.sort(apart, axis=1)[:, : len(stack) - outliers].sum(axis=1))])
        else:
            distances = np.linalg.norm(others - own, axis=1)
            radius = np.sort(distances)[len(ids) - outliers - 1]
            clipped = (others - own) * np.minimum(1, radius / distances)[:, None]
            new.append(own + sum(graph.weights[0, i, j] * change for j, change in zip(ids, clipped, strict=True)))
    return np.array(new)


@pytest.mark.parametrize(
    "rule, name", [("median", "star"), ("trimmed_mean", "ring"), ("krum", "complete"), ("centered_clip", "torus")]
)
def test_each_neighbourhood_has_the_rule(rule, name):
    graph = graph_of(dpsgd.Hyper(graph=name), 6, 6)
    outliers = 0 if name == "star" else 1
    models = np.random.default_rng(3).normal(size=(6, 11)).astype(np.float32)
    models[2] = 1e6
    received = graph.received(jnp.int32(0), jnp.ones(6, bool))
    found, info = jax.jit(lambda params: neighbourhoods(rule, outliers)(params, received))(stacked(models))
    expected = by_neighbours(rule, outliers, models.astype(np.float64), graph)
    honest = np.arange(6) != 2
    np.testing.assert_allclose(flat(found)[honest], expected[honest], rtol=1e-4, atol=1e-5)
    if outliers:
        assert np.abs(flat(found)[honest]).max() < 10
    assert (info["rejected"] > 0) == (rule == "centered_clip")


def test_unequal_neighbourhoods_are_trimmed_by_their_own_size():
    path = np.eye(5, k=1) + np.eye(5, k=-1)
    path[0, 2] = path[2, 0] = path[2, 4] = path[4, 2] = 1  # two, two, four, two, two neighbours
    graph = types.SimpleNamespace(weights=graphs.metropolis(path)[None])
    monkeyed = graphs._graph(lambda *_: path, "here", 5, 2, 0)
    models = np.random.default_rng(3).normal(size=(5, 11)).astype(np.float32)
    received = jax.tree.map(jnp.asarray, monkeyed.received(jnp.int32(0), jnp.ones(5, bool)))
    found, _ = neighbourhoods("trimmed_mean", 1)(jax.tree.map(jnp.asarray, stacked(models)), received)
    np.testing.assert_allclose(flat(found), by_neighbours("trimmed_mean", 1, models, graph), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="krum needs a graph in which all clients have the same number"):
        neighbourhoods("krum", 0)(stacked(models), monkeyed.received(jnp.int32(0), jnp.ones(5, bool)))


def test_d_psgd_trains_with_attackers_and_refuses_what_it_cannot_do():
    def build(hyper, problem):
        links = [attack(problem, "sign_flip", attackers=0.2, seed=0, scale=30.0)]
        return channel(
            dpsgd.build(hyper, problem), problem, [*links, robust(problem, RULE[0], outliers=1, stacked=True)]
        )

    RULE = ["median"]
    one = simulator((build, dpsgd.Hyper(graph="complete")), "linear", cohort=6)
    _, report = one.rounds.run(one.rounds.init(), 8)
    assert float(report.train_loss) < 1 and float(report.info["rejected"]) == 0
    with pytest.raises(UserError, match="all must send: set cohort=6"):
        simulator((build, dpsgd.Hyper(graph="complete")), "linear", cohort=4)
    RULE[0] = "krum"
    with pytest.raises(UserError, match="needs 5 models, but a client has 3 with its own"):
        simulator((build, dpsgd.Hyper(graph="ring")), "linear", cohort=6)
    with pytest.raises(UserError, match="average what they had before the training"):
        simulator((build, dpsgd.Hyper(order="mix")), "linear", cohort=6)
