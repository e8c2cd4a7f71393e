"""Learning rates over the rounds: their factors by hand, and what a round trains with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_mr as fmr
from fedjax_mr.client import local
from fedjax_mr.client.schedules import schedule
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.testing.federations import federated, network_of


@pytest.mark.parametrize(
    ("name", "numbers", "factors"),
    [
        ("constant", {"warmup": 4}, [0.25, 0.5, 0.75, 1, 1]),
        ("exponential", {"decay": 0.5}, [1, 0.5, 0.25, 0.125, 0.0625]),
        ("exponential", {"decay": 0.5, "warmup": 2}, [0.5, 0.5, 0.25, 0.125, 0.0625]),
        ("step", {"decay": 0.1, "every": 2}, [1, 1, 0.1, 0.1, 0.01]),
        ("cosine", {"over": 4}, [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0]),
    ],
)
def test_factors_by_hand(name, numbers, factors):
    made = schedule(name, **numbers)
    found = jax.jit(jax.vmap(lambda round: made(round)))(np.arange(5, dtype=np.float32))
    np.testing.assert_allclose(found, factors, rtol=1e-6, atol=1e-7)
    assert len(jax.tree.leaves(made)) == len(numbers), "the numbers are arguments of the compiled programs"


def test_a_cosine_stays_at_zero():
    assert float(schedule("cosine", over=3)(jnp.float32(5))) < 1e-7


def test_a_constant_learning_rate_is_no_schedule():
    assert schedule() is None and local.setting().in_round(7) == local.setting()


def made(strategy, lr, **options):
    return fmr.Simulator(
        strategy,
        network_of("linear"),
        federated(),
        cohort=3,
        local=local.setting(lr=lr, momentum=0.0, epochs=2, batch_size=4, **options),
        layout=fmr.Layout(devices=1, lanes=1),
    )


@pytest.mark.parametrize("strategy", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_a_round_is_that_of_its_learning_rate(strategy, close):
    """Also for SCAFFOLD, whose control variates are divided by the learning rate: 0.2, 0.1 and 0.05 in three rounds."""
    falling = made(strategy, 0.2, schedule=lambda round: 0.5**round)
    state, _ = falling.run(falling.init(), 3)
    by_hand = falling.init()
    for lr in (0.2, 0.1, 0.05):
        by_hand, _ = made(strategy, lr).run(by_hand, 1)
    close(state.server, by_hand.server)
    constant, _ = made(strategy, 0.2).run(falling.init(), 3)
    assert not np.allclose(state.server.model["params"]["classifier"]["dense"]["kernel"],
                           constant.server.model["params"]["classifier"]["dense"]["kernel"])  # fmt: skip


def test_another_number_of_a_schedule_compiles_nothing():
    """The numbers of two named schedules are arguments, so the structures of the two settings are equal."""
    one, other = (local.setting(schedule=schedule("exponential", decay=decay)) for decay in (0.9, 0.99))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.structure(one) != jax.tree.structure(local.setting())


def test_an_optax_rule_takes_no_schedule():
    setting = dataclasses.replace(local.setting(schedule=optax.constant_schedule(1.0)), rule=optax.sgd(0.1))
    with pytest.raises(UserError, match="schedule= needs one of the optimizers sgd"):
        setting.in_round(0)


def test_a_cosine_ends_with_the_rounds_of_the_run_unless_it_is_told():
    """The number is recorded, so a longer run that is resumed names the difference instead of another curve."""
    assert resolve(Config(lr_schedule="cosine", rounds=7)).config.lr_over == 7
    assert resolve(Config(lr_schedule="cosine", rounds=7, lr_over=20)).config.lr_over == 20
    assert resolve(Config(rounds=7)).config.lr_over is None


def test_asynchronous_clients_keep_their_learning_rate():
    with pytest.raises(UserError, match="the learning rate must be constant: use lr_schedule=constant and lr_warmup=0"):
        resolve(Config(mode="async", lr_schedule="exponential"))
    with pytest.raises(UserError, match="the learning rate must be constant"):
        resolve(Config(mode="async", lr_warmup=3.0))
