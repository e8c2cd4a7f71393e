"""FedDC: FedDyn's drift and SCAFFOLD's control variates at once.

Gao, Fu, Li, Chen, Xu, Xu: FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction, CVPR
2022. A client's gradients are those of the loss plus alpha (theta - w + h_i) plus c - c_i, where h_i is the sum of its
changes and c_i its control variate; the server adds the mean of the drifts of all N clients to the mean of the K
models. With c = c_i = 0 it is FedDyn.

The equations are those of the released code, where c_i is SCAFFOLD's (option II) and the server counts the drifts of
all clients; with those of the round's clients alone it would be the same if all take part.

Deviations from that code: alpha and c are the same for all clients (there they are divided by r_i = N n_i / sum n); a
client's change is divided by its own number of steps and by lr / (1 - momentum), as in our SCAFFOLD (there by the steps
of a client of mean size, and by the first round's learning rate although the rate decays).

The released alpha of 0.01 belongs to weight decay. On the digits (5 of 20 clients, no decay) one seed of three
collapses with it and two diverge, before round 60; with 0.1 it stays a little below FedAvg.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, averaging, to_all
from fedjax_mr.strategies.feddyn import pull, step_of_server
from fedjax_mr.strategies.hyper import field
from fedjax_mr.strategies.scaffold import correct, steady_step


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedDC's own setting."""

    alpha: float = field(
        0.01,
        "alpha, how strongly a client is held at w less its drift",
        low=0,
        source="Gao et al.'s code: 0.01 for CIFAR-10 and CIFAR-100",
    )


class State(NamedTuple):
    """The global model, the mean drift of all N clients and the mean of their control variates."""

    model: Variables
    drift: trees.Params
    control: trees.Params


class Memory(NamedTuple):
    """A client's memory."""

    drift: trees.Params  # h_i
    control: trees.Params  # c_i


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return FedDC.

    Raises:
      UserError: the clients' optimizer is not SGD, from whose steps gradients can be derived.
    """
    step_size = steady_step(problem.local)

    def init(key):
        model = problem.model.init(key)
        zeros = trees.zeros_like(model["params"])
        return State(model, zeros, zeros)

    def init_memory(key):
        zeros = trees.zeros_like(problem.model.init(key)["params"])
        return trees.broadcast(Memory(zeros, zeros), problem.num_clients)

    def client_update(payload, memory, data, round, key):
        received, control = payload["model"], payload["control"]
        optimizer = optax.chain(
            pull(trees.subtract(received["params"], memory.drift), hyper.alpha),
            correct(trees.subtract(control, memory.control)),
            problem.local.optimizer,
        )
        model, metrics = local.train(problem.model, problem.local, received, data, key, optimizer=optimizer)

        steps = jnp.maximum(metrics.steps, 1).astype(jnp.float32)
        change = trees.subtract(model["params"], received["params"])
        of_control = trees.scale(trees.add(trees.scale(change, 1 / (steps * step_size)), control), -1.0)
        kept = Memory(trees.add(memory.drift, change), trees.add(memory.control, of_control))
        return {"model": model, "control": of_control}, kept, metrics

    def server_update(state, uploads, cohort, round, key):
        model, drift = step_of_server(problem, state.model, state.drift, uploads["model"])
        share = problem.cohort_size / problem.num_clients
        control = trees.add(state.control, trees.scale(trees.mean(uploads["control"]), share))
        return State(model, drift, control), {}

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "control"),
        client_update=client_update,
        server_update=server_update,
        init_memory=init_memory,
    )
