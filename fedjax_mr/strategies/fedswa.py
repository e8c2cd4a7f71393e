"""FedSWA and FedMoSWA: the learning rate decays within each local round, and the server extrapolates beyond the mean.

Liu, Liu, Shang, Liu, Liu, Feng: Improving Generalization in Federated Learning with Highly Heterogeneous Data via
Momentum-Based Stochastic Controlled Weight Averaging, ICML 2025. In step k of T, the learning rate of a client is lr
times (1 - k/T) + rho k/T. The server's model becomes w + alpha (mean of the models - w). FedMoSWA adds m - c_i to the
gradients, with c_i' = c_i - m + (w - theta_i) / (sum of the round's rates) and m' = m + gamma (mean of the c_i' - m).

Deviations. Clients are weighted by their numbers of samples in the mean of the models, as in our FedAvg. With momentum
SGD the sum of the rates is divided by 1 - momentum, as in our SCAFFOLD. The server extrapolates only the parameters;
BatchNorm statistics are averaged. The released code runs different methods: in its FedSWA the rate falls from twice lr
to zero and alpha is 1; its MoFedSWA is SCAFFOLD with a constant rate and gamma 0.4 (the paper's client is never
called); and it tests on randomly cropped images.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging, step_towards, to_all, zero_params
from fedjax_mr.strategies.scaffold import correct, steady_step

PAPER = "Liu et al. 2025"


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedSWA."""

    rho: float = field(0.1, "rho, learning rate at the end of a local round, as a share of lr", low=0, source=PAPER)
    alpha: float = field(
        1.5,
        "alpha, step size of the server from its last model towards the clients' mean; 1 gives the mean",
        low=0,
        open_low=True,
        source=PAPER,
    )


@dataclasses.dataclass(frozen=True)
class MomentumHyper(Hyper):
    """Hyper-parameters of FedMoSWA."""

    gamma: float = field(
        0.2,
        "gamma, step size of the server's momentum towards the mean of the clients' control variates",
        low=0,
        high=1,
        source=PAPER,
    )


class State(NamedTuple):
    """The global model and the momentum m, which is None in FedSWA."""

    model: Variables
    momentum: Any


def falling(rho: float) -> Callable[[jax.Array], jax.Array]:
    """The factor of the learning rate as a function of k / T."""
    return lambda over: (1 - over) + rho * over


def sum_of_shares(rho: float, done: jax.Array, steps: jax.Array) -> jax.Array:
    """The sum of the factors of the first ``done`` of T = ``steps`` steps, or 1 if there are none."""
    count, length = done.astype(jnp.float32), jnp.maximum(steps, 1).astype(jnp.float32)
    return jnp.where(done > 0, count - (1 - rho) * count * (count - 1) / (2 * length), 1.0)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedSWA."""
    setting = problem.local

    def init(key):
        return State(problem.model.init(key), None)

    def client_update(payload, memory, data, round, key):
        optimizer = local.with_schedule(setting.optimizer, falling(hyper.rho), steps=setting.num_steps(data.size))
        model, metrics = local.train(problem.model, setting, payload["model"], data, key, optimizer=optimizer)
        return {"model": model}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        mean = trees.mean(uploads["model"], weights=cohort.sizes)
        return state._replace(model=step_towards(state.model, mean, hyper.alpha)), {}

    return averaging(problem)._replace(init=init, client_update=client_update, server_update=server_update)


def build_momentum(hyper: MomentumHyper, problem: Problem) -> Strategy:
    """Build FedMoSWA.

    Raises:
      UserError: the optimizer of the clients is not SGD with momentum below 1.
    """
    setting, step_size = problem.local, steady_step(problem.local)

    def init(key):
        model = problem.model.init(key)
        return State(model, trees.zeros_like(model["params"]))

    def client_update(payload, memory, data, round, key):
        received, steps = payload["model"], setting.num_steps(data.size)
        correction = trees.subtract(payload["momentum"], memory)
        optimizer = local.with_schedule(setting.optimizer, falling(hyper.rho), steps=steps)
        optimizer = optax.chain(correct(correction), optimizer)
        model, metrics = local.train(problem.model, setting, received, data, key, optimizer=optimizer)
        descent = trees.subtract(received["params"], model["params"])
        gradient = trees.scale(descent, 1 / (step_size * sum_of_shares(hyper.rho, metrics.steps, steps)))
        control = trees.subtract(gradient, correction)
        return {"model": model, "control": control}, control, metrics

    def server_update(state, uploads, cohort, round, key):
        model = step_towards(state.model, trees.mean(uploads["model"], weights=cohort.sizes), hyper.alpha)
        difference = trees.subtract(trees.mean(uploads["control"]), state.momentum)
        return State(model, trees.add(state.momentum, trees.scale(difference, hyper.gamma))), {}

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "momentum"),
        client_update=client_update,
        server_update=server_update,
        init_memory=lambda key, client_id: zero_params(problem),
    )
