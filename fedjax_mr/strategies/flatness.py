"""FedSAM, MoFedSAM, FedGAMMA and FedSpeed: sharpness-aware clients in four methods that differ in their corrections.

Clients descend by g', the gradient at the worst point of a ball of radius rho around their weights (SAM: Foret,
Kleiner, Mobahi, Neyshabur: Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021); with
rho = 0 each is the method behind it.

``fedsam``: FedAvg. ``mofedsam``: FedCM, steps along beta g' + (1 - beta) G, with G the clients' mean step of the last
round. Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.

``fedgamma``: SCAFFOLD. Dai, Yang, Sun, Wang, Tao and others: FedGAMMA: Federated Learning with Global Sharpness-Aware
Minimization, TNNLS 2023.

``fedspeed``: FedDyn. Sun, Shen, Huang, Ding, Tao: FedSpeed: Larger Local Interval, Less Communication Round, and Higher
Generalization Accuracy, ICLR 2023.

Deviations. The ascent is by the loss's own gradient; corrections and proximal pulls belong to the descent alone, as in
the simulator of FedSpeed's authors. BatchNorm statistics are those of the first of the two passes. FedSAM and MoFedSAM
weight clients by their numbers of samples, as our FedAvg. From that simulator: every client's change is divided by its
own number of steps (there by those of client 0) and by lr / (1 - momentum), as in our SCAFFOLD. From FedSpeed's paper:
g' alone, as released, where the paper mixes it with the gradient at the weights.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies import feddyn, scaffold
from fedjax_mr.strategies.base import Problem, Strategy, averaging, to_all
from fedjax_mr.strategies.fedasam import sharpness_aware
from fedjax_mr.strategies.hyper import field

SIMULATOR = "the simulator of FedSpeed's authors"


def _radius(default: float, *, without: str) -> float:
    """The declaration of rho."""
    help = f"rho, the radius of the ball whose worst point is looked for; 0 gives {without}"
    return field(default, help, low=0, source=SIMULATOR)


@dataclasses.dataclass(frozen=True)
class FedSAM:
    """FedSAM's own setting."""

    rho: float = _radius(0.1, without="FedAvg")


@dataclasses.dataclass(frozen=True)
class MoFedSAM:
    """MoFedSAM's own settings."""

    rho: float = _radius(0.1, without="FedCM")
    beta: float = field(
        0.1,
        "beta, the share of a client's own gradient in its step, beside the last round's mean step; 1 gives FedSAM",
        low=0,
        open_low=True,
        high=1,
        source="Qu et al. 2022; the simulator of FedSpeed's authors: 0.05 or 0.1",
    )


@dataclasses.dataclass(frozen=True)
class FedGAMMA:
    """FedGAMMA's own setting."""

    rho: float = _radius(0.01, without="SCAFFOLD")


@dataclasses.dataclass(frozen=True)
class FedSpeed:
    """FedSpeed's own settings."""

    rho: float = _radius(0.1, without="FedDyn")
    strength: float = field(0.1, "lambda, the strength of the proximal term (alpha of feddyn)", low=0, source=SIMULATOR)


def sharp(problem: Problem, rho: float) -> Problem:
    """The problem with clients that descend by the gradient at the worst point of a ball."""
    take = lambda loss: sharpness_aware(loss, rho=rho, eta=None)
    return dataclasses.replace(problem, local=dataclasses.replace(problem.local, gradient=take))


def fedsam(hyper: FedSAM, problem: Problem) -> Strategy:
    """Build FedSAM."""
    return averaging(sharp(problem, hyper.rho))


def mofedsam(hyper: MoFedSAM, problem: Problem) -> Strategy:
    """Build MoFedSAM.

    Raises:
      UserError: the clients' optimizer is not SGD, from whose steps gradients can be derived.
    """
    return fedcm(hyper.beta, sharp(problem, hyper.rho))


def fedgamma(hyper: FedGAMMA, problem: Problem) -> Strategy:
    """Build FedGAMMA.

    Raises:
      UserError: the clients' optimizer is not SGD, from whose steps gradients can be derived.
    """
    return scaffold.build(scaffold.Hyper(), sharp(problem, hyper.rho))


def fedspeed(hyper: FedSpeed, problem: Problem) -> Strategy:
    """Build FedSpeed."""
    return feddyn.build(feddyn.Hyper(alpha=hyper.strength), sharp(problem, hyper.rho))


class State(NamedTuple):
    """The global model and the clients' mean step of the last round, as a gradient."""

    model: Variables
    gradient: trees.Params


def fedcm(beta: float, problem: Problem) -> Strategy:
    """Build FedCM (Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-Level Momentum, arXiv 2021).

    Raises:
      UserError: the clients' optimizer is not SGD, from whose steps gradients can be derived.
    """
    setting, step_size = problem.local, scaffold.steady_step(problem.local)

    def init(key):
        model = problem.model.init(key)
        return State(model, trees.zeros_like(model["params"]))

    def client_update(payload, memory, data, round, key):
        last = trees.scale(payload["gradient"], 1 - beta)
        mixed = optax.stateless(lambda gradient, _: trees.add(trees.scale(gradient, beta), last))
        optimizer = optax.chain(mixed, setting.optimizer)
        model, metrics = local.train(problem.model, setting, payload["model"], data, key, optimizer=optimizer)
        return {"model": model}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        steps = jnp.maximum(setting.num_steps(cohort.sizes), 1).astype(jnp.float32)  # none: a client that was lost
        descents = jax.vmap(lambda params: trees.subtract(state.model["params"], params))(uploads["model"]["params"])
        gradients = jax.vmap(trees.scale)(descents, 1 / (steps * step_size))
        return State(*(trees.mean(each, weights=cohort.sizes) for each in (uploads["model"], gradients))), {}

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "gradient"),
        client_update=client_update,
        server_update=server_update,
    )
