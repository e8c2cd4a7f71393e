"""FedSMOO: FedSpeed whose clients look for the worst point of their neighbourhoods in one common direction.

Sun, Shen, Chen, Ding, Tao: Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global
Consistency and Smooth Landscape, ICML 2023. Client i keeps its drift h_i (see feddyn.py) and a dual u_i of its ascents,
both zero at first; s is the ascent that the server proposes. In a step, with the gradient g at theta:

    e = rho (g - u_i - s) / |g - u_i - s|,  u_i = u_i + e - s,
    theta steps along the gradient at theta + e, plus lambda (theta - w + h_i).

After the round s is the mean of the clients' u_i, scaled to the length rho; w is FedDyn's.

Deviations. As in the released code, which by its own comment leaves a small term of the paper's s out. BatchNorm
statistics are those of the first of the two passes, averaged by the server.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.local import Batch, LocalStep, Loss
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, averaging, to_all
from fedjax_mr.strategies.feddyn import pull, step_of_server
from fedjax_mr.strategies.hyper import field

SMALLEST_NORM = 1e-7  # the released code's: nothing scaled to a length stays nothing


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedSMOO's own settings."""

    rho: float = field(0.1, "rho, the length of every ascent", low=0, source="FedSMOO's code")
    strength: float = field(
        0.1, "lambda, the strength of the proximal term (alpha of feddyn)", low=0, source="FedSMOO's code"
    )


class State(NamedTuple):
    """The global model, the mean drift of all N clients and the common ascent s."""

    model: Variables
    drift: trees.Params
    ascent: trees.Params


class Memory(NamedTuple):
    """A client's memory."""

    drift: trees.Params  # h_i
    dual: trees.Params  # u_i


def of_length(direction: trees.Params, length: float) -> trees.Params:
    """Return a direction scaled to a length."""
    return trees.scale(direction, length / (jnp.sqrt(trees.squared_norm(direction)) + SMALLEST_NORM))


def with_common_ascent(
    loss: Loss, optimizer: optax.GradientTransformation, *, rho: float, ascent: trees.Params
) -> LocalStep:
    """A step along the gradient after the ascent e, from (variables, u_i) to (variables, u_i)."""
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def init(start: tuple[Variables, trees.Params]) -> tuple:
        variables, dual = start
        params, state = local.trained_and_state(variables)
        return params, state, dual, optimizer.init(params)

    def step(carry: tuple, batch: Batch, key: jax.Array) -> tuple[tuple, jax.Array]:
        params, state, dual, optimizer_state = carry
        (value, new_state), gradient = value_and_grad(params, state, batch, key)
        own = of_length(trees.subtract(trees.subtract(gradient, dual), ascent), rho)  # e
        _, gradient = value_and_grad(trees.add(params, own), state, batch, key)
        dual = trees.add(dual, trees.subtract(own, ascent))
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), new_state, dual, optimizer_state), value

    def result(carry: tuple) -> tuple[Variables, trees.Params]:
        params, state, dual, _ = carry
        return {"params": params, **state}, dual

    return LocalStep(init, step, result)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return FedSMOO."""

    def init(key):
        model = problem.model.init(key)
        zeros = trees.zeros_like(model["params"])
        return State(model, zeros, zeros)

    def init_memory(key):
        zeros = trees.zeros_like(problem.model.init(key)["params"])
        return trees.broadcast(Memory(zeros, zeros), problem.num_clients)

    def client_update(payload, memory, data, round, key):
        received, ascent = payload["model"], payload["ascent"]
        dynamic = pull(trees.subtract(received["params"], memory.drift), hyper.strength)
        optimizer = optax.chain(dynamic, problem.local.optimizer)
        loss = local.cross_entropy(problem.model)
        local_step = with_common_ascent(loss, optimizer, rho=hyper.rho, ascent=ascent)
        (model, dual), metrics = local.run(local_step, problem.local, (received, memory.dual), data, key)
        change = trees.subtract(model["params"], received["params"])
        return {"model": model, "dual": dual}, Memory(trees.add(memory.drift, change), dual), metrics

    def server_update(state, uploads, cohort, round, key):
        ascent = of_length(trees.mean(uploads["dual"]), hyper.rho)
        model, drift = step_of_server(problem, state.model, state.drift, uploads["model"])
        return State(model, drift, ascent), {}

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "ascent"),
        client_update=client_update,
        server_update=server_update,
        init_memory=init_memory,
    )
