"""FedSWA and FedMoSWA: the learning rate falls within every client's round, and the server goes beyond the mean.

Liu, Liu, Shang, Liu, Liu, Feng: Improving Generalization in Federated Learning with Highly Heterogeneous Data via
Momentum-Based Stochastic Controlled Weight Averaging, ICML 2025. In step k of T a client's rate is lr times
(1 - k/T) + rho k/T; the server's model becomes w + alpha (mean of the models - w). FedMoSWA adds m - c_i to the
gradients, with c_i' = c_i - m + (w - theta_i) / (sum of the round's rates) and m' = m + gamma (mean of the c_i' - m).

Deviations. Clients are weighted by their numbers of samples in the mean of the models, as in our FedAvg. With momentum
SGD the sum of the rates is divided by 1 - momentum, as in our SCAFFOLD. The server extrapolates the parameters alone;
BatchNorm statistics are averaged. The released code runs other methods: its FedSWA falls from twice the rate to zero
and has alpha 1; its MoFedSWA is SCAFFOLD with a constant rate and gamma 0.4 (the paper's client is never called); and
it tests on randomly cropped images.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, averaging, to_all
from fedjax_mr.strategies.hyper import field
from fedjax_mr.strategies.scaffold import correct, steady_step

PAPER = "Liu et al. 2025"


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedSWA's own settings."""

    rho: float = field(0.1, "rho, the share of the learning rate that is left at a round's end", low=0, source=PAPER)
    alpha: float = field(
        1.5,
        "alpha, how far the server goes from its last model to the clients' mean",
        low=0,
        open_low=True,
        source=PAPER,
    )


@dataclasses.dataclass(frozen=True)
class MomentumHyper(Hyper):
    """FedMoSWA's own settings."""

    gamma: float = field(
        0.2,
        "gamma, how far the server's momentum goes to the mean of the clients' variates",
        low=0,
        high=1,
        source=PAPER,
    )


class State(NamedTuple):
    """The global model and, in FedMoSWA, the momentum m; else None."""

    model: Variables
    momentum: Any


def falling(rho: float) -> Callable[[jax.Array], jax.Array]:
    """Return the factor of the learning rate as a function of k / T."""
    return lambda over: (1 - over) + rho * over


def sum_of_shares(rho: float, steps: jax.Array) -> jax.Array:
    """Return the sum of the factors of steps 0..T-1; 1 without a step."""
    count = steps.astype(jnp.float32)
    return jnp.where(steps > 0, (count * (1 + rho) + 1 - rho) / 2, 1.0)


def server_model(hyper: Hyper, old: Variables, models: Variables, sizes: jax.Array) -> Variables:
    """Return the server's new model."""
    mean = trees.mean(models, weights=sizes)
    step = trees.scale(trees.subtract(mean["params"], old["params"]), hyper.alpha)
    return mean | {"params": trees.add(old["params"], step)}


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return FedSWA."""
    setting = problem.local

    def init(key):
        return State(problem.model.init(key), None)

    def client_update(payload, memory, data, round, key):
        optimizer = local.with_schedule(setting.optimizer, falling(hyper.rho), steps=setting.num_steps(data.size))
        model, metrics = local.train(problem.model, setting, payload["model"], data, key, optimizer=optimizer)
        return {"model": model}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        return state._replace(model=server_model(hyper, state.model, uploads["model"], cohort.sizes)), {}

    return averaging(problem)._replace(init=init, client_update=client_update, server_update=server_update)


def build_momentum(hyper: MomentumHyper, problem: Problem) -> Strategy:
    """Return FedMoSWA.

    Raises:
      UserError: the clients' optimizer is not SGD, from whose steps gradients can be derived.
    """
    setting, step_size = problem.local, steady_step(problem.local)

    def init(key):
        model = problem.model.init(key)
        return State(model, trees.zeros_like(model["params"]))

    def init_memory(key):
        params = problem.model.init(key)["params"]
        return trees.broadcast(trees.zeros_like(params), problem.num_clients)

    def client_update(payload, memory, data, round, key):
        received, steps = payload["model"], setting.num_steps(data.size)
        correction = trees.subtract(payload["momentum"], memory)
        optimizer = local.with_schedule(setting.optimizer, falling(hyper.rho), steps=steps)
        optimizer = optax.chain(correct(correction), optimizer)
        model, metrics = local.train(problem.model, setting, received, data, key, optimizer=optimizer)
        descent = trees.subtract(received["params"], model["params"])
        gradient = trees.scale(descent, 1 / (step_size * sum_of_shares(hyper.rho, steps)))
        own = trees.subtract(gradient, correction)
        return {"model": model, "control": own}, own, metrics

    def server_update(state, uploads, cohort, round, key):
        model = server_model(hyper, state.model, uploads["model"], cohort.sizes)
        difference = trees.subtract(trees.mean(uploads["control"]), state.momentum)
        return State(model, trees.add(state.momentum, trees.scale(difference, hyper.gamma))), {}

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "momentum"),
        client_update=client_update,
        server_update=server_update,
        init_memory=init_memory,
    )
