"""LoRA: adapters beside frozen weights, their products and their units."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.engine.layout import Layout
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.errors import UserError
from fedjax_mr.models import Model, adapters, parts, precision
from fedjax_mr.strategies import fedcross, fedmr
from fedjax_mr.testing.adapted import WHOLE, Attention, adapted, random_models
from fedjax_mr.testing.federations import federated, tree_close, tree_equal

X = np.random.default_rng(9).standard_normal((5, 4, 4, 1)).astype(np.float32)
K = 3
SLOW = pytest.mark.slow
merged, mean = jax.jit(adapters.merged), jax.jit(trees.mean)
init, apply, mean_of_products = jax.jit(Model.init), jax.jit(Model.apply), jax.jit(Model.mean)
all_merged = jax.jit(jax.vmap(adapters.merged, in_axes=(None, 0)))


def random_model(model):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], random_models(model, 1))


def test_round_0_is_the_base_and_only_adapters_train():
    model = adapted()
    variables = init(model, jax.random.key(1))
    base = merged(model, variables)
    assert jax.tree.map(jnp.shape, base) == jax.tree.map(lambda leaf: leaf.shape, WHOLE.shapes())
    tree_close(apply(model, variables, X), apply(WHOLE, base, X), atol=1e-6)
    names = {layer.name: layer.names for layer in model.layers()}
    assert names == {"attend/query": ("lora_a", "lora_b"), "attend/value": ("lora_a", "lora_b")}
    assert model.num_parameters() == 2 * (4 * 2 + 2 * 4)
    tree_equal(variables["params"], init(model, jax.random.key(2))["params"])  # all starts share one A


def test_the_module_of_a_trained_model_has_its_adapters():
    model = adapted()
    variables = random_model(model)
    bound = jax.jit(lambda model, variables: model.bound(variables)(X))
    tree_close(bound(model, variables), apply(model, variables, X), atol=1e-5)


def test_a_change_of_the_base_is_computed_in_the_precision_of_the_layer():
    model = precision.with_precision(adapted(), "bfloat16")
    state = {adapters.CHANGE: jax.eval_shape(lambda: adapters.no_change(model))}
    run = lambda params, state: model.train_apply(params, state, X, mask=None, key=jax.random.key(0))[0]
    closed = jax.make_jaxpr(run)(model.shapes()["params"], state)
    products = [each for each in precision.equations(closed.jaxpr) if each.primitive.name in precision.PRODUCTS]
    assert len(products) > 8 and closed.out_avals[0].dtype == jnp.float32
    assert {each.aval.dtype.name for product in products for each in product.invars} == {"bfloat16"}


class Wide(nn.Module):
    """Two dense layers of 32 x 32 weights."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        return nn.Dense(32, use_bias=False, name="two")(nn.Dense(32, use_bias=False, name="one")(x))


def test_dropout_drops_inputs_of_the_adapters_in_training_alone():
    """All kernels and factors are the identity, so that the output shows which inputs of the adapter were dropped."""
    eye, x = np.eye(32, dtype=np.float32), np.ones((4, 32), np.float32)
    base = {"params": {name: {"kernel": eye} for name in ("one", "two")}}
    model = adapters.lora(
        Model(Wide(), (32,)), 32, 32.0, key=jax.random.key(0), targets="*", head=False, variables=base, dropout=0.25
    )
    only = lambda layer: {"params": {name: {"lora_a": eye, "lora_b": eye * (name == layer)} for name in ("one", "two")}}
    drop = jax.jit(lambda params, key: model.train_apply(params, {}, x, mask=None, key=jax.random.key(key))[0])
    train = lambda layer, key: np.asarray(drop(only(layer)["params"], key))
    one, again, other, two = train("one", 1), train("one", 1), train("one", 2), train("two", 1)
    added = one - 1  # x W is 1 in any case
    np.testing.assert_allclose(np.unique(added.round(4)), [0.0, 1 / 0.75], atol=1e-3)
    assert 0.1 < np.mean(added == 0) < 0.4  # 128 draws with the probability 0.25
    tree_equal(one, again)
    assert np.any(one != other) and np.any(one != two)
    tree_equal(apply(model, only("one"), x), np.full((4, 32), 2.0))


def test_without_dropout_the_training_draws_nothing():
    run = lambda model: jax.make_jaxpr(
        lambda params: model.train_apply(params, {}, X, mask=None, key=jax.random.key(0))[0]
    )(model.shapes()["params"])
    draws = lambda model: "shift_right_logical" in str(run(model))  # the rotations of Threefry
    assert not draws(adapted()) and draws(adapted(dropout=0.1))


@pytest.mark.parametrize(
    "targets", [pytest.param("", marks=SLOW), pytest.param("attend/out/kernel,last/kernel", marks=SLOW), "*"]
)
def test_adapters_equal_the_merged_network(targets):
    model = adapted(targets=targets)
    variables = random_model(model)
    tree_close(apply(model, variables, X), apply(WHOLE, merged(model, variables), X), atol=1e-5)
    train = jax.jit(lambda params: model.train_apply(params, {}, X, mask=np.ones(5), key=jax.random.key(0)))
    out, state = train(variables["params"])
    tree_close(out, apply(model, variables, X), atol=1e-6)
    assert state == {}


def test_the_head_may_train_beside_and_one_factor_alone():
    with_head = adapted(head=True)
    assert [layer.name for layer in with_head.layers()] == ["attend/query", "attend/value", "last"]
    first, second = (np.asarray(init(with_head, jax.random.key(seed))["params"]["last"]["kernel"]) for seed in (1, 2))
    assert np.any(first != second)
    only_b = adapted(trainable="*/lora_b")
    assert {layer.names for layer in only_b.layers()} == {("lora_b",)}
    models = random_models(only_b, K)
    tree_equal(mean_of_products(only_b, models), mean(models))  # B alone is linear


def test_frozen_products_are_not_repeated_for_each_client():
    model, models = adapted(), random_models(adapted(), K)
    text = str(jax.make_jaxpr(jax.vmap(model.apply, in_axes=(0, None)))(models, X))
    assert f"f32[{K},4,2,2]" not in text  # no kernel of the attention exists K times


def test_the_deployed_mean_is_the_mean_of_the_products():
    model = adapted(head=True, targets="*")
    models, weights = random_models(model, K), np.float32([1, 2, 5])
    deployed = mean_of_products(model, models, weights=weights)
    dense = mean(all_merged(model, models), weights=weights)
    tree_close(merged(model, deployed), dense, atol=1e-5)
    tree_close(apply(model, deployed, X), apply(WHOLE, dense, X), atol=1e-5)
    factors = merged(model, mean(models, weights=weights))
    query, expected = (np.asarray(each["params"]["attend"]["query"]["kernel"]) for each in (factors, dense))
    assert np.abs(query - expected).max() > 0.1
    again = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), deployed)  # a change is averaged, too
    tree_close(merged(model, mean_of_products(model, again)), dense, atol=1e-5)


def rotated(models):
    """The same adapters with other factors (A G, G^-1 B), with another G for each model."""
    params = models["params"]
    for path, a, b in adapters.pairs(models):
        g = jax.random.normal(jax.random.key(5), (K, a.shape[-1], a.shape[-1])) + 2 * jnp.eye(a.shape[-1])[None]
        params = parts.joined(params, {path[0]: {path[1]: {"lora_a": a @ g, "lora_b": jnp.linalg.solve(g, b)}}})
    return {"params": params}


@pytest.mark.slow
@pytest.mark.parametrize(
    "hyper", [fedmr.Hyper(), pytest.param(fedmr.Hyper(unit="segment", segment_of="leaves"), marks=SLOW)]
)
def test_recombination_does_not_depend_on_the_factors(hyper):
    model, models = adapted(), random_models(adapted(), K)
    units = fedmr.recombination_units(hyper, model.layers())
    assert len(units) == 2 and all(len(unit) == 2 for unit in units)
    key = jax.random.key(3)
    recombine = jax.jit(lambda models: fedmr.recombine(models, units, key))
    one, other = (all_merged(model, recombine(each)) for each in (models, rotated(models)))
    tree_close(one, other, rtol=1e-3, atol=1e-4)
    for kernel, before in zip(jax.tree.leaves(one), jax.tree.leaves(all_merged(model, models)), strict=True):
        flat = lambda each: np.sort(np.asarray(each).reshape(K, -1).sum(axis=1))
        np.testing.assert_allclose(flat(kernel), flat(before), rtol=1e-3, atol=1e-4)  # the same K kernels


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cosine", pytest.param("printed", marks=SLOW)])
def test_similarity_compares_products(kind):
    model, models = adapted(), random_models(adapted(), K)
    table = lambda each: fedcross.similarities(each, kind, (), gram=model.gram)
    dense = jax.vmap(lambda each: adapters.changes(model, each))(models)
    tree_close(table(models), fedcross.similarities({"params": dense}, kind, ()), rtol=1e-4)
    pairs = np.asarray(trees.cosines(dense))[np.triu_indices(K, 1)]
    np.testing.assert_allclose(model.mean_cosine(models), pairs.mean(), rtol=1e-4)
    tree_close(table(models), table(rotated(models)), rtol=1e-3, atol=1e-3)
    assert np.abs(fedcross.similarities(models, kind, ()) - table(models)).max() > 0.01


def test_mixing_factors_errs_by_the_product_of_the_differences():
    models, alpha = random_models(adapted(), 2), 0.9
    (_, a, b), *_ = adapters.pairs(models)
    mixed = jax.jit(trees.mix)(models, np.float32([[alpha, 1 - alpha], [1 - alpha, alpha]]))
    (_, mixed_a, mixed_b), *_ = adapters.pairs(jax.device_get(mixed))
    wanted = alpha * a[0] @ b[0] + (1 - alpha) * a[1] @ b[1]
    error = alpha * (1 - alpha) * (a[0] - a[1]) @ (b[0] - b[1])
    tree_close(mixed_a[0] @ mixed_b[0], wanted - error, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedmr", "fedcross"])
def test_several_models_train_adapters(strategy):
    model = adapted()
    simulator = Simulator(strategy, model, federated(), cohort=K, layout=Layout(devices=1, lanes=K))
    state, report = simulator.run(simulator.init(), 1)
    per_client = 4 * model.num_parameters()
    assert report.traffic.num_bytes() == (K * per_client, K * per_client, 0)
    deployed = jax.device_get(simulator.deployed(state))
    models = jax.device_get(state.server.models)
    dense = mean(all_merged(model, models))
    x, y = federated().dataset.x, federated().dataset.y
    share = np.mean(np.argmax(np.asarray(WHOLE.apply(dense, x)), 1) == y)
    assert simulator.test(state).accuracy == pytest.approx(share, abs=0.01)
    tree_close(merged(model, deployed), dense, atol=1e-5)
    tree_equal(simulator.rounds.constants.problem.model.frozen, model.frozen)


def test_bad_input_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"targets=q/\* matches no dense kernel of attention; its dense kernels"):
        adapted(targets="q/*")
    with pytest.raises(UserError, match="no frozen variables yet"):
        adapters.lora(adapted(), key=jax.random.key(0))
    with pytest.raises(UserError, match="matches no parameter of attention with adapters"):
        adapted(trainable="nothing")
    with pytest.raises(UserError, match="lacks params/attend"):
        adapters.lora(Model(Attention(3), (4, 4, 1)), key=jax.random.key(0), variables={"params": {}})


def test_two_ranks_over_one_base_have_shapes_of_their_own():
    small, large = (adapters.lora(WHOLE, rank, key=jax.random.key(0)) for rank in (1, 2))
    for model in (small, large, small):
        assert model.shapes() == jax.eval_shape(model.init, jax.random.key(0))
    assert large.num_parameters() > small.num_parameters()
