"""Frozen variables: a part of a network trains, the other part is shared by all clients and never sent."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.client import local
from fedjax_mr.engine import trials
from fedjax_mr.engine.layout import Layout
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.errors import UserError
from fedjax_mr.models import Model, Zoo, layers, parts
from fedjax_mr.testing.federations import SIZES, bytes_of_a_round, federated, numbers_like, tree_close, tree_equal


class Net(nn.Module):
    """Two BatchNorm layers, one of which takes its mode as a field, and a head."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(6, name="body")(x.reshape(x.shape[0], -1))
        x = layers.BatchNorm(name="ours")(x, train=train)
        x = nn.BatchNorm(use_running_average=not train, name="theirs")(x)
        return nn.Dense(3, name="head")(nn.tanh(x))


WHOLE = Model(Net(), (4, 4, 1), name="net")
X = np.random.default_rng(2).standard_normal((5, 4, 4, 1)).astype(np.float32)
init, apply = jax.jit(Model.init), jax.jit(Model.apply)


@jax.jit
def trained(model, params, state):
    return model.train_apply(params, state, X, mask=jnp.ones(5), key=jax.random.key(0))


def pretrained():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.uniform(0.5, 1, leaf.shape).astype(np.float32), WHOLE.shapes())


def test_split_by_patterns_and_join_again():
    variables = pretrained()
    trained, frozen = parts.split(variables, "head/*, ours/mean")
    assert set(trained) == {"params", "batch_stats"}
    assert set(trained["params"]) == {"head"}
    assert trained["batch_stats"] == {"ours": {"mean": variables["batch_stats"]["ours"]["mean"]}}
    tree_equal(parts.joined(frozen, trained), variables)
    tree_equal(parts.without(variables, frozen), trained)
    by_rule, _ = parts.split(variables, lambda path: path.endswith("bias"))
    assert {name: list(leaves) for name, leaves in by_rule["params"].items()} == {
        name: ["bias"] for name in ("body", "ours", "theirs", "head")
    }


def test_a_model_speaks_of_the_part_that_trains():
    model = parts.partly(WHOLE, "head/*", variables=pretrained())
    assert list(model.shapes()["params"]) == ["head"] and list(model.shapes()) == ["params"]
    assert model.num_parameters() == 6 * 3 + 3
    assert model.num_bytes() == 4 * (6 * 3 + 3)
    assert [layer.name for layer in model.layers()] == ["head"]
    variables = init(model, jax.random.key(1))
    tree_equal(variables, {"params": {"head": pretrained()["params"]["head"]}})
    tree_equal(apply(model, variables, X), apply(WHOLE, pretrained(), X))


def test_frozen_variables_come_from_the_key_of_the_whole_network():
    key = jax.random.key(3)
    model = parts.partly(WHOLE, "head/*", key=key)
    tree_close(model.whole(init(model, key)), init(WHOLE, key), rtol=1e-6)


def test_layers_with_frozen_statistics_run_in_evaluation_mode():
    model = parts.partly(WHOLE, "head/*", variables=pretrained())
    out, state = trained(model, model.start["params"], {})
    assert state == {}
    tree_close(out, apply(WHOLE, pretrained(), X), rtol=1e-6)


def test_statistics_that_train_are_updated_and_others_are_not():
    model = parts.partly(WHOLE, "head/*,ours/*", variables=pretrained())
    variables = numbers_like(model.shapes())
    state = {"batch_stats": variables["batch_stats"]}
    _, new = trained(model, variables["params"], state)
    assert jax.tree.structure(new) == jax.tree.structure(state) and list(new["batch_stats"]) == ["ours"]
    assert np.all(np.asarray(new["batch_stats"]["ours"]["mean"]) != state["batch_stats"]["ours"]["mean"])


def _simulator(model, **options):
    setting = local.setting(lr=0.1, momentum=0.5, epochs=1, batch_size=max(SIZES))
    return Simulator(
        "fedavg", model, federated(), cohort=3, local=setting, layout=Layout(devices=1, lanes=1), **options
    )


def test_frozen_variables_are_never_sent_and_never_change():
    model = parts.partly(WHOLE, "head/*", variables=pretrained())
    simulator = _simulator(model)
    state, report = simulator.run(simulator.init(), 1)
    assert bytes_of_a_round(simulator.rounds) == (3 * 84, 3 * 84, 0)
    assert report.traffic.num_bytes() == (3 * 84, 3 * 84, 0)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.server)) == 21
    tree_equal(simulator.rounds.constants.problem.model.frozen, parts.split(pretrained(), "head/*")[1])
    tested = simulator.test(state)
    whole = model.whole(jax.device_get(simulator.deployed(state)))
    x, y = federated().dataset.x, federated().dataset.y
    assert tested.accuracy == pytest.approx(np.mean(np.argmax(apply(WHOLE, whole, x), 1) == y))


def test_one_program_serves_every_base_of_the_same_shapes():
    one = parts.partly(WHOLE, "head/*", key=jax.random.key(0))
    other = parts.partly(WHOLE, "head/*", key=jax.random.key(1))
    assert one == other and hash(one) == hash(other)
    assert jax.tree.structure(one) == jax.tree.structure(other) != jax.tree.structure(WHOLE)
    assert parts.digest(one.frozen) != parts.digest(other.frozen)


def test_trials_share_one_frozen_copy():
    model, others = (parts.partly(WHOLE, "head/*", key=jax.random.key(seed)) for seed in (0, 1))
    constants = [_simulator(each, seed=1).rounds.constants for each in (model, model, others)]
    stacked = trials.stack_trials(constants[:2])
    tree_equal(stacked.problem.model.frozen, model.frozen)
    assert stacked.problem.sizes.shape == (2, len(SIZES))
    tree_equal(trials.of_trial(stacked, 1).problem.model.frozen, model.frozen)
    with pytest.raises(UserError, match="share the frozen variables"):
        trials.stack_trials(constants)


def test_bad_input_is_refused_in_one_line():
    with pytest.raises(UserError, match="matches no parameter of net; its parameters are body/bias"):
        parts.partly(WHOLE, "hed/*", key=jax.random.key(0))
    with pytest.raises(UserError, match="lacks batch_stats/ours/mean"):
        parts.partly(WHOLE, "head/*", variables={"params": pretrained()["params"]})
    wrong = pretrained() | {
        "params": pretrained()["params"] | {"head": {"kernel": np.zeros((6, 2)), "bias": np.zeros(3)}}
    }
    with pytest.raises(UserError, match="params/head/kernel of shape"):
        parts.partly(WHOLE, "head/*", variables=wrong)
    with pytest.raises(UserError, match="frozen variables, which several networks"):
        Zoo.of([parts.partly(WHOLE, "head/*", key=jax.random.key(0)), WHOLE])
    with pytest.raises(UserError, match="net has frozen variables already"):
        parts.partly(parts.partly(WHOLE, "head/*", key=jax.random.key(0)), "body/*", key=jax.random.key(0))
    assert dataclasses.replace(WHOLE, name="other") != WHOLE
