"""Optimizers by name: two steps of each against optax by hand, their numbers, and rows of a user."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_mr as fmr
from fedjax_mr.client import local, optimizers
from fedjax_mr.client.optimizers import OPTIMIZERS, make_optimizer
from fedjax_mr.config import imports
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.testing.federations import federated, network_of

PARAMS = {"matrix": np.float32([[1, -2, 3], [0.5, 1, -1]]), "bias": np.float32([0.1, -0.2, 0.3])}
GRADIENTS = [
    {"matrix": np.float32([[1, 2, -1], [0, 1, 3]]), "bias": np.float32([1, -1, 2])},
    {"matrix": np.float32([[-1, 0.5, 2], [1, -2, 1]]), "bias": np.float32([0.5, 1, -1])},
]
LR, DECAY = 0.1, 0.2


def by_optax(optimizer):
    """Two steps with a transformation of optax."""
    params, state = PARAMS, optimizer.init(PARAMS)
    for gradient in GRADIENTS:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def decayed(optimizer):
    return optax.chain(optax.add_decayed_weights(DECAY), optimizer)


HAND = {
    "sgd": (decayed(optax.sgd(LR, 0.5)), {"momentum": 0.5}),
    "nesterov": (decayed(optax.sgd(LR, 0.5, nesterov=True)), {"momentum": 0.5}),
    "adam": (decayed(optax.adam(LR)), {}),
    "adamw": (optax.adamw(LR, weight_decay=DECAY), {}),
    "adagrad": (decayed(optax.adagrad(LR)), {}),
    "lion": (optax.lion(LR, weight_decay=DECAY), {}),
    "muon": (optax.contrib.muon(LR, weight_decay=DECAY, adam_weight_decay=DECAY), {}),
    "prodigy": (optax.contrib.prodigy(LR, weight_decay=DECAY), {}),
    "schedule_free": (optax.contrib.schedule_free_sgd(LR, weight_decay=DECAY), {}),
}


def test_the_rows_of_this_package():
    assert OPTIMIZERS is fmr.OPTIMIZERS and set(HAND) == set(OPTIMIZERS)
    assert {name for name in OPTIMIZERS if optimizers.has(name, "momentum")} == {"sgd", "nesterov"}
    assert all(optimizers.has(name, "weight_decay") for name in OPTIMIZERS)


@pytest.mark.parametrize("name", HAND)
@jax.numpy_dtype_promotion("standard")  # optax's Adam divides by 1 - decay**count, a float to an integer power
def test_two_steps_are_those_of_optax(name):
    """The numbers are traced here, and the gradient of a limit of 100 is not clipped."""
    theirs, momentum = HAND[name]

    @jax.jit
    def steps(lr, decay):
        ours = make_optimizer(name, lr=lr, weight_decay=decay, clip_norm=100.0, **momentum)
        return [by_optax(each)[0] for each in (ours, theirs, make_optimizer(name, lr=LR, **momentum))]

    params, expected, without = steps(np.float32(LR), np.float32(DECAY))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6), params, expected)
    assert not np.array_equal(params["matrix"], without["matrix"]), "weight decay changes the steps"


QUICK = ("sgd", "muon", "schedule_free")  # the sum of the gradients, products of matrices, another upload


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HAND]
)
@jax.numpy_dtype_promotion("standard")
def test_a_simulator_trains_and_another_learning_rate_compiles_nothing(name):
    def simulator(lr):
        setting = local.setting(name, lr=lr, epochs=1, batch_size=4)
        return fmr.Simulator(
            "fedavg", network_of("linear"), federated(), cohort=3, local=setting, layout=fmr.Layout(devices=1, lanes=1)
        )

    kernel = lambda state: np.asarray(state.server.model["params"]["classifier"]["dense"]["kernel"])
    first = simulator(0.01)
    one, _ = first.run(first.init(), 1)
    compiled = []

    def count(event, seconds, **more):
        compiled.append(event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        second = simulator(0.02)
        other, _ = second.run(second.init(), 1)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not any(compiled)
    assert np.isfinite(kernel(one)).all() and not np.array_equal(kernel(one), kernel(other))


def test_schedule_free_uploads_the_mean_of_its_iterates():
    """By hand: two steps of SGD for z, of which the upload is the mean, whatever the parameters of the gradients."""
    setting = local.setting("schedule_free", lr=0.5, epochs=2, batch_size=1)
    loss = lambda params, state, batch, key: (jnp.sum(jnp.square(params["w"])) / 2, state)
    step = local.sgd(loss, setting)
    carry = jax.jit(step.init)({"params": {"w": np.float32([1.0])}})
    assert jax.jit(step.result)(carry)["params"]["w"] == 1  # no step: no rounding either
    for _ in range(2):
        carry, _ = jax.jit(lambda carry: step.step(carry, None, None))(carry)
    # z: 1 -> 0.5, x = 0.5; the gradient at y = 0.5 is 0.5, so z = 0.25 and x = (0.5 + 0.25) / 2.
    np.testing.assert_allclose(step.result(carry)["params"]["w"], [0.375], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "nestorov"}, "unknown optimizer 'nestorov'; did you mean 'nesterov'"),
        ({"optimizer": "lion", "momentum": 0.9}, "momentum=0.9 has no effect with optimizer=lion: .* sgd, nesterov$"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum=0.9 has no effect with optimizer=adam"),
    ],
)
def test_a_number_that_an_optimizer_does_not_have_is_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        resolve(Config(**changes))
    with pytest.raises(UserError, match=message):
        local.setting(changes.pop("optimizer"), **changes)


@pytest.mark.parametrize("strategy", ["scaffold", "mofedsam"])
def test_methods_that_need_plain_sgd_refuse_the_others(strategy):
    with pytest.raises(UserError, match="pass optimizer=sgd"):
        fmr.Simulator(
            strategy,
            network_of("linear"),
            federated(),
            cohort=3,
            local=local.setting("nesterov"),
            layout=fmr.Layout(devices=1, lanes=1),
        )


FILE = """
import fedjax_mr as fmr
import optax

def signs(lr, weight_decay):
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sign_sgd(lr))

fmr.OPTIMIZERS["signs"] = {row}
"""


@pytest.fixture
def restored():
    """The registry as it was, after a test that adds to it."""
    before, imported = dict(OPTIMIZERS), dict(imports._IMPORTED)
    yield
    for each, kept in ((OPTIMIZERS, before), (imports._IMPORTED, imported)):
        each.clear()
        dict.update(each, kept)


def test_a_row_of_a_user(tmp_path, restored):
    path = tmp_path / "signs_of_a_user.py"
    path.write_text(FILE.format(row="signs"))
    imports.load([str(path)])
    config = resolve(Config(optimizer="signs", weight_decay=0.1, imports=(str(path),))).config
    assert config.imports[0].startswith(f"{path}#"), "a run folder records the code of its optimizer"
    stepped, _ = jax.jit(lambda: by_optax(make_optimizer("signs", lr=LR, weight_decay=1.0)))()
    np.testing.assert_allclose(stepped["bias"], [0.1 - 0.2, -0.2 + 0.0, 0.3 - 0.0], atol=1e-6)
    jax.eval_shape(lambda: by_optax(make_optimizer("signs", lr=LR)))  # without weight decay it gets 0
    setting = local.setting("signs", lr=0.1, epochs=1, batch_size=4)
    own = fmr.Simulator(
        "fedavg", network_of("linear"), federated(), cohort=3, local=setting, layout=fmr.Layout(devices=1, lanes=1)
    )
    assert own.code is not None, "the code of a user is traced again in every simulator"


@pytest.mark.parametrize("row", ["optax.sgd(0.1)", "optax.adam", "lambda momentum: optax.sgd(0.1, momentum)"])
def test_a_row_that_is_no_function_of_the_numbers_is_one_line(tmp_path, restored, row):
    path = tmp_path / "wrong_optimizer.py"
    path.write_text(FILE.format(row=row))
    with pytest.raises(UserError, match=r"fmr\.OPTIMIZERS\['signs'\] takes a function build\(lr, momentum, weight_dec"):
        imports.load([str(path)])
    assert "signs" not in OPTIMIZERS
