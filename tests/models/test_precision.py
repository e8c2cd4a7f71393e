"""Mixed precision: products in bfloat16; gradients, statistics, logits and variables in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedjax_mr as fmr
from fedjax_mr import models
from fedjax_mr.errors import UserError
from fedjax_mr.models import Zoo, parts, precision, user_module
from fedjax_mr.testing.federations import federated, tree_close, tree_equal

KEY = jax.random.key(0)


def built(name):
    row = models.MODELS[name]
    return models.build(
        name, input_shape=row.input_shape, num_classes=row.num_classes, input_dtype=row.input_dtype, projection=0
    )


def gradients(model):
    """The function (variables, x) -> gradients, logits and new statistics in training mode."""

    def loss(params, state, x):
        logits, state = model.train_apply(params, state, x, mask=jnp.ones(len(x)), key=KEY)
        return jnp.square(jax.nn.log_softmax(logits)).mean(), (logits, state)

    def both(variables, x):
        state = {name: tree for name, tree in variables.items() if name != "params"}
        return jax.grad(loss, has_aux=True)(variables["params"], state, x)

    return both


@pytest.mark.parametrize("name", ["cnn_digits", pytest.param("resnet20", marks=pytest.mark.slow), "lstm1"])
def test_all_products_of_a_network_are_in_bfloat16(name):
    """Those of the backward pass, too. Nothing is computed."""
    model = precision.with_precision(built(name), "bfloat16")
    x = jax.ShapeDtypeStruct((2, *model.input_shape), model.input_dtype)
    closed = jax.make_jaxpr(gradients(model))(model.shapes(), x)
    products = [each for each in precision.equations(closed.jaxpr) if each.primitive.name in precision.PRODUCTS]
    assert len(products) > 5 and all(each.dtype == jnp.float32 for each in closed.out_avals)
    assert {each.aval.dtype.name for product in products for each in product.invars} == {"bfloat16"}


def test_gradients_are_close_to_those_of_float32():
    model = models.build("mlp", input_shape=(4, 4, 1), num_classes=3)
    init, apply = jax.jit(models.Model.init), jax.jit(models.Model.apply)
    low, variables = precision.with_precision(model, "bfloat16"), init(model, KEY)
    x = np.random.default_rng(0).standard_normal((8, *model.input_shape)).astype(np.float32)
    ours, exact = (jax.jit(gradients(each))(variables, x) for each in (low, model))
    tree_close(ours, exact, rtol=0.1, atol=0.02 * np.abs(exact[1][0]).max())
    assert not np.array_equal(ours[1][0], exact[1][0])
    tree_equal(init(low, KEY), variables)
    tree_equal(apply(low, variables, x), apply(model, variables, x))  # evaluation is exact
    assert precision.with_precision(model, "float32") is model


def test_frozen_variables_and_several_networks_take_part():
    facts = {"input_shape": (4, 4, 1), "num_classes": 3}
    model = models.build("mlp", **facts)
    partly = precision.with_precision(parts.partly(model, "classifier/*", key=KEY), "bfloat16")
    assert precision.product_dtypes(partly) == {jnp.bfloat16}
    zoo = precision.with_precision(Zoo.of([model, models.build("logistic", **facts)]), "bfloat16")
    assert [each.precision for each in (zoo, *zoo.networks)] == ["bfloat16"] * 3
    assert precision.product_dtypes(zoo) == {jnp.bfloat16}


def test_a_model_that_is_given_again_keeps_its_networks_and_its_precision():
    facts = {"input_shape": (4, 4, 1), "num_classes": 3}
    members = [precision.with_precision(models.build(name, **facts), "bfloat16") for name in ("mlp", "logistic")]
    assert models.of_module(members[0], **facts).precision == "bfloat16"
    again = models.of_module(Zoo.of(members), **facts)
    assert again == Zoo.of(members) and again.precision == "bfloat16"
    with pytest.raises(UserError, match="in one precision"):
        Zoo.of([members[0], models.build("logistic", **facts)])


class OfNNX(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(4, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs)
        self.last = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def test_batch_norm_of_nnx_does_not_return_to_float32():
    model = lambda: user_module.bind(OfNNX, input_shape=(4,), num_classes=3, input_dtype=np.float32)
    with jax.numpy_dtype_promotion("standard"):  # Flax's own layers rely on it
        assert precision.product_dtypes(precision.with_precision(model(), "bfloat16")) == {jnp.bfloat16}


def test_no_effect_is_one_line():
    fixed = user_module.bind(nn.Dense(3, dtype=jnp.float32), input_shape=(4,), num_classes=3, input_dtype=np.float32)
    with pytest.raises(UserError, match="bfloat16 has no effect on Dense, whose layers choose their own dtype"):
        precision.with_precision(fixed, "bfloat16")
    with pytest.raises(UserError, match="precision"):
        precision.with_precision(fixed, "bfloat61")


@pytest.mark.slow
def test_runs_learn_and_warn_on_cpus(tmp_path, capsys):
    accuracy = {}
    for name in ("float32", "bfloat16"):
        config = fmr.Config(
            strategy="fedmr", precision=name, rounds=20, clients=6, cohort=3, devices=1,
            run_dir=str(tmp_path / name),
        )  # fmt: skip
        accuracy[name] = fmr.run(config, record=False).summary["accuracy_last"]
        assert ("--precision=bfloat16 is usually slower on CPUs" in capsys.readouterr().err) == (name == "bfloat16")
    assert accuracy["bfloat16"] == pytest.approx(accuracy["float32"], abs=0.1) and accuracy["float32"] > 0.5
    variables = fmr.load(tmp_path / "bfloat16").variables
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"float32"}


@pytest.mark.slow
def test_several_methods_train_in_bfloat16():
    dataset = federated().dataset
    model = models.build("mlp", input_shape=dataset.x.shape[1:], num_classes=dataset.num_classes)
    model = precision.with_precision(model, "bfloat16")
    for strategy in ("scaffold", "moon", "fedcross"):
        local = fmr.local.setting(epochs=1, batch_size=4)
        one = fmr.Simulator(strategy, model, federated(), cohort=3, local=local, layout=fmr.Layout(devices=1))
        state, report = one.run(one.init(), 2)
        assert np.isfinite(report.train_loss)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(one.deployed(state))} == {"float32"}
