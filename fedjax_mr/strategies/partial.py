"""FedPer, FedRep, LG-FedAvg and FedBN: a part of the network is shared, the rest stays with its client.

``fedper``: all but the last block (the head) is shared. Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning
with Personalization Layers, arXiv 2019.

``fedrep``: the same part; a client first trains its head alone, then the shared part alone. Collins, Hassani, Mokhtari,
Shakkottai: Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.

``lgfedavg``: only the head is shared. Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally,
Act Globally: Federated Learning with Local and Global Representations, arXiv 2020.

``fedbn``: all but the BatchNorm layers, with their statistics, is shared; without such layers it is FedAvg. Li, Jiang,
Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

What is not shared is never sent. There is no global model; a client's own is the shared part and its own.

Deviations. Shared parts are weighted by the clients' numbers of samples, as in our FedAvg (the authors of LG-FedAvg and
FedBN: equally). FedRep: both of its phases compute the gradient of the whole network and use a part of it; BatchNorm
statistics move in both; its last round, in which all clients train their heads once more, is --finetune_epochs here,
which trains the whole network. While FedRep's shared part trains, the head stands still. In the authors' code it
coasts: one optimizer serves both phases, and in the PyTorch that its requirements name (0.4.1) the head's gradient
becomes zero instead of None, so the optimizer goes on moving the head by its momentum and weight decay. LG-FedAvg
starts from fresh networks, there from a FedAvg checkpoint; the released code tests each client with the best of its
past rounds by test accuracy, here it is the last.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Model, Variables
from fedjax_mr.strategies.base import Problem, Strategy, to_all, view
from fedjax_mr.strategies.hyper import field

Path = tuple[str, ...]
"""Where a tensor is in a network's variables: its collection, then the names of modules, then its own."""


@dataclasses.dataclass(frozen=True)
class FedRep:
    """FedRep's own setting."""

    shared_epochs: int = field(
        1,
        "the last of --local_epochs, in which a client trains the shared part; in those before its head",
        unit="epochs",
        low=1,
        source="Collins et al.'s code",
    )


class State(NamedTuple):
    """The shared part."""

    part: Variables


def in_head(model: Model) -> Callable[[Path], bool]:
    """Whether a tensor belongs to the head."""
    name = model.head_name()
    return lambda path: path[1] == name


def in_batchnorm(model: Model) -> Callable[[Path], bool]:
    """Whether a tensor belongs to a layer that keeps statistics."""
    layers = {path[1:-1] for path in flatten_dict(model.shapes()) if path[0] != "params"}
    return lambda path: path[1:-1] in layers


def fedper(hyper: None, problem: Problem) -> Strategy:
    """Build FedPer."""
    return build(in_head(problem.model), problem)


def fedrep(hyper: FedRep, problem: Problem) -> Strategy:
    """Build FedRep.

    Raises:
      UserError: no epoch is left for the head.
    """
    if problem.local.epochs <= hyper.shared_epochs:
        raise UserError(
            f"fedrep trains the head in all local epochs but the last {hyper.shared_epochs}: --local_epochs must be "
            f"above --fedrep_shared_epochs"
        )
    return build(in_head(problem.model), problem, shared_epochs=hyper.shared_epochs)


def lgfedavg(hyper: None, problem: Problem) -> Strategy:
    """Build LG-FedAvg."""
    head = in_head(problem.model)
    return build(lambda path: not head(path), problem)


def fedbn(hyper: None, problem: Problem) -> Strategy:
    """Build FedBN."""
    return build(in_batchnorm(problem.model), problem)


def join(shared: Variables, own: Variables) -> Variables:
    """The network of two parts."""
    return unflatten_dict(flatten_dict(shared) | flatten_dict(own))


def taking_turns(is_own: trees.Params, *, own_steps: jax.Array) -> optax.GradientTransformation:
    """The transformation that passes on a client's own part in the first ``own_steps`` steps, then the rest.

    Args:
      is_own: True or False for each tensor of the parameters.
      own_steps: scalar int32.
    """

    def update(updates, state, params=None):
        own_turn = state < own_steps
        turn = lambda own, leaf: jnp.where(own_turn == own, leaf, jnp.zeros_like(leaf))
        return jax.tree.map(turn, is_own, updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def build(stays: Callable[[Path], bool], problem: Problem, *, shared_epochs: int | None = None) -> Strategy:
    """Build the method that shares a part of the network.

    Args:
      stays: whether a tensor stays with its client.
      problem: the federation.
      shared_epochs: the last epochs, in which the shared part alone trains, a client's own before; None: both always.
    """
    setting = problem.local

    def part(variables: Variables, own: bool) -> Variables:
        return unflatten_dict({path: leaf for path, leaf in flatten_dict(variables).items() if stays(path) == own})

    def init(key):
        return State(part(problem.model.init(key), own=False))

    def init_memory(key):
        return trees.broadcast(part(problem.model.init(key), own=True), problem.num_clients)

    def client_update(payload, memory, data, round, key):
        start, optimizer = join(payload["part"], memory), setting.optimizer
        if shared_epochs is not None:
            of_head = dataclasses.replace(setting, epochs=setting.epochs - shared_epochs).num_steps(data.size)
            is_own = unflatten_dict({path[1:]: stays(path) for path in flatten_dict(start) if path[0] == "params"})
            turns = taking_turns(is_own, own_steps=of_head)
            optimizer = optax.chain(turns, optimizer, turns)  # behind it for the weight decay of what stands still
        model, metrics = local.train(problem.model, setting, start, data, key, optimizer=optimizer)
        return {"part": part(model, own=False)}, part(model, own=True), metrics

    def server_update(state, uploads, cohort, round, key):
        return State(trees.mean(uploads["part"], weights=cohort.sizes)), {}

    def personal_model(state, memory, data, key):
        return join(state.part, memory)

    return Strategy(
        init,
        to_all(problem, "part"),
        client_update,
        server_update,
        init_memory=init_memory,
        personal_model=personal_model,
        models=view("part"),
    )
