"""FedASAM: clients use sharpness-aware minimization in a neighbourhood that scales with the weights (ASAM).

Caldarola, Caputo, Ciccone: Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022, with the
neighbourhood of Kwon, Kim, Park, Choi: ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep
Neural Networks, ICML 2021. Optionally, the server deploys the mean of its models at the ends of learning-rate cycles
(stochastic weight averaging, SWA).

Deviations. BatchNorm statistics are those of the first of the two passes; the authors' code updates them in both. SWA
averages the statistics like the parameters; the authors' code keeps those of the model at the start of SWA. FedMR's
authors use rho 0.1, eta 0 and no SWA.

As in the paper, SWA averages models at the ends of cycles, where the learning rate is lowest. The released code counts
the cycles of the learning rate from round 0, but the cycles of the mean from the start of SWA. If the start is a
multiple of c, which is common at the usual 75 % of the rounds, it averages models just after the rate was reset. Until
the first of them it tests a copy of the model at the start. ``swa_when=released`` reproduces both. With c = 1, the
released code does not change the learning rate; here the rate is at its lowest in every round.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.local import Batch, Loss
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedASAM."""

    rho: float = field(
        0.7,
        "rho, radius of the neighbourhood; 0 gives FedAvg",
        low=0,
        source="code of Caldarola et al.: 0.7 for CIFAR-10, 0.5 for CIFAR-100; code of FedMR's authors: 0.1",
    )
    eta: float = field(
        0.2,
        "eta, added to the absolute weights that scale the neighbourhood",
        low=0,
        source="code of Caldarola et al.; code of FedMR's authors: 0",
    )
    swa_start: int | None = field(
        None,
        "first round of SWA, in which the server averages its models over cycles. If omitted, SWA is disabled",
        unit="rounds",
        low=0,
        source="code of FedMR's authors: disabled; Caldarola et al.: at 75 % of the rounds",
    )
    swa_cycle: int = field(
        10,
        "c, rounds per cycle, during which the clients' learning rate decays",
        unit="rounds",
        low=1,
        source="code of FedMR's authors and of Caldarola et al.",
    )
    swa_when: str = field(
        "cycle_end",
        "models in the mean: those after the rounds of lowest learning rate (cycle_end), or those c, 2 c, ... rounds "
        "after the start, before which the model at the start is deployed (released)",
        choices=("cycle_end", "released"),
        source="Caldarola et al. 2022; released: their code",
    )
    swa_lr: float = field(
        0.01,
        "learning rate at the end of a cycle, as a share of the clients' learning rate",
        low=0,
        high=1,
        source="code of Caldarola et al.: from 0.01 to 1e-4",
    )


class State(NamedTuple):
    """The global model and, with SWA, the mean of the models at the ends of cycles."""

    model: Variables
    mean: Variables | None  # None without SWA
    cycles: jax.Array | None  # number of models in the mean; None without SWA


def scale_of(path: tuple, leaf: jax.Array, eta: float | None) -> jax.Array:
    """The scale T of the neighbourhood along each weight: |w| + eta, but 1 for biases and if eta is None."""
    name = path[-1].key
    return jnp.ones_like(leaf) if eta is None or name.endswith("bias") else jnp.abs(leaf) + eta


def sharpness_aware(loss: Loss, *, rho: float, eta: float | None) -> Callable:
    """(params, state, batch, key) -> ((loss, state), gradient at the worst neighbour of params).

    Among all neighbours w + T e with |e| <= rho, the loss is largest, to first order, at w + rho T^2 g / |T g|. If eta
    is None, the neighbourhood is a ball (SAM).
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def at_the_worst_neighbour(params: Any, state: Variables, batch: Batch, key: jax.Array) -> tuple:
        here, gradient = value_and_grad(params, state, batch, key)
        scales = jax.tree_util.tree_map_with_path(lambda path, leaf: scale_of(path, leaf, eta), params)
        scaled = jax.tree.map(jnp.multiply, scales, gradient)
        length = rho / (jnp.sqrt(trees.squared_norm(scaled)) + 1e-16)
        worst = jax.tree.map(lambda w, t, tg: w + length * t * tg, params, scales, scaled)
        _, gradient = value_and_grad(worst, state, batch, key)
        return here, gradient

    return at_the_worst_neighbour


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedASAM."""
    averages, released = hyper.swa_start is not None, hyper.swa_when == "released"

    def cycle(round):
        """Whether SWA has started, and the share of its cycle that is completed after this round."""
        position = (round % hyper.swa_cycle + 1).astype(jnp.float32) / hyper.swa_cycle
        return round >= hyper.swa_start, position

    def enters_mean(round):
        """Whether the model of a round enters the mean."""
        started, position = cycle(round)
        if released:
            return (round > hyper.swa_start) & ((round - hyper.swa_start) % hyper.swa_cycle == 0)
        return started & (position == 1)

    def init(key):
        model = problem.model.init(key)
        return State(model, model, jnp.zeros((), jnp.int32)) if averages else State(model, None, None)

    def client_update(payload, memory, data, round, key):
        optimizer = problem.local.optimizer
        if averages:
            started, position = cycle(round)
            share = jnp.where(started, 1 - position * (1 - hyper.swa_lr), 1.0)
            optimizer = optax.chain(optimizer, optax.scale(share))
        model, metrics = local.train(
            problem.model,
            problem.local,
            payload["model"],
            data,
            key,
            optimizer=optimizer,
            gradient=lambda loss: sharpness_aware(loss, rho=hyper.rho, eta=hyper.eta),
        )
        return {"model": model}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        model = trees.mean(uploads["model"], weights=cohort.sizes)
        if not averages:
            return state._replace(model=model), {}
        enters, count = enters_mean(round), state.cycles.astype(jnp.float32)
        kept = round >= hyper.swa_start if released else state.cycles > 0  # before that, the mean is the model itself
        mean = jax.tree.map(lambda old, new: (count * old + new) / (count + 1), state.mean, model)
        mean = trees.where(enters, mean, trees.where(kept, state.mean, model))
        return State(model, mean, state.cycles + enters.astype(jnp.int32)), {}

    def global_model(state):
        return state.mean if averages else state.model

    return averaging(problem)._replace(
        init=init, client_update=client_update, server_update=server_update, global_model=global_model
    )
