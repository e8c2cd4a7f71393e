"""pFedMe: every client's own model stays near the global one, and the global one follows them.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1. In a local round a
client takes a mini-batch, moves its own model theta by K steps towards the least of f(theta) + lambda/2 |theta - w|^2,
and its copy w of the global model towards theta. The R local rounds are the mini-batches of its local epochs; theta
begins at w in every round. The optimizer of the other methods (``--optimizer``, ``--momentum``, ``--clip_norm``) has
no part in it.

Deviations. From the paper: clients are weighted by their numbers of samples, as in the authors' code. From that code:
only the cohort trains, there is no L2 term of weight 0.001, and what is tested is theta; there, and in its ports,
theta is overwritten with w before the test (``evaluate=w_local``). BatchNorm statistics, which the paper does not know,
are theta's.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.local import Batch, LocalStep, Loss
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, averaging
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """pFedMe's own settings."""

    strength: float = field(
        15.0, "lambda, how strongly theta is held at w", low=0, source="the pFedMe authors' code (they tune 15 to 30)"
    )
    inner_steps: int = field(
        5, "K, steps of theta on a mini-batch", unit="steps", low=1, source="the pFedMe authors' code"
    )
    eta: float | None = field(
        None,
        "eta, the learning rate of w; none: --lr",
        low=0,
        open_low=True,
        source="the FedMe authors' code; pFedMe's: 0.005",
    )
    personal_lr: float | None = field(
        None,
        "the learning rate of theta; none: --lr",
        low=0,
        open_low=True,
        source="the FedMe authors' code; pFedMe's: 0.09 or 0.1",
    )
    beta: float = field(
        1.0,
        "beta, how far the server goes from the last global model to the clients' mean",
        low=0,
        open_low=True,
        source="the pFedMe authors' code (they tune 1 to 2)",
    )
    evaluate: str = field(
        "theta",
        "a client's own model: theta, its copy of the global model after its training (w_local), or the global model",
        choices=("theta", "w_local", "global"),
        source="Dinh et al. 2020; their code: w_local",
    )


class Memory(NamedTuple):
    """A client's memory, for the test."""

    model: Variables  # theta or its own w, as its last training left it
    trained: jax.Array  # whether there was one


def unstable(strength: float, *, eta: float, personal_lr: float) -> str:
    """Return the conditions of stability that the settings break, in words; "" if they keep both.

    Theta is drawn to w by steps of personal_lr x lambda times their distance, which grows from 2 on; w is drawn to
    theta by eta x lambda times the distance, which overshoots above 1.

    Args:
      strength: lambda.
      eta: the learning rate of w.
      personal_lr: the learning rate of theta.
    """
    faults = []
    if personal_lr * strength >= 2:
        faults.append(f"personal_lr x lambda = {personal_lr * strength:g} is not below 2")
    if eta * strength > 1:
        faults.append(f"eta x lambda = {eta * strength:g} is over 1")
    return " and ".join(faults)


def local_round(loss: Loss, *, strength: float, steps: int, eta: float, personal_lr: float) -> LocalStep:
    """A local round on a mini-batch, from the received variables to the variables of theta and of w.

    Args:
      loss: f.
      strength: lambda.
      steps: K, of theta.
      eta: the learning rate of w.
      personal_lr: the learning rate of theta.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def init(variables: Variables) -> tuple:
        params, state = local.trained_and_state(variables)
        return params, params, state

    def step(carry: tuple, batch: Batch, key: jax.Array) -> tuple[tuple, jax.Array]:
        theta, w, state = carry

        def towards_least(number: jax.Array, carry: tuple) -> tuple:
            theta, state, _ = carry
            (value, state), gradient = value_and_grad(theta, state, batch, jax.random.fold_in(key, number))
            pull = trees.scale(trees.subtract(theta, w), strength)
            return trees.subtract(theta, trees.scale(trees.add(gradient, pull), personal_lr)), state, value

        theta, state, value = jax.lax.fori_loop(0, steps, towards_least, (theta, state, jnp.zeros(())))
        w = trees.subtract(w, trees.scale(trees.subtract(w, theta), eta * strength))
        return (theta, w, state), value

    def result(carry: tuple) -> tuple[Variables, Variables]:
        theta, w, state = carry
        return {"params": theta, **state}, {"params": w, **state}

    return LocalStep(init, step, result)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return pFedMe.

    Raises:
      UserError: no learning rates are given and the clients' optimizer is none with a plain learning rate.
    """
    eta, personal_lr = (problem.local.lr if rate is None else rate for rate in (hyper.eta, hyper.personal_lr))
    if eta is None or personal_lr is None:
        raise UserError("pfedme needs a plain learning rate: --optimizer=sgd, or --pfedme_eta and --pfedme_personal_lr")
    if fault := unstable(hyper.strength, eta=eta, personal_lr=personal_lr):
        logging.log_first_n(logging.WARNING, "pfedme may oscillate: %s; make --lr or lambda smaller", 1, fault)

    def init_memory(key):
        unused = Memory(trees.zeros_like(problem.model.init(key)), jnp.zeros((), bool))
        return trees.broadcast(unused, problem.num_clients)

    def client_update(payload, memory, data, round, key):
        loss = local.cross_entropy(problem.model)
        both = local_round(loss, strength=hyper.strength, steps=hyper.inner_steps, eta=eta, personal_lr=personal_lr)
        (theta, w), metrics = local.run(both, problem.local, payload["model"], data, key)
        kept = Memory(w if hyper.evaluate == "w_local" else theta, jnp.ones((), bool))
        return {"model": w}, memory if hyper.evaluate == "global" else kept, metrics

    def server_update(state, uploads, cohort, round, key):
        mean, old = trees.mean(uploads["model"], weights=cohort.sizes), state.model["params"]
        step = trees.scale(trees.subtract(mean["params"], old), hyper.beta)
        return state._replace(model=mean | {"params": trees.add(old, step)}), {}

    def personal_model(state, memory, data, key):
        if hyper.evaluate == "global":
            return state.model
        return trees.where(memory.trained, memory.model, state.model)

    return averaging(problem)._replace(
        client_update=client_update,
        server_update=server_update,
        init_memory=None if hyper.evaluate == "global" else init_memory,
        personal_model=personal_model,
    )
