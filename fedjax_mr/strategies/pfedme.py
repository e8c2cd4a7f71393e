"""pFedMe: personal models are regularised towards the global model, which moves towards the personal models.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1. In a local round a
client takes a mini-batch. It moves its personal model theta by K steps towards the minimum of
f(theta) + lambda/2 |theta - w|^2, and then its copy w of the global model towards theta. The R local rounds are the
mini-batches of its local epochs. In every round theta starts at w. The clients' optimizer, momentum and gradient
clipping are not used.

Deviation from the paper: clients are weighted by their numbers of samples, as in the authors' code.

Deviations from that code: only the cohort trains, there is no L2 term of weight 0.001, and theta is tested. In that
code and its ports, theta is overwritten with w before the test (``evaluate=w_local``).

The paper does not mention BatchNorm; its statistics here are those of theta.
"""

import dataclasses

import jax
import jax.numpy as jnp
from absl import logging
from jax.core import Tracer

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.local import Batch, LocalStep, Loss
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import LastModel, averaging, step_towards, untrained


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of pFedMe."""

    strength: float = field(
        15.0,
        "lambda, weight of the term that pulls theta towards w",
        low=0,
        source="the authors' code (they tune 15 to 30)",
    )
    inner_steps: int = field(5, "K, steps of theta per mini-batch", unit="steps", low=1, source="the authors' code")
    eta: float | None = field(
        None,
        "eta, learning rate of w. If omitted, the clients' learning rate",
        low=0,
        open_low=True,
        source="code of FedMe's authors; pFedMe's code: 0.005",
    )
    personal_lr: float | None = field(
        None,
        "learning rate of theta. If omitted, the clients' learning rate",
        low=0,
        open_low=True,
        source="code of FedMe's authors; pFedMe's code: 0.09 or 0.1",
    )
    beta: float = field(
        1.0,
        "beta, step size of the server from the last global model towards the clients' mean; 1 gives the mean",
        low=0,
        open_low=True,
        source="the authors' code (they tune 1 to 2)",
    )
    evaluate: str = field(
        "theta",
        "personal model: theta, the client's copy of the global model after training (w_local), or the global model",
        choices=("theta", "w_local", "global"),
        source="Dinh et al. 2020; their code: w_local",
    )


def unstable(strength: float, *, eta: float, personal_lr: float) -> str:
    """A description of the violated stability conditions, or "" if both hold.

    A step moves theta towards w by personal_lr x lambda times their distance, so the distance grows from 2 on. A step
    moves w towards theta by eta x lambda times their distance, so it overshoots above 1.

    Args:
      strength: lambda.
      eta: learning rate of w.
      personal_lr: learning rate of theta.
    """
    violations = []
    if personal_lr * strength >= 2:
        violations.append(f"personal_lr x lambda = {personal_lr * strength:g} is not below 2")
    if eta * strength > 1:
        violations.append(f"eta x lambda = {eta * strength:g} is above 1")
    return " and ".join(violations)


def local_round(loss: Loss, *, strength: float, steps: int, eta: float, personal_lr: float) -> LocalStep:
    """A local round on a mini-batch. It starts from the received variables and results in those of theta and of w.

    Args:
      loss: f.
      strength: lambda.
      steps: K, steps of theta.
      eta: learning rate of w.
      personal_lr: learning rate of theta.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def init(variables: Variables) -> tuple:
        params, state = local.trained_and_state(variables)
        return params, params, state

    def step(carry: tuple, batch: Batch, key: jax.Array) -> tuple[tuple, jax.Array]:
        theta, w, state = carry

        def towards_minimum(number: jax.Array, carry: tuple) -> tuple:
            theta, state, _ = carry
            (value, state), gradient = value_and_grad(theta, state, batch, jax.random.fold_in(key, number))
            pull = trees.scale(trees.subtract(theta, w), strength)
            return trees.subtract(theta, trees.scale(trees.add(gradient, pull), personal_lr)), state, value

        theta, state, value = jax.lax.fori_loop(0, steps, towards_minimum, (theta, state, jnp.zeros(())))
        w = trees.subtract(w, trees.scale(trees.subtract(w, theta), eta * strength))
        return (theta, w, state), value

    def result(carry: tuple) -> tuple[Variables, Variables]:
        theta, w, state = carry
        return {"params": theta, **state}, {"params": w, **state}

    return LocalStep(init, step, result)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build pFedMe.

    Raises:
      UserError: a learning rate is omitted, and the optimizer of the clients has no constant learning rate.
    """
    eta, personal_lr = (problem.local.sgd_lr if rate is None else rate for rate in (hyper.eta, hyper.personal_lr))
    if eta is None or personal_lr is None:
        raise UserError(
            "pfedme needs a constant learning rate: pass optimizer=sgd, or hyper.eta=0.01 and hyper.personal_lr=0.01"
        )
    known = not isinstance(eta * personal_lr * hyper.strength, Tracer)  # not inside of a program
    if known and (violations := unstable(hyper.strength, eta=eta, personal_lr=personal_lr)):
        logging.log_first_n(
            logging.WARNING, "pfedme may oscillate: %s. Reduce the learning rates or lambda", 1, violations
        )

    def client_update(payload, memory, data, round, key):
        loss = local.supervised(problem.model)
        both = local_round(loss, strength=hyper.strength, steps=hyper.inner_steps, eta=eta, personal_lr=personal_lr)
        (theta, w), metrics = local.run(both, problem.local, payload["model"], data, key)
        tested = LastModel(w if hyper.evaluate == "w_local" else theta, jnp.ones((), bool))
        return {"model": w}, memory if hyper.evaluate == "global" else tested, metrics

    def server_update(state, uploads, cohort, round, key):
        mean = trees.mean(uploads["model"], weights=cohort.sizes)
        return state._replace(model=step_towards(state.model, mean, hyper.beta)), {}

    def personal_model(state, memory, data, key):
        if hyper.evaluate == "global":
            return state.model
        return trees.where(memory.trained, memory.model, state.model)

    return averaging(problem)._replace(
        client_update=client_update,
        server_update=server_update,
        init_memory=None if hyper.evaluate == "global" else lambda key, client_id: untrained(problem),
        personal_model=personal_model,
    )
