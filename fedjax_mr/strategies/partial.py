"""FedPer, FedRep, LG-FedAvg and FedBN: one part of the network is shared, the other part stays on its client.

``fedper`` shares all blocks but the last one (the head). Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning
with Personalization Layers, arXiv 2019.

``fedrep`` shares the same part. A client first trains only its head, then only the shared part. Collins, Hassani,
Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.

``lgfedavg`` shares only the head. Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally,
Act Globally: Federated Learning with Local and Global Representations, arXiv 2020.

``fedbn`` shares all layers but BatchNorm, whose statistics are not shared either. Without BatchNorm it is FedAvg. Li,
Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

Parts that are not shared are never sent. There is no global model. The personal model of a client joins the shared part
and the client's part.

Deviations:
* Shared parts are weighted by the clients' numbers of samples, as in our FedAvg. The authors of LG-FedAvg and FedBN
  weight them equally.
* FedRep: both phases compute the gradient of the whole network and use one part of it. BatchNorm statistics are updated
  in both phases. In its final round all clients train their heads once more; here fine-tuning before the test is a
  setting of all methods, which trains the whole network.
* FedRep: the head does not change while the shared part trains. In the authors' code it does: one optimizer serves both
  phases, and in the required PyTorch (0.4.1) the gradient of the head becomes zero instead of None. So momentum and
  weight decay continue to move the head.
* LG-FedAvg starts from new networks, where the paper starts from a FedAvg checkpoint. The released code tests each
  client with its best previous round by test accuracy; here the last round is tested.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.errors import UserError
from fedjax_mr.models import parts
from fedjax_mr.models.base import Model, Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy, view
from fedjax_mr.strategies.parts import require_epochs, to_all

Path = tuple[str, ...]
"""Path of a tensor in the variables of a network: its collection, the names of modules, and its own name."""


@dataclasses.dataclass(frozen=True)
class FedPer:
    """Hyper-parameters of FedPer."""

    part: str | None = field(
        None,
        "variables that stay on their client: patterns of their paths, separated by commas, such as columns/column0/* "
        "for a private vector of each user of --dataset=movielens. If omitted, the head",
        source="Arivazhagan et al. 2019: the head; other parts are ours",
    )


@dataclasses.dataclass(frozen=True)
class FedRep:
    """Hyper-parameters of FedRep."""

    shared_epochs: int = field(
        1,
        "number of final local epochs that train the shared part; the local epochs before them train the head",
        unit="epochs",
        low=1,
        source="code of Collins et al.",
    )


class State(NamedTuple):
    """The shared part."""

    part: Variables


def in_head(model: Model) -> Callable[[Path], bool]:
    """A predicate that is true for paths of tensors in the head."""
    name = model.head_name()
    return lambda path: path[1] == name


def named(patterns: str, model: Model) -> Callable[[Path], bool]:
    """A predicate that is true for paths of tensors that patterns name.

    Raises:
      UserError: they name no tensor, or all.
    """
    matches = parts.predicate(patterns)
    stays = lambda path: matches(parts.path_name(path))
    chosen = [stays(path) for path in flatten_dict(model.shapes())]
    if not any(chosen) or all(chosen):
        paths = ", ".join(parts.path_name(path) for path in flatten_dict(model.shapes()))
        raise UserError(
            f"hyper.part={patterns} names {'all' if any(chosen) else 'no'} variables of {model.name}: it has {paths}"
        )
    return stays


def in_batchnorm(model: Model) -> Callable[[Path], bool]:
    """A predicate that is true for paths of tensors in layers with statistics."""
    layers = {path[1:-1] for path in flatten_dict(model.shapes()) if path[0] != "params"}
    return lambda path: path[1:-1] in layers


def fedper(hyper: FedPer, problem: Problem) -> Strategy:
    """Build FedPer.

    Raises:
      UserError: ``part`` names no variable, or all.
    """
    stays = in_head(problem.model) if hyper.part is None else named(hyper.part, problem.model)
    return build(stays, problem)


def fedrep(hyper: FedRep, problem: Problem) -> Strategy:
    """Build FedRep.

    Raises:
      UserError: no epoch is left for the head, or the clients train steps in place of epochs.
    """
    require_epochs(problem, "fedrep")
    if problem.local.epochs <= hyper.shared_epochs:
        raise UserError(
            f"fedrep trains the head in all local epochs but the last {hyper.shared_epochs}: local_epochs= must be "
            "larger than hyper.shared_epochs"
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
    """Join two parts to the variables of a network."""
    return unflatten_dict(flatten_dict(shared) | flatten_dict(own))


def taking_turns(is_own: trees.Params, *, own_steps: jax.Array) -> optax.GradientTransformation:
    """A gradient transformation that sets one part of the updates to zero.

    In the first ``own_steps`` steps it sets the shared part to zero, afterwards the client's own part.

    Args:
      is_own: whether each tensor of the parameters belongs to the client's own part.
      own_steps: scalar int32.
    """

    def update(updates, state, params=None):
        own_turn = state < own_steps
        turn = lambda own, leaf: jnp.where(own_turn == own, leaf, jnp.zeros_like(leaf))
        return jax.tree.map(turn, is_own, updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def build(stays: Callable[[Path], bool], problem: Problem, *, shared_epochs: int | None = None) -> Strategy:
    """Build a method that shares one part of the network.

    Args:
      stays: whether the tensor at a path stays on its client.
      problem: the federation.
      shared_epochs: number of final epochs in which only the shared part trains; in the epochs before, only the
        client's own part trains. None trains both parts in all epochs.
    """
    setting = problem.local

    def part(variables: Variables, own: bool) -> Variables:
        return unflatten_dict({path: leaf for path, leaf in flatten_dict(variables).items() if stays(path) == own})

    def init(key):
        return State(part(problem.model.init(key), own=False))

    def init_memory(key, client_id):
        return part(problem.model.init(key), own=True)

    def client_update(payload, memory, data, round, key):
        start, optimizer = join(payload["part"], memory), setting.optimizer
        if shared_epochs is not None:
            head_steps = setting.in_epochs(setting.epochs - shared_epochs).num_steps(data.size)
            is_own = unflatten_dict({path[1:]: stays(path) for path in flatten_dict(start) if path[0] == "params"})
            turns = taking_turns(is_own, own_steps=head_steps)
            optimizer = optax.chain(turns, optimizer, turns)  # the second removes weight decay and momentum
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
