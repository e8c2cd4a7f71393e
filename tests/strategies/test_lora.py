"""Federated methods that train adapters: identities of their servers, and what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.engine.round import dispatch
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.errors import UserError
from fedjax_mr.models import adapters
from fedjax_mr.strategies import STRATEGIES, by_group, lora
from fedjax_mr.strategies.base import Cohort, Parcels, Traffic, usual_traffic
from fedjax_mr.testing.adapted import WHOLE, adapted, random_models
from fedjax_mr.testing.federations import federated, tree_close, tree_equal

METHODS = by_group()["adapters"]
K, KEY = 3, jax.random.key(0)
FACTOR = 4 * 4 * 2 * 2  # bytes of A, or of B, of two matrices
HEAD = 4 * (16 * 3 + 3)
merged, mean = jax.jit(adapters.merged), jax.jit(trees.mean)
all_merged = jax.jit(jax.vmap(adapters.merged, in_axes=(None, 0)))


@functools.cache
def problem_of(model):
    return Simulator("fedavg", model(), federated(), cohort=K, devices=1, lanes=1).problem


with_head = functools.partial(adapted, head=True)


@functools.cache
def parts_of(name, *, hyper=None, head=False):
    """The strategy, its problem and a cohort; the clients' sizes are the weights."""
    problem, row = problem_of(with_head if head else adapted), STRATEGIES[name]
    cohort = Cohort(jnp.array([4, 0, 2]), problem.sizes[jnp.array([4, 0, 2])])
    return row.build(hyper or (row.hyper and row.hyper()), problem), problem, cohort


def after_a_round(name, round=0, uploads=None, **options):
    """The state before and after a round with random uploads, and the uploads."""
    strategy, problem, cohort = parts_of(name, **options)
    state = strategy.init(KEY)
    uploads = {"model": random_models(problem.model, K)} if uploads is None else uploads
    new, _ = jax.jit(strategy.server_update)(state, uploads, cohort, jnp.int32(round), KEY)
    return state, new, uploads["model"]


def dense_mean(problem, models, cohort):
    """The mean of the merged networks: what an exact server deploys."""
    return mean(all_merged(problem.model, models), weights=cohort.sizes)


@pytest.mark.parametrize("name", ["hetlora", "rolora"])
def test_late_uploads_are_not_counted(name):
    """A client that was late has no samples in the cohort; it was sent a model all the same."""
    strategy, _, cohort = parts_of(name)
    usual = Traffic((Parcels.of(3, 100),), (), ())

    def sent(*in_time):
        late = cohort._replace(sizes=cohort.sizes * jnp.array(in_time))
        return strategy.traffic(usual, None, None, late, jnp.int32(0)).num_bytes()[:2]

    (down, up), fewer, none = sent(1, 1, 1), sent(1, 0, 1), sent(0, 0, 0)
    assert fewer == (down, up * 2 // 3) and none == (down, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_round_0_is_the_base(name):
    strategy, problem, _ = parts_of(name, head=True)
    if strategy.global_model is None:  # FedSA-LoRA deploys no model
        state = strategy.personal_model(strategy.init(KEY), strategy.init_memory(KEY, 0), None, KEY)
    else:
        state = strategy.global_model(strategy.init(KEY))
    base = problem.model.whole(problem.model.init(KEY))
    tree_close(merged(problem.model, state), merged(problem.model, base))


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("fedexlora", None),
        ("flora", lora.Ranks("2,1")),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in ("flora", "flexlora")),
    ],
)
def test_the_server_is_exact(name, hyper):
    strategy, problem, cohort = parts_of(name, hyper=hyper, head=True)
    _, new, models = after_a_round(name, hyper=hyper, head=True)
    deployed = strategy.global_model(new)
    tree_close(merged(problem.model, deployed), dense_mean(problem, models, cohort), atol=1e-5)
    x = federated().dataset.x[:5]
    tree_close(problem.model.apply(deployed, x), WHOLE.apply(dense_mean(problem, models, cohort), x), atol=1e-4)


def test_fedit_errs_by_the_covariance_of_the_factors():
    strategy, problem, cohort = parts_of("fedit")
    _, new, models = after_a_round("fedit")
    tree_equal(new, after_a_round("fedavg")[1])
    weights = cohort.sizes / jnp.sum(cohort.sizes)
    wanted = adapters.mean_changes(problem.model, models, weights=cohort.sizes)
    got = adapters.changes(problem.model, strategy.global_model(new))
    for path, a, b in adapters.pairs(models):
        centred = [each - jnp.tensordot(weights, each, axes=1)[None] for each in (a, b)]
        cov = 2.0 * jnp.einsum("k,kir,kro->io", weights, *centred)  # alpha / r is 2
        wanted_kernel, kernel = (tree[path[0]][path[1]]["kernel"] for tree in (wanted, got))
        tree_close(wanted_kernel - kernel, cov, atol=1e-5)


def test_a_common_a_makes_the_mean_exact():
    strategy, problem, cohort = parts_of("ffalora")
    outer, models = problem.model, random_models(problem.model, K)
    common = {"params": strategy.init(KEY).model["params"]}  # B alone
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(common)} == {"lora_b"}
    only_b = jax.tree.map(lambda _, b: b, trees.broadcast(common, K), _b(models))
    new, _ = strategy.server_update(strategy.init(KEY), {"model": only_b}, cohort, 0, KEY)
    a = trees.broadcast(outer.start, K)
    whole = jax.tree.map(lambda leaf: leaf, adapters.parts.joined(a, only_b))
    tree_close(merged(outer, strategy.global_model(new)), dense_mean(problem, whole, cohort), atol=1e-5)


def _b(models):
    return adapters.parts.split(models, "*/lora_b")[0]


@pytest.mark.parametrize(("round", "trained"), [(0, "lora_b"), pytest.param(1, "lora_a", marks=pytest.mark.slow)])
def test_rolora_takes_turns(round, trained):
    strategy, _, cohort = parts_of("rolora")
    state, new, models = after_a_round("rolora", round)
    averaged = mean(models, weights=cohort.sizes)
    for (path, leaf), before, after in zip(
        jax.tree_util.tree_leaves_with_path(averaged), jax.tree.leaves(state), jax.tree.leaves(new), strict=True
    ):
        tree_equal(after, leaf if path[-1].key == trained else before)
    usual = usual_traffic({"model": models}, {"model": models})
    counted = strategy.traffic(usual, state, models, cohort, jnp.int32(round))
    assert counted.num_bytes() == (K * 2 * FACTOR, K * FACTOR, 0)


def test_flexlora_sends_what_the_rank_of_a_client_holds():
    hyper = lora.Ranks("2,1")
    strategy, problem, cohort = parts_of("flexlora", hyper=hyper)
    _, new, models = after_a_round("flexlora", hyper=hyper)
    payload = dispatch(strategy, new, cohort._replace(ids=jnp.array([0, 1, 3])), KEY)
    sent = jax.vmap(lambda each: adapters.changes(problem.model, each))(payload["model"])
    product = adapters.mean_changes(problem.model, models, weights=cohort.sizes)
    for name in ("query", "value"):
        dense = np.asarray(product["attend"][name]["kernel"])
        u, s, vt = np.linalg.svd(dense)
        for row, rank in enumerate((2, 1, 1)):
            nearest = (u[:, :rank] * s[:rank]) @ vt[:rank]
            np.testing.assert_allclose(sent["attend"][name]["kernel"][row], nearest, atol=1e-4)
    counted = strategy.traffic(usual_traffic(payload, payload), new, payload, Cohort(jnp.arange(3), cohort.sizes), 0)
    assert counted.num_bytes() == ((2 + 1 + 2) * FACTOR, (2 + 1 + 2) * FACTOR, 0)  # A and B of one rank: FACTOR bytes


def test_hetlora_weighs_by_the_norms_of_the_products():
    _, new, models = after_a_round("hetlora")
    for path, a, b in adapters.pairs(models):
        norms = np.linalg.norm(np.asarray(a) @ np.asarray(b), axis=(1, 2))
        expected = np.tensordot(norms / norms.sum(), np.asarray(a), axes=1)
        np.testing.assert_allclose(new.model["params"][path[0]][path[1]]["lora_a"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fedexlora", "flora"])
def test_a_changed_base_is_part_of_the_payload(name):
    strategy, _, cohort = parts_of(name, head=True)
    sent = jax.eval_shape(lambda: dispatch(strategy, strategy.init(KEY), cohort, KEY))
    size = trees.num_bytes(sent) // K
    change = 2 * 4 * 4 * 4  # of two matrices
    assert size == change + HEAD + (2 * FACTOR if name == "fedexlora" else 0)


def test_bad_input_is_refused_in_one_line():
    problem = Simulator("fedavg", WHOLE, federated(), cohort=K, devices=1, lanes=1).problem
    for name in METHODS:
        row = STRATEGIES[name]
        with pytest.raises(
            UserError, match=f"^{name} trains adapters, which attention does not have: set adapter=lora$"
        ):
            row.build(row.hyper and row.hyper(), problem)
    for ranks in ("3", "0", "2,x"):
        with pytest.raises(UserError, match="must be numbers from 1 to lora_rank=2"):
            lora.flora(lora.Ranks(ranks), parts_of("flora")[1])
    only_b = Simulator("fedavg", adapted(trainable="*/lora_b"), federated(), cohort=K, devices=1, lanes=1).problem
    with pytest.raises(UserError, match="fedit trains both factors of the adapters: leave out trainable="):
        lora.fedit(None, only_b)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_clients_of_a_smaller_rank_keep_it_and_nothing_frozen_changes(name):
    model, row = adapted(head=True), STRATEGIES[name]
    hyper = lora.Ranks("1") if row.hyper is lora.Ranks else row.hyper and row.hyper()
    simulator = Simulator(row.build, model, federated(), hyper=hyper, cohort=K, devices=1, lanes=K, name=name)
    state, report = simulator.run(simulator.init(), 3)
    tree_equal(simulator.rounds.constants.problem.model.frozen, model.frozen)
    assert np.isfinite(report.train_loss)
    up = {"ffalora": FACTOR + HEAD, "fedsalora": FACTOR, "rolora": FACTOR + HEAD, "fedit": 2 * FACTOR + HEAD}
    up = up.get(name, 2 * FACTOR + HEAD if name == "fedexlora" else FACTOR + HEAD)
    assert report.traffic.num_bytes()[1] == 3 * K * up
    if name == "hetlora":
        for _, a, b in adapters.pairs(jax.device_get(state.server.model)):
            assert np.all(a[:, 1:] == 0) and np.all(b[1:] == 0) and np.any(b[:1] != 0)
