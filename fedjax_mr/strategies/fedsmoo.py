"""FedSMOO: FedSpeed whose clients perturb their weights towards a common ascent direction.

Sun, Shen, Chen, Ding, Tao: Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global
Consistency and Smooth Landscape, ICML 2023. Client i keeps its drift h_i (see feddyn.py) and the dual variable u_i of
its ascents. Both start at zero. s is the common ascent sent by the server. In each step, with the gradient g at theta:

    e = rho (g - u_i - s) / |g - u_i - s|,  u_i = u_i + e - s,
    theta descends along the gradient at theta + e, plus lambda (theta - w + h_i).

After the round, s is the mean of the clients' u_i, scaled to length rho. w is updated as in FedDyn.

Deviations. As in the released code, a small term of the paper's s is omitted (a comment there says so). BatchNorm
statistics are those of the first of the two passes, averaged by the server.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local, optimizers
from fedjax_mr.client.local import Batch, LocalStep, Loss
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.feddyn import pull, step_of_server
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging, to_all, zero_params

SMALLEST_NORM = 1e-7  # as in the released code, so that a zero vector stays zero


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedSMOO."""

    rho: float = field(0.1, "rho, length of the ascent", low=0, source="FedSMOO's code")
    strength: float = field(
        0.1, "lambda, weight of the proximal term (alpha of FedDyn)", low=0, source="FedSMOO's code"
    )


class State(NamedTuple):
    """The global model, the mean drift of all N clients and the common ascent s."""

    model: Variables
    drift: trees.Params
    ascent: trees.Params


class Memory(NamedTuple):
    """Memory of one client."""

    drift: trees.Params  # h_i
    dual: trees.Params  # u_i


def of_length(direction: trees.Params, length: float) -> trees.Params:
    """Scale a direction to a length."""
    return trees.scale(direction, length / (jnp.sqrt(trees.squared_norm(direction)) + SMALLEST_NORM))


def with_common_ascent(
    loss: Loss, optimizer: optax.GradientTransformation, *, rho: float, ascent: trees.Params
) -> LocalStep:
    """A local step with the gradient at theta + e. It starts from (variables, u_i) and results in (variables, u_i)."""
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def init(start: tuple[Variables, trees.Params]) -> tuple:
        variables, dual = start
        params, state = local.trained_and_state(variables)
        return params, state, dual, optimizer.init(params)

    def step(carry: tuple, batch: Batch, key: jax.Array) -> tuple[tuple, jax.Array]:
        params, state, dual, optimizer_state = carry
        (value, new_state), gradient = value_and_grad(params, state, batch, key)
        own_ascent = of_length(trees.subtract(trees.subtract(gradient, dual), ascent), rho)  # e
        _, gradient = value_and_grad(trees.add(params, own_ascent), state, batch, key)
        dual = trees.add(dual, trees.subtract(own_ascent, ascent))
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), new_state, dual, optimizer_state), value

    def result(carry: tuple) -> tuple[Variables, trees.Params]:
        params, state, dual, optimizer_state = carry
        return {"params": optimizers.trained(params, optimizer_state), **state}, dual

    return LocalStep(init, step, result)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedSMOO."""

    def init(key):
        model = problem.model.init(key)
        zeros = trees.zeros_like(model["params"])
        return State(model, zeros, zeros)

    def init_memory(key, client_id):
        zeros = zero_params(problem)
        return Memory(zeros, zeros)

    def client_update(payload, memory, data, round, key):
        received, ascent = payload["model"], payload["ascent"]
        dynamic = pull(trees.subtract(received["params"], memory.drift), hyper.strength)
        optimizer = optax.chain(dynamic, problem.local.optimizer)
        loss = local.supervised(problem.model)
        local_step = with_common_ascent(loss, optimizer, rho=hyper.rho, ascent=ascent)
        (model, dual), metrics = local.run(local_step, problem.local, (received, memory.dual), data, key)
        change = trees.subtract(model["params"], received["params"])
        return {"model": model, "dual": dual}, Memory(trees.add(memory.drift, change), dual), metrics

    def server_update(state, uploads, cohort, round, key):
        ascent = of_length(trees.mean(uploads["dual"]), hyper.rho)
        model, drift = step_of_server(problem, state.model, state.drift, uploads["model"], cohort)
        return State(model, drift, ascent), {}

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "ascent"),
        client_update=client_update,
        server_update=server_update,
        init_memory=init_memory,
    )
