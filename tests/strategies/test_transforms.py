"""Transforms of strategies: server optimizers against their papers, the exchange of layers, refusals."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mr import main, trees
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.method import strategy_of
from fedjax_mr.strategies import (
    STRATEGIES,
    Parcels,
    Row,
    Strategy,
    Traffic,
    fedcross,
    indep,
    on_any_network,
)
from fedjax_mr.strategies.interface import view
from fedjax_mr.strategies.transforms import LEARNING_RATES, make_server_optimizer, server_optimizer
from fedjax_mr.testing.federations import first_cohort, random_like


@dataclasses.dataclass(frozen=True)
class Optimized:
    """A registered strategy with an optimizer of the server."""

    inner: str = "fedavg"
    own: Any = None
    optimizer: str = "momentum"
    lr: float | None = None
    momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3


def inner_strategy(name, problem, hyper=None):
    row = STRATEGIES[name]
    return row.build(hyper or (row.hyper() if row.hyper else None), problem)


def build(hyper, problem):
    optimizer = make_server_optimizer(
        hyper.optimizer, lr=hyper.lr, momentum=hyper.momentum, beta2=hyper.beta2, tau=hyper.tau
    )
    return server_optimizer(inner_strategy(hyper.inner, problem, hyper.own), optimizer)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "optimized", Row(build, Optimized, "a test"))


@pytest.fixture
def problem(federation):
    """A federation whose network has BatchNorm."""
    return federation().problem


def repeated(model, count=3):
    """K equal models."""
    return jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], count, axis=0), model)


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


class Counter(NamedTuple):
    model: Any


# --- The optimizers against their papers ------------------------------------------------------------------------------


def second_moment(kind, v, square, beta2):
    if kind == "adagrad":
        return v + square
    if kind == "adam":
        return beta2 * v + (1 - beta2) * square
    return v - (1 - beta2) * square * (v - square).sign()


class ByHand:
    """FedAvgM, or Algorithm 2 of Reddi et al., for lists of tensors."""

    def __init__(self, hyper, model):
        self.hyper = hyper
        self.m = [0 * each for each in model]
        self.v = [0 * each + hyper.tau**2 for each in model]

    def step(self, model, new):
        hyper = self.hyper
        deltas = [b - a for a, b in zip(model, new, strict=True)]
        if hyper.optimizer == "momentum":
            self.m = [hyper.momentum * m + delta for m, delta in zip(self.m, deltas, strict=True)]
            return [w + hyper.lr * m for w, m in zip(model, self.m, strict=True)]
        self.m = [hyper.momentum * m + (1 - hyper.momentum) * delta for m, delta in zip(self.m, deltas, strict=True)]
        self.v = [second_moment(hyper.optimizer, v, d**2, hyper.beta2) for v, d in zip(self.v, deltas, strict=True)]
        moments = zip(model, self.m, self.v, strict=True)
        return [w + hyper.lr * m / (v**0.5 + hyper.tau) for w, m, v in moments]


@pytest.mark.slow  # quick: the tests by hand
@pytest.mark.parametrize(
    "hyper",
    [
        Optimized(optimizer="adam", lr=0.05, momentum=0.7, beta2=0.6, tau=0.02),
        slow(Optimized(optimizer="momentum", lr=0.7, momentum=0.8)),
        slow(Optimized(optimizer="yogi", lr=0.05, momentum=0.7, beta2=0.6, tau=0.02)),
        slow(Optimized(optimizer="adagrad", lr=0.05, momentum=0.7, tau=0.02)),
    ],
    ids=lambda hyper: hyper.optimizer,
)
def test_three_rounds_equal_the_equations(transcription, hyper):
    by_hand = transcription("optimized", hyper)
    model = by_hand.read(by_hand.progress.server.inner.model)
    server = ByHand(hyper, model)
    for clients in by_hand.rounds(3):
        mean = by_hand.mean([by_hand.train(model, client) for client in clients], by_hand.sizes_of(clients))
        model = server.step(model, mean)
        by_hand.check(by_hand.progress.server.inner.model, model)
        by_hand.check(by_hand.engine.deployed(by_hand.progress), model)


@pytest.mark.parametrize(
    "name, after",
    [
        # beta1 = 1/2, beta2 = 3/4, tau = 2, v = 4 at the start. Changes of 4 and 2, so m is 2 and then 2.
        ("adam", (1 + 2 / (7**0.5 + 2), 1 + 2 / (7**0.5 + 2) + 2 / (6.25**0.5 + 2))),
        ("adagrad", (1 + 2 / (20**0.5 + 2), 1 + 2 / (20**0.5 + 2) + 2 / (24**0.5 + 2))),
        ("yogi", (1 + 2 / (8**0.5 + 2), 1 + 2 / (8**0.5 + 2) + 2 / (7**0.5 + 2))),  # 8 > 4, so v falls by 1
        ("momentum", (1 + 4, 1 + 4 + (4 / 2 + 2))),
    ],
)
def test_two_steps_from_the_old_model_by_hand(name, after):
    optimizer = make_server_optimizer(name, lr=1.0, momentum=0.5, beta2=0.75, tau=2.0)
    changes = iter([4.0, 2.0])
    inner = Strategy(
        init=lambda key: Counter({"params": jnp.ones(1)}),
        dispatch=lambda state, cohort, key: {},
        client_update=lambda payload, memory, data, round, key: ({}, memory, data),
        server_update=lambda state, uploads, cohort, round, key: (
            Counter({"params": state.model["params"] + next(changes)}),
            {},
        ),
        models=view("model"),
    )
    wrapped = server_optimizer(inner, optimizer)
    state = wrapped.init(None)
    for expected in after:
        state, _ = wrapped.server_update(state, {}, None, 0, None)
        np.testing.assert_allclose(state.inner.model["params"], [expected], rtol=1e-6)


def test_the_inner_server_gets_the_key_of_its_round(problem):
    seen = {}

    def server_update(state, uploads, cohort, round, key):
        seen.update(round=round, key=key)
        return state, {}

    inner = inner_strategy("fedavg", problem)._replace(server_update=server_update)
    strategy = server_optimizer(inner, optax.sgd(1.0))
    state = jax.eval_shape(strategy.init, jax.random.key(0))
    key = jax.random.key(3)
    jax.eval_shape(lambda state: strategy.server_update(state, None, None, 5, key), state)
    assert seen["round"] == 5
    assert seen["key"] is key


def test_momentum_of_a_server_with_k_models_has_the_rate_one_minus_beta():
    for several, name, rate in ((True, "momentum", 0.25), (False, "momentum", 1.0), (True, "yogi", 0.01)):
        default = make_server_optimizer(name, momentum=0.75, several=several)
        same = make_server_optimizer(name, lr=rate, momentum=0.75)
        params, gradient = {"a": jnp.zeros(1)}, {"a": jnp.array([0.3])}
        first, second = (each.update(gradient, each.init(params), params)[0]["a"] for each in (default, same))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_fedcross_with_momentum_is_momentum_per_model(transcription):
    """v_j = beta v_j + (mixed_j - w_j) and w_j = w_j + v_j, for each of the K models; their mean is deployed."""
    own = fedcross.Hyper(alpha=0.8, selection="in_order")
    hyper = Optimized("fedcross", own, "momentum", lr=1.0, momentum=0.8)
    by_hand = transcription("optimized", hyper)
    models = [by_hand.read(trees.take(by_hand.progress.server.inner.models, row)) for row in range(3)]
    servers = [ByHand(hyper, model) for model in models]
    for round, clients in enumerate(by_hand.rounds(3)):
        trained = [by_hand.train(model, client) for model, client in zip(models, clients, strict=True)]
        others = [trained[(row + round % 2 + 1) % 3] for row in range(3)]
        mixed = [by_hand.mean(pair, [0.8, 0.2]) for pair in zip(trained, others, strict=True)]
        models = [server.step(model, new) for server, model, new in zip(servers, models, mixed, strict=True)]
        for row, model in enumerate(models):
            by_hand.check(trees.take(by_hand.progress.server.inner.models, row), model)
        by_hand.check(by_hand.engine.deployed(by_hand.progress), by_hand.mean(models))


def test_the_default_learning_rates_are_those_of_the_help():
    (setting,) = [each for each in dataclasses.fields(Config) if each.name == "server_lr"]
    text = "omitted, 1 (momentum; 1 - --server_momentum for methods with several models), 0.1 (adam, adagrad) or 0.01"
    assert text in setting.metadata["fedjax_mr"].help
    assert LEARNING_RATES == {"momentum": 1.0, "adam": 0.1, "yogi": 0.01, "adagrad": 0.1}
    params, gradient = {"a": jnp.zeros(2)}, {"a": jnp.asarray([0.3, -0.2])}
    for name, lr in LEARNING_RATES.items():
        default, same = make_server_optimizer(name), make_server_optimizer(name, lr=lr)
        first, second = (each.update(gradient, each.init(params), params)[0]["a"] for each in (default, same))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("inner, rate", [slow("fedavg", 1.0), ("fedcross", 0.25), slow("fedmr", 0.25)])
def test_momentum_of_k_models_keeps_the_length_of_a_step(problem, inner, rate):
    """Each of K models moves by one client's change; momentum beta adds up 1 / (1 - beta) of them."""
    chosen = Config(strategy=inner, server_optimizer="momentum", server_momentum=0.75)
    plain, wrapped = inner_strategy(inner, problem), strategy_of(chosen)(problem)
    state = jax.jit(plain.init)(jax.random.key(0))
    uploads = {"model": random_like(repeated(jax.jit(problem.model.init)(jax.random.key(1))), scale=5.0)}
    arguments = uploads, first_cohort(problem), jnp.int32(1), jax.random.key(2)
    new, _ = jax.jit(plain.server_update)(state, *arguments)
    result, _ = jax.jit(wrapped.server_update)(jax.jit(wrapped.init)(jax.random.key(0)), *arguments)
    (name,) = [name for name, value in state._asdict().items() if value is not None]
    old, new, ours = (getattr(each, name)["params"] for each in (state, new, result.inner))
    expected = jax.tree.map(lambda old, new: old + rate * (new - old), old, new)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, expected)


# --- What is the inner strategy's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["fedavg", "fedcross", slow("fedmr")])
def test_plain_sgd_of_rate_one_is_the_identity(problem, equal, inner):
    """To one unit in the last place of the larger number: w + (new - w) is rounded twice where w is not near new."""
    plain = inner_strategy(inner, problem)
    wrapped = server_optimizer(plain, optax.sgd(1.0))
    state = jax.jit(plain.init)(jax.random.key(0))
    (name,) = [name for name, value in state._asdict().items() if value is not None]
    uploads = {"model": random_like(repeated(jax.jit(problem.model.init)(jax.random.key(1))), scale=5.0)}
    arguments = uploads, first_cohort(problem), jnp.int32(1), jax.random.key(2)
    expected, info = jax.jit(plain.server_update)(state, *arguments)
    start = jax.jit(wrapped.init)(jax.random.key(0))
    equal(start.inner, state)
    result, reported = jax.jit(wrapped.server_update)(start, *arguments)
    equal(reported, info)
    old, new, ours = (getattr(each, name) for each in (state, expected, result.inner))
    equal({**ours, "params": None}, {**new, "params": None})

    def to_one_unit(old, new, ours):
        bound = np.spacing(np.maximum(np.abs(old), np.abs(new)))
        assert np.all(np.abs(np.asarray(ours, np.float64) - np.asarray(new, np.float64)) <= bound)

    jax.tree.map(to_one_unit, old["params"], new["params"], ours["params"])
    equal(wrapped.global_model(result), plain.global_model(result.inner))


@pytest.mark.parametrize("optimizer", [name if name == "adam" else slow(name) for name in LEARNING_RATES])
def test_statistics_are_those_of_the_inner_strategy(problem, equal, optimizer):
    plain = inner_strategy("fedavg", problem)
    wrapped = server_optimizer(plain, make_server_optimizer(optimizer))
    state = jax.jit(wrapped.init)(jax.random.key(0))
    inner_update, update = jax.jit(plain.server_update), jax.jit(wrapped.server_update)
    for round in range(3):
        uploads = {"model": random_like(repeated(state.inner.model), round)}
        arguments = uploads, first_cohort(problem), jnp.int32(round), jax.random.key(round)
        expected = inner_update(state.inner, *arguments)[0].model
        state = update(state, *arguments)[0]
        equal(state.inner.model["batch_stats"], expected["batch_stats"])
    assert any(
        np.any(np.asarray(a) != np.asarray(b))
        for a, b in zip(*map(jax.tree.leaves, (state.inner.model["params"], expected["params"])), strict=True)
    )


def test_each_of_k_models_has_an_optimizer_of_its_own(problem):
    """A norm is that of one model: changes longer than 1 are clipped to 1, shorter ones are not."""
    wrapped = server_optimizer(indep.build(None, problem), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    state = jax.jit(wrapped.init)(jax.random.key(0))
    lengths = np.array([0.5, 2.0, 30.0])
    old = jax.tree.map(np.asarray, state.inner.models["params"])
    count = sum(leaf[0].size for leaf in jax.tree.leaves(old))
    new = jax.tree.map(
        lambda leaf: leaf + (lengths / np.sqrt(count)).reshape(-1, *(1,) * (leaf.ndim - 1)).astype(leaf.dtype), old
    )
    uploads = {"model": state.inner.models | {"params": new}}
    after = jax.jit(wrapped.server_update)(state, uploads, first_cohort(problem), jnp.int32(0), jax.random.key(0))[0]
    changes = jax.tree.map(lambda a, b: (np.asarray(a) - b).reshape(3, -1), after.inner.models["params"], old)
    changes = np.linalg.norm(np.concatenate(jax.tree.leaves(changes), axis=1), axis=1)
    np.testing.assert_allclose(changes, [0.5, 1.0, 1.0], rtol=1e-4)


def test_every_other_member_sees_the_inner_state():
    """Including the code on the host between two rounds, whose new state the optimizer goes on with."""
    parcels = Parcels.of(2, 7)
    inner = Strategy(
        init=lambda key: Counter({"params": jnp.ones(3)}),
        dispatch=lambda state, cohort, key: {"model": state.model},
        client_update=lambda payload, memory, data, round, key: (payload, memory, data),
        server_update=lambda state, uploads, cohort, round, key: (Counter({"params": jnp.zeros(3)}), {}),
        global_model=lambda state: state.model,
        individual_models=lambda state: state.model,
        select=lambda state, round, key: state.model,
        init_memory=lambda key, client_id: "memory",
        between_rounds=lambda state, round, key, client: (
            Counter({"params": state.model["params"] + round}),
            {"reported": 1},
        ),
        traffic=lambda usual, state, uploads, cohort, round: usual._replace(down=(parcels, state.model)),
        personal_model=lambda state, memory, data, key: (state.model, memory),
        models=view("model"),
    )
    wrapped, key = server_optimizer(inner, optax.sgd(1.0, momentum=0.5)), jax.random.key(0)
    state = wrapped.init(key)
    model = state.inner.model
    assert wrapped.dispatch(state, None, key)["model"] is model
    assert wrapped.select(state, 0, key) is model
    assert wrapped.global_model(state) is model and wrapped.individual_models(state) is model
    assert wrapped.personal_model(state, "own", None, key) == (model, "own")
    parted = server_optimizer(inner._replace(personal_part=lambda state, client: (state, client)), optax.sgd(1.0))
    assert parted.personal_part(state, 5) == (state.inner, 5)
    assert parted.personal_model is inner.personal_model
    assert wrapped.traffic(Traffic(), state, {}, None, 0).down == (parcels, model)
    assert (wrapped.init_memory, wrapped.client_update) == (inner.init_memory, inner.client_update)
    state, _ = wrapped.server_update(state, {}, None, 0, key)
    later, reported = wrapped.between_rounds(state, 4, key, None)
    assert reported == {"reported": 1} and later.optimizer is state.optimizer
    np.testing.assert_array_equal(later.inner.model["params"], 4)
    bare = server_optimizer(indep.build(None, None), optax.sgd(1.0))
    assert (bare.select, bare.between_rounds, bare.traffic, bare.personal_model) == (None,) * 4


# --- Which strategies -----------------------------------------------------------------------------------------------


REFUSED = (
    "dpsgd",
    "gossipmr",
    "kgt",
    "pfedbayes",
    "gitfl",
    "fedmerge",
    "fedme",
    "pfedhr",
    "fedmd",
    "fedgh",
    "fedproto",
    "fedtgp",
    "fedkemf",
    "fccl",
    "local",
)


@pytest.mark.parametrize("inner", [name for name in on_any_network() if name not in (*REFUSED, "optimized")])
def test_servers_that_name_their_models_take_an_optimizer(problem, inner):
    strategy = inner_strategy(inner, problem)
    wrapped = server_optimizer(strategy, make_server_optimizer("adam"))
    state = jax.eval_shape(wrapped.init, jax.random.key(0))
    before, after = strategy.models.get(state.inner), wrapped.models.get(state)
    assert jax.tree.leaves(before) == jax.tree.leaves(after)
    count = len(jax.tree.leaves(before["params"]))
    assert len(jax.tree.leaves(state.optimizer)) == 2 * count  # m and v, and no counter
    moved = wrapped.models.set(state, jax.tree.map(lambda leaf: None, before))
    others = jax.tree.leaves(state), jax.tree.leaves(moved)
    assert len(others[0]) - len(others[1]) == len(jax.tree.leaves(before))  # nothing but the models was touched


@pytest.mark.parametrize("inner", REFUSED)
def test_others_are_refused_in_one_line(problem, inner):
    with pytest.raises(UserError) as caught:
        server_optimizer(inner_strategy(inner, problem), optax.sgd(1.0))
    message = str(caught.value)
    assert "no server models" in message and "server_optimizer=none" in message and "\n" not in message


@pytest.mark.slow
def test_control_variates_stay_those_of_the_inner_server(engine, close):
    """With plain SGD of rate 1/2 the model goes half the way of SCAFFOLD's, and c is what SCAFFOLD's is."""
    plain = engine("scaffold", "perceptron")
    half = engine("optimized", "perceptron", hyper=Optimized("scaffold", optimizer="momentum", lr=0.5, momentum=0.0))
    start, after = plain.init().server, plain.run(plain.init(), 1)[0].server
    result = half.run(half.init(), 1)[0].server.inner
    close(result.control, after.control)
    close(result.model["params"], trees.interpolate(start.model["params"], after.model["params"], 0.5))


def test_the_command_refuses_them_before_a_folder_exists(tmp_path, capsys):
    folder = tmp_path / "run"
    flags = ["--strategy=pfedhr", "--public_share=0.1", "--server_optimizer=adam"]
    assert main.main([*flags, "--noprogress", f"--run_dir={folder}"]) == 2
    out, shown = capsys.readouterr()
    assert (out, shown.count("\n")) == ("", 1) and "no server models" in shown and "--server_optimizer=none" in shown
    assert not folder.exists()


# --- With BatchNorm, in rounds --------------------------------------------------------------------------------------


CROSSED = Optimized("fedcross", optimizer="momentum")
# The statistics of all are the inner strategy's, see above.
SETTINGS = [
    CROSSED,
    *(
        pytest.param(Optimized("fedavg", optimizer=name), marks=pytest.mark.slow)
        for name in ("momentum", "adam", "yogi", "adagrad")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("hyper", SETTINGS, ids=lambda hyper: f"{hyper.inner}-{hyper.optimizer}")
def test_variances_stay_positive_and_models_finite(engine, hyper):
    engine = engine("optimized", hyper=hyper)
    progress, _ = engine.run(engine.init(), 20)
    variances = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(progress.server.inner):
        if path[-1].key == "var":
            variances += 1
            assert np.all(np.asarray(leaf) >= 0)
    assert variances
    assert bool(trees.all_finite(engine.deployed(progress)))


@pytest.mark.slow
def test_a_checkpoint_continues_bit_for_bit(engine, equal, tmp_path):
    engine = engine("optimized", hyper=CROSSED)
    progress, _ = engine.run(engine.init(), 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, progress, {})
    straight, _ = engine.run(progress, 2)
    restored, _ = checkpoints.restore(engine.shapes())
    resumed, _ = engine.run(engine.place(restored), 2)
    equal(straight, resumed)
    velocity, _ = resumed.server.optimizer
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(velocity)) > 0


# --- As flags ----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # quick: the optimizers by hand
def test_the_command_runs_fedcross_with_server_momentum(tmp_path, capsys):
    flags = ["--strategy=fedcross", "--server_optimizer=momentum", "--server_lr=0.5", "--rounds=2", "--noprogress"]
    flags += ["--model=logistic", "--local_epochs=1", "--clients=6", "--cohort=3"]
    assert main.main([*flags, f"--run_dir={tmp_path / 'run'}"]) == 0
    assert "--server_optimizer=momentum" in (tmp_path / "run" / "run.flags").read_text()
    assert "accuracy" in capsys.readouterr().out
