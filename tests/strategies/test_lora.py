"""Federated methods that train adapters: their facts by hand, identities of their servers, and what they send."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData
from fedjax_mr.clock import schedule
from fedjax_mr.clock.asynchronous import Keys, asynchronous
from fedjax_mr.engine.layout import Layout
from fedjax_mr.engine.round import dispatch
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.errors import UserError
from fedjax_mr.models import Model, adapters
from fedjax_mr.strategies import STRATEGIES, by_group, lora
from fedjax_mr.strategies.interface import Cohort, Problem
from fedjax_mr.strategies.traffic import Parcels, Traffic, usual_traffic
from fedjax_mr.testing.adapted import WHOLE, adapted, random_models
from fedjax_mr.testing.federations import federated, tree_close, tree_equal

METHODS = by_group()["adapters"]
K, KEY = 3, jax.random.key(0)
FACTOR = 4 * 4 * 2 * 2  # bytes of A, or of B, of two matrices
HEAD = 4 * (16 * 3 + 3)
merged, mean = jax.jit(adapters.merged), jax.jit(trees.mean)
all_merged = jax.jit(jax.vmap(adapters.merged, in_axes=(None, 0)))


# --- by hand: two dense layers of 2 x 2 weights, the first with adapters of rank 2, which are scaled by 2 -------------

KERNEL, HEAD_KERNEL = [[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]]
A_START = [[1.0, 0.5], [2.0, -1.0]]  # of all hand-made models, in place of the random one
LR = 0.1


class TwoLayers(nn.Module):
    """Two dense layers without biases."""

    hidden: int = 2

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        x = nn.Dense(self.hidden, use_bias=False, name="body")(x)
        return nn.Dense(2, use_bias=False, name="last")(x)


@functools.cache
def two_layers(hidden=2, **options):
    kernels = (KERNEL, HEAD_KERNEL) if hidden == 2 else (np.ones((2, hidden)), np.ones((hidden, 2)))
    base = {"params": {name: {"kernel": np.array(each)} for name, each in zip(("body", "last"), kernels, strict=True)}}
    return adapters.lora(Model(TwoLayers(hidden), (2,)), 2, 4.0, key=jax.random.key(0), variables=base, **options)


def by_hand(name, hyper=None, *, weight_decay=0.0, **options):
    """A strategy of three clients with 1, 3 and 2 samples, two of which train per round."""
    model, row = two_layers(**options), STRATEGIES[name]
    sizes, none = np.array([1, 3, 2], np.int32), np.zeros((3, 2), np.int32)
    setting = local.setting(lr=LR, momentum=0.0, weight_decay=weight_decay, epochs=1)
    problem = Problem(model, setting, 3, 2, 2, (), sizes, none, np.zeros(3, np.int32))
    return row.build(hyper or (row.hyper and row.hyper()), problem)


def model_of(a=A_START, b=((0.0, 0.0), (0.0, 0.0)), head=HEAD_KERNEL):
    """The variables that train. A tensor that is None is left out."""
    leaves = {("body", "lora_a"): a, ("body", "lora_b"): b, ("last", "kernel"): head}
    tree = {}
    for (layer, leaf), value in leaves.items():
        if value is not None:
            tree.setdefault(layer, {})[leaf] = np.array(value, np.float32)
    return {"params": tree}


def stacked(*models):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *models)


def cohort_of(*clients):
    return Cohort(np.array(clients, np.int32), np.array([1, 3, 2], np.int32)[np.array(clients)])


def pick(variables, *path):
    """A tensor, or None."""
    leaf = variables.get("params", {})
    for name in path:
        leaf = leaf.get(name, {}) if isinstance(leaf, dict) else leaf
    return None if isinstance(leaf, dict) else np.asarray(leaf)


def factors_of(variables):
    return pick(variables, "body", "lora_a"), pick(variables, "body", "lora_b"), pick(variables, "last", "kernel")


@pytest.fixture
def training(monkeypatch):
    """In place of the training of a client: one step of its optimizer along a gradient of ones.

    The list has the network of each call, merged into plain weights of the first layer, and its key.
    """
    calls = []

    def train(model, setting, variables, data, key, *, loss=None, optimizer=None, gradient=None):
        merged = adapters.merged(model, variables)["params"]["body"]["kernel"]
        calls.append((np.asarray(merged), key))
        params, optimizer = variables["params"], optimizer or setting.optimizer
        updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
        return variables | {"params": optax.apply_updates(params, updates)}, None

    monkeypatch.setattr(local, "train", train)
    return calls


def client(strategy, payload, memory=None, *, number=0, round=0, key=KEY):
    data = ClientData(None, None, 0, 1, jnp.int32(number))
    upload, memory, _ = strategy.client_update(payload, memory, data, jnp.int32(round), key)
    return upload, memory


def server(strategy, state, *uploads, clients=(0, 1), round=0, **others):
    new, _ = strategy.server_update(
        state, {"model": stacked(*uploads)} | others, cohort_of(*clients), jnp.int32(round), KEY
    )
    return new


def moved(*factors):
    """Tensors after a step along ones."""
    return tuple(np.asarray(each) - np.float32(LR) for each in factors)


def same(ours, hand):
    assert len(ours) == len(hand)
    for one, other in zip(ours, hand, strict=True):
        np.testing.assert_allclose(one, np.asarray(other), rtol=1e-5, atol=1e-5)


B_ONE, B_TWO = [[1.0, 0.0], [0.0, 2.0]], [[5.0, 4.0], [0.0, 2.0]]
A_TWO = [[5.0, 0.5], [2.0, 3.0]]
ONE, TWO = model_of(A_START, B_ONE, [[1.0, 0.0], [0.0, 1.0]]), model_of(A_TWO, B_TWO, [[5.0, 0.0], [0.0, 9.0]])
TWO_HEAD = [[5.0, 0.0], [0.0, 9.0]]
BY_SAMPLES = ([[4.0, 0.5], [2.0, 2.0]], [[4.0, 3.0], [0.0, 2.0]], [[4.0, 0.0], [0.0, 7.0]])  # 1/4 and 3/4
EQUALLY = ([[3.0, 0.5], [2.0, 1.0]], [[3.0, 2.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 5.0]])


def test_fedit_trains_sends_and_averages_both_factors_and_the_head(training):
    strategy = by_hand("fedit")
    assert jax.tree.structure(strategy.init(KEY).model) == jax.tree.structure(ONE)
    upload, _ = client(strategy, {"model": ONE})
    same(factors_of(upload["model"]), moved(A_START, B_ONE, HEAD_KERNEL))
    same(factors_of(server(strategy, strategy.init(KEY), ONE, TWO).model), BY_SAMPLES)


def test_ffalora_trains_sends_and_averages_b_while_a_stays(training):
    strategy = by_hand("ffalora")
    state, drawn = strategy.init(KEY), pick(two_layers().start, "body", "lora_a")
    assert pick(state.model, "body", "lora_a") is None and np.ptp(drawn) > 0.1
    upload, _ = client(strategy, {"model": model_of(None, B_ONE)})
    assert pick(upload["model"], "body", "lora_a") is None
    same(factors_of(upload["model"])[1:], moved(B_ONE, HEAD_KERNEL))
    same([training[0][0]], [KERNEL + 2 * drawn @ B_ONE])  # the network that trained
    new = server(strategy, state, *(model_of(None, *factors_of(each)[1:]) for each in (ONE, TWO)))
    same(factors_of(strategy.global_model(new)), (drawn, *BY_SAMPLES[1:]))


def test_fedsalora_sends_and_averages_a_while_b_and_the_head_stay(training):
    strategy, start = by_hand("fedsalora"), pick(two_layers().start, "body", "lora_a")
    shared, own = model_of(A_START, None, None), model_of(None, B_ONE)
    same([pick(strategy.init(KEY).part, "body", "lora_a")], [start])
    upload, memory = client(strategy, {"part": shared}, own)
    same([training[0][0]], [KERNEL + 2 * np.array(A_START) @ B_ONE])
    assert jax.tree.structure(upload["part"]) == jax.tree.structure(shared)
    same([pick(upload["part"], "body", "lora_a")], moved(A_START))
    assert pick(memory, "body", "lora_a") is None
    same(factors_of(memory)[1:], moved(B_ONE, HEAD_KERNEL))
    parts = {"part": stacked(shared, model_of(A_TWO, None, None))}
    new, _ = strategy.server_update(strategy.init(KEY), parts, cohort_of(0, 1), jnp.int32(0), KEY)
    same([pick(new.part, "body", "lora_a")], BY_SAMPLES[:1])
    personal = strategy.personal_model(new, own, None, KEY)
    same(factors_of(personal), (BY_SAMPLES[0], B_ONE, HEAD_KERNEL))


@pytest.mark.parametrize("round, trains", [(0, "b"), (1, "a"), (2, "b"), (3, "a")])
def test_rolora_trains_and_averages_b_first_and_a_next(training, round, trains):
    strategy = by_hand("rolora", weight_decay=0.5)  # which must not move the resting factor
    upload, _ = client(strategy, {"model": ONE}, round=round)
    step = [np.asarray(each) - np.float32(LR) * (1 + 0.5 * np.asarray(each)) for each in factors_of(ONE)]
    rests = 0 if trains == "b" else 1
    wanted = [np.asarray(ONE_FACTOR) if row == rests else step[row] for row, ONE_FACTOR in enumerate(factors_of(ONE))]
    same(factors_of(upload["model"]), wanted)
    old = strategy.init(KEY)._replace(model=model_of([[9.0, 9.0], [9.0, 9.0]], [[7.0, 7.0], [7.0, 7.0]]))
    new = factors_of(server(strategy, old, ONE, TWO, round=round).model)
    kept = list(BY_SAMPLES)
    kept[rests] = factors_of(old.model)[rests]
    same(new, kept)


@pytest.mark.parametrize(
    "weights, means, shares", [("uniform", EQUALLY, (0.5, 0.5)), ("samples", BY_SAMPLES, (0.25, 0.75))]
)
def test_fedexlora_adds_the_error_of_the_means_to_the_base(training, weights, means, shares):
    strategy = by_hand("fedexlora", lora.FedExLora(weights))
    earlier = np.array([[0.5, 0.0], [-1.0, 2.0]], np.float32)
    state = strategy.init(KEY)._replace(change={"body": {"kernel": earlier}})
    new = server(strategy, state, ONE, TWO)
    same(factors_of(new.model), means)
    products = shares[0] * np.array(A_START) @ B_ONE + shares[1] * np.array(A_TWO) @ B_TWO
    residual = 2 * (products - np.array(means[0]) @ means[1])
    same([new.change["body"]["kernel"]], [earlier + residual])
    deployed = adapters.merged(two_layers(), strategy.global_model(new))["params"]["body"]["kernel"]
    same([deployed], [KERNEL + earlier + 2 * products])
    upload, _ = client(strategy, {"model": ONE, "change": {"body": {"kernel": earlier}}})
    same([training[0][0]], [KERNEL + earlier + 2 * np.array(A_START) @ B_ONE])  # it trains on the changed base
    assert adapters.CHANGE not in upload["model"]
    same(factors_of(upload["model"]), moved(A_START, B_ONE, HEAD_KERNEL))


@pytest.mark.parametrize("name", ["fedit", "fedexlora", "rolora", "flexlora"])
def test_a_client_trains_with_its_own_key(training, name):
    payload = {"model": ONE} | ({"change": {"body": {"kernel": np.zeros((2, 2))}}} if name == "fedexlora" else {})
    client(by_hand(name), payload, key=jax.random.key(5))
    np.testing.assert_array_equal(jax.random.key_data(training[0][1]), jax.random.key_data(jax.random.key(5)))


def test_a_late_client_has_no_weight_in_fedexlora():
    strategy = by_hand("fedexlora")
    late = Cohort(jnp.array([0, 1]), jnp.array([1, 0]))
    new, _ = strategy.server_update(strategy.init(KEY), {"model": stacked(ONE, TWO)}, late, jnp.int32(0), KEY)
    same(factors_of(new.model), factors_of(ONE))


def test_flora_starts_from_new_adapters_and_stacks_them_into_the_base(training):
    strategy = by_hand("flora", lora.Ranks("2,1"))
    earlier = np.array([[0.5, 0.0], [-1.0, 2.0]], np.float32)
    state = strategy.init(KEY)._replace(change={"body": {"kernel": earlier}})
    sent = strategy.dispatch(state, cohort_of(0, 1), KEY)
    assert not list(adapters.pairs(sent["model"]))
    payload = trees.take(sent, 0)
    uploads = [
        client(strategy, payload, number=number, key=jax.random.key(key))[0]["model"]
        for number, key in ((0, 5), (0, 6), (1, 5))
    ]
    for merged, _ in training:
        same([merged], [KERNEL + earlier])  # B is zero
    (a, b, head), (other, _, _), (thin_a, *_) = map(factors_of, uploads)
    assert np.abs(a - other).min() > 1e-3  # another key, another A
    same([b, head], moved(np.zeros((2, 2)), HEAD_KERNEL))
    start = a + np.float32(LR)
    assert np.abs(start).max() <= 0.5**0.5 and np.ptp(start) > 0.1
    np.testing.assert_allclose(thin_a[:, 0], a[:, 0])  # the first column alone
    np.testing.assert_allclose(thin_a[:, 1], -np.float32(LR), rtol=1e-5)  # it was zero before the step
    new = server(strategy, state, ONE, TWO)
    stack = np.concatenate([A_START, A_TWO], 1) @ np.concatenate([0.25 * np.array(B_ONE), 0.75 * np.array(B_TWO)])
    same([new.change["body"]["kernel"]], [earlier + 2 * stack])
    assert np.all(pick(new.model, "body", "lora_b") == 0)
    same([pick(new.model, "last", "kernel")], BY_SAMPLES[2:])
    deployed = adapters.merged(two_layers(), strategy.global_model(new))["params"]["body"]["kernel"]
    same([deployed], [KERNEL + earlier + 2 * stack])


RANK_1 = [[1.0, 0.0], [2.0, 0.0]], [[3.0, 4.0], [0.0, 0.0]]  # A B = [[3, 4], [6, 8]]


def test_flexlora_scales_a_client_by_alpha_over_its_own_rank(training):
    """The first client has rank 1, so alpha / r_i is 4; the scale of the network is alpha / r = 2."""
    strategy = by_hand("flexlora", lora.FlexLora("1,2"))
    product = np.array([[3.0, 4.0], [6.0, 8.0]])
    client(strategy, {"model": model_of(*RANK_1)}, number=0)
    client(strategy, {"model": model_of(*RANK_1)}, number=1)
    same([training[0][0]], [KERNEL + 4 * product])
    same([training[1][0]], [KERNEL + 2 * product])
    state = server(strategy, strategy.init(KEY), model_of(*RANK_1), TWO)
    mean = 0.25 * 4 * product + 0.75 * 2 * np.array(A_TWO) @ B_TWO
    same([state.change["body"]["kernel"]], [mean])
    same([pick(state.model, "last", "kernel")], [[[4.0, 0.0], [0.0, 7.0]]])
    first, second = (trees.take(strategy.dispatch(state, cohort_of(0, 1), KEY)["model"], row) for row in (0, 1))
    u, s, vt = np.linalg.svd(mean)
    a, b, _ = factors_of(first)
    same([a[:, 1], b[1]], np.zeros((2, 2)))
    same([4 * a @ b], [s[0] * np.outer(u[:, 0], vt[0])])  # the nearest product of rank 1
    a, b, _ = factors_of(second)
    same([2 * a @ b], [mean])
    same([a.T @ a, np.linalg.norm(b, axis=1)], [np.eye(2), s / 2])  # A = U, and B has the singular values
    deployed = adapters.merged(two_layers(), strategy.global_model(state))["params"]["body"]["kernel"]
    same([deployed], [KERNEL + mean])


def test_flexlora_scales_by_the_square_root_of_the_rank_with_rslora(training):
    strategy = by_hand("flexlora", lora.FlexLora("1,2"), stabilized=True)
    product = np.array([[3.0, 4.0], [6.0, 8.0]])
    for number, scale in ((0, 4.0), (1, 4 / 2**0.5)):
        client(strategy, {"model": model_of(*RANK_1)}, number=number)
        same([training[number][0]], [KERNEL + scale * product])
    state = server(strategy, strategy.init(KEY), model_of(*RANK_1), model_of(A_TWO))
    same([state.change["body"]["kernel"]], [0.25 * 4 * product])
    a, b, _ = factors_of(trees.take(strategy.dispatch(state, cohort_of(0, 1), KEY)["model"], 0))
    same([4 * a @ b], [0.25 * 4 * product])


def test_flexlora_may_divide_the_square_roots_and_scale_all_alike(training):
    strategy = by_hand("flexlora", lora.FlexLora("1,2", split="roots"))
    client(strategy, {"model": model_of(*RANK_1)}, number=0)
    same([training[0][0]], [KERNEL + 2 * np.array([[3.0, 4.0], [6.0, 8.0]])])
    state = server(strategy, strategy.init(KEY), model_of(*RANK_1), TWO)
    mean = 0.25 * 2 * np.array([[3.0, 4.0], [6.0, 8.0]]) + 0.75 * 2 * np.array(A_TWO) @ B_TWO
    a, b, _ = factors_of(state.model)
    same([2 * a @ b], [mean])
    roots = np.sqrt(np.linalg.svd(mean)[1] / 2)
    same([np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=1)], [roots, roots])


@pytest.mark.parametrize("split, second", [("released", True), ("roots", False)])
def test_in_flexlora_unused_directions_train_after_a_cohort_of_lower_rank(split, second):
    """A client of rank 2 receives the product of a cohort of rank 1. One step towards another product adds a rank."""
    strategy = by_hand("flexlora", lora.FlexLora("1,1,2", split=split))
    state = server(strategy, strategy.init(KEY), model_of(*RANK_1), model_of(*RANK_1))
    a, b, _ = factors_of(trees.take(strategy.dispatch(state, cohort_of(2, 2), KEY)["model"], 0))
    error = 2 * a @ b - np.eye(2)  # the gradient of half the squared distance to the identity
    trained = (a - LR * 2 * error @ b.T) @ (b - LR * 2 * a.T @ error)
    largest, smallest = np.linalg.svd(trained)[1]
    assert (smallest > 1e-2) == second, (largest, smallest)
    assert smallest < largest


def test_hetlora_weighs_by_the_norms_of_the_products_and_sends_the_columns_of_a_rank(training):
    strategy = by_hand("hetlora", lora.HetLora("1,2"))
    small, large = model_of(*RANK_1), model_of(RANK_1[0], (2 * np.array(RANK_1[1])).tolist(), TWO_HEAD)
    new = server(strategy, strategy.init(KEY), small, large)
    a, b, head = factors_of(new.model)  # the norms are as 1 to 2, the samples as 1 to 3
    same([a, b], [RANK_1[0], [[5.0, 20 / 3], [0.0, 0.0]]])
    same([head], BY_SAMPLES[2:])
    first, second = (
        factors_of(trees.take(strategy.dispatch(new._replace(model=TWO), cohort_of(0, 1), KEY)["model"], row))
        for row in (0, 1)
    )
    same(first, ([[5.0, 0.0], [2.0, 0.0]], [[5.0, 4.0], [0.0, 0.0]], TWO_HEAD))
    same(second, (A_TWO, B_TWO, TWO_HEAD))
    upload, _ = client(strategy, {"model": ONE})
    same(factors_of(upload["model"]), moved(A_START, B_ONE, HEAD_KERNEL))
    untrained = server(strategy, strategy.init(KEY), model_of(A_START), model_of(A_TWO))
    same(factors_of(untrained.model), (EQUALLY[0], np.zeros((2, 2)), HEAD_KERNEL))  # no norm: equal weights


@pytest.mark.parametrize(
    "norms, shares", [("matrix", ((0.75, 0.25), (0.2, 0.8))), ("client", ((0.5, 0.5), (0.5, 0.5)))]
)
def test_hetlora_takes_a_norm_for_each_matrix_or_for_each_client(norms, shares):
    """Client 1 has products of the norms 3 and 1, client 2 of the norms 1 and 3 (here 1 and 4 for an uneven matrix)."""
    strategy = by_hand("hetlora", lora.HetLora(norms=norms), targets="*", head=False)

    def model(first, second):
        pair = lambda size: {
            "lora_a": np.float32([[size, 0], [0, 0]]),
            "lora_b": np.float32([[1, 0], [0, 0]]),
        }
        return {"params": {"body": pair(first), "last": pair(second)}}

    second = (1.0, 3.0) if norms == "client" else (1.0, 4.0)
    new = server(strategy, strategy.init(KEY), model(3.0, 1.0), model(*second)).model
    wanted = [shares[0][0] * 3.0 + shares[0][1] * second[0], shares[1][0] * 1.0 + shares[1][1] * second[1]]
    same([pick(new, layer, "lora_a")[0, 0] for layer in ("body", "last")], wanted)


@pytest.mark.parametrize("name, head", [("flora", True), ("flexlora", True), ("hetlora", False)])
def test_the_columns_of_a_clients_rank_are_counted(name, head):
    """A column of A and a row of B are 16 bytes, the head 16."""
    row = STRATEGIES[name]
    strategy = by_hand(name, row.hyper("1,2"), head=head)
    usual = Traffic((Parcels.of(2, 1000),), (Parcels.of(2, 1000),), (Parcels.of(1, 7),))
    down, up, peer = strategy.traffic(usual, None, None, cohort_of(0, 1), jnp.int32(0)).num_bytes()
    counted = (1 + 2) * 16 + (2 * 16 if head else 0)
    assert (down, up, peer) == (2000 if name == "flora" else counted, counted, 7)  # FLoRA sends no adapters


@pytest.mark.parametrize("round, factor", [(0, 2 * 3), (1, 2 * 2), (2, 2 * 3)])
def test_rolora_counts_one_factor_and_the_head(round, factor):
    """With three hidden units, B [2, 3] is larger than A [2, 2], and the head is [3, 2]."""
    usual = Traffic((Parcels.of(2, 64),), (Parcels.of(2, 64),), ())
    counted = by_hand("rolora", hidden=3).traffic(usual, None, None, cohort_of(0, 1), jnp.int32(round))
    assert counted.num_bytes() == (2 * 64, 2 * 4 * (factor + 6), 0)


@pytest.mark.parametrize("name", ["flora", "flexlora"])
def test_methods_with_new_factors_in_each_update_refuse_asynchronous_clients(name):
    events = schedule.simulate(
        1,
        num_clients=3,
        in_flight=2,
        cohort=2,
        refill="update",
        choose=lambda *_: np.arange(2),
        duration=lambda *_: 1.0,
    )
    row, keys = STRATEGIES[name], Keys(jax.random.split(KEY, 2), jax.random.split(KEY, 2))
    _, problem, _ = parts_of(name)
    with pytest.raises(UserError, match="the strategy makes new factors of its adapters in each update"):
        asynchronous(functools.partial(row.build, row.hyper()), problem, events.schedule, keys)


# --- identities on a small network -----------------------------------------------------------------------------------


@functools.cache
def problem_of(model):
    return Simulator("fedavg", model(), federated(), cohort=K, layout=Layout(devices=1, lanes=1)).problem


with_head = functools.partial(adapted, head=True)


@functools.cache
def parts_of(name, *, hyper=None, head=False):
    """The strategy, its problem and a cohort; the clients' sizes are the weights."""
    problem, row = problem_of(with_head if head else adapted), STRATEGIES[name]
    clients = np.array([4, 0, 2], np.int32)
    cohort = Cohort(clients, np.asarray(problem.sizes)[clients])
    return row.build(hyper or (row.hyper and row.hyper()), problem), problem, cohort


def after_a_round(name, round=0, uploads=None, **options):
    """The state before and after a round with random uploads, and the uploads."""
    strategy, problem, cohort = parts_of(name, **options)
    state = jax.jit(strategy.init)(KEY)
    uploads = {"model": jax.device_get(random_models(problem.model, K))} if uploads is None else uploads
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("fedexlora", lora.FedExLora("samples")),
        ("flora", lora.Ranks("2,1")),
        ("flora", None),
        ("flexlora", None),
        ("flexlora", lora.FlexLora(split="roots")),
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
    weights = cohort.sizes / np.sum(cohort.sizes)

    @jax.jit
    def wanted_and_got(models, new):
        wanted = adapters.mean_changes(problem.model, models, weights=cohort.sizes)
        return wanted, adapters.changes(problem.model, strategy.global_model(new))

    both = jax.device_get(wanted_and_got(models, new))
    for path, a, b in adapters.pairs(models):
        centred = [each - np.tensordot(weights, each, axes=1)[None] for each in (a, b)]
        cov = 2.0 * np.einsum("k,kir,kro->io", weights, *centred)  # alpha / r is 2
        wanted_kernel, kernel = (tree[path[0]][path[1]]["kernel"] for tree in both)
        tree_close(wanted_kernel - kernel, cov, atol=1e-5)


@pytest.mark.slow
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


@pytest.mark.slow
def test_flexlora_sends_what_the_rank_of_a_client_holds():
    hyper = lora.FlexLora("2,1", split="roots")
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


@pytest.mark.slow
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
    problem = Simulator("fedavg", WHOLE, federated(), cohort=K, layout=Layout(devices=1, lanes=1)).problem
    for name in METHODS:
        row = STRATEGIES[name]
        with pytest.raises(
            UserError, match=f"^{name} trains adapters, which attention does not have: set adapter=lora$"
        ):
            row.build(row.hyper and row.hyper(), problem)
    for ranks in ("3", "0", "2,x"):
        with pytest.raises(UserError, match="must be numbers from 1 to lora_rank=2"):
            lora.flora(lora.Ranks(ranks), parts_of("flora")[1])
    only_b = Simulator(
        "fedavg", adapted(trainable="*/lora_b"), federated(), cohort=K, layout=Layout(devices=1, lanes=1)
    ).problem
    with pytest.raises(UserError, match="fedit trains both factors of the adapters: leave out trainable="):
        lora.fedit(None, only_b)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_clients_of_a_smaller_rank_keep_it_and_nothing_frozen_changes(name):
    model, row = adapted(head=True), STRATEGIES[name]
    hyper = row.hyper("1") if row.hyper and issubclass(row.hyper, lora.Ranks) else row.hyper and row.hyper()
    simulator = Simulator(
        row.build, model, federated(), hyper=hyper, cohort=K, layout=Layout(devices=1, lanes=K), name=name
    )
    state, report = simulator.run(simulator.init(), 3)
    tree_equal(simulator.rounds.constants.problem.model.frozen, model.frozen)
    assert np.isfinite(report.train_loss)
    up = {"ffalora": FACTOR + HEAD, "fedsalora": FACTOR, "rolora": FACTOR + HEAD, "fedit": 2 * FACTOR + HEAD}
    up = up.get(name, 2 * FACTOR + HEAD if name == "fedexlora" else FACTOR + HEAD)
    assert report.traffic.num_bytes()[1] == 3 * K * up
    if name == "hetlora":
        for _, a, b in adapters.pairs(jax.device_get(state.server.model)):
            assert np.all(a[:, 1:] == 0) and np.all(b[1:] == 0) and np.any(b[:1] != 0)


def test_clients_on_two_devices_are_traced_once(engine):
    rounds = engine("fedit", devices=2)
    rounds.run(rounds.init(), 2)
    assert {program.traces for program in rounds.programs.values()} == {1}
