"""FedSAM, MoFedSAM, FedGAMMA and FedSpeed: sharpness-aware clients combined with four existing methods.

Clients descend along g', the gradient at the worst point of a ball of radius rho around their weights (SAM: Foret,
Kleiner, Mobahi, Neyshabur: Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021). With
rho = 0 each method equals its base method.

``fedsam`` is based on FedAvg. ``mofedsam`` is based on FedCM: steps along beta g' + (1 - beta) G, where G is the
clients' mean step of the last round. Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware
Minimization, ICML 2022.

``fedgamma`` is based on SCAFFOLD. Dai, Yang, Sun, Shen, Tian, Wang, Zhang: FedGAMMA: Federated Learning with
Global Sharpness-Aware Minimization, TNNLS 2023.

``fedspeed`` is based on FedDyn. Sun, Shen, Huang, Ding, Tao: FedSpeed: Larger Local Interval, Less Communication Round,
and Higher Generalization Accuracy, ICLR 2023.

Deviations:
* The ascent follows the gradient of the loss. Corrections and proximal terms apply only to the descent, as in the
  simulator of FedSpeed's authors.
* BatchNorm statistics are those of the first of the two passes.
* FedSAM and MoFedSAM weight clients by their numbers of samples, as in our FedAvg.
* The change of each client is divided by its own number of steps and by lr / (1 - momentum), as in our SCAFFOLD. The
  simulator divides it by the number of steps of client 0.
* FedSpeed uses only g', as in the released code. The paper mixes it with the gradient at the weights.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies import feddyn, scaffold
from fedjax_mr.strategies.fedasam import sharpness_aware
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging, to_all

SIMULATOR = "simulator of FedSpeed's authors"


def _radius(default: float, *, without: str) -> float:
    """The field of rho."""
    help = f"rho, radius of the ball in which the worst point is searched; 0 gives {without}"
    return field(default, help, low=0, source=SIMULATOR)


@dataclasses.dataclass(frozen=True)
class FedSAM:
    """Hyper-parameters of FedSAM."""

    rho: float = _radius(0.1, without="FedAvg")


@dataclasses.dataclass(frozen=True)
class MoFedSAM:
    """Hyper-parameters of MoFedSAM."""

    rho: float = _radius(0.1, without="FedCM")
    beta: float = field(
        0.1,
        "beta, share of the client's gradient in its step; the rest is the mean step of the last round. 1 gives FedSAM",
        low=0,
        open_low=True,
        high=1,
        source="Qu et al. 2022; simulator of FedSpeed's authors: 0.05 or 0.1",
    )


@dataclasses.dataclass(frozen=True)
class FedGAMMA:
    """Hyper-parameters of FedGAMMA."""

    rho: float = _radius(0.01, without="SCAFFOLD")


@dataclasses.dataclass(frozen=True)
class FedSpeed:
    """Hyper-parameters of FedSpeed."""

    rho: float = _radius(0.1, without="FedDyn")
    strength: float = field(0.1, "lambda, weight of the proximal term (alpha of FedDyn)", low=0, source=SIMULATOR)


def sharp(problem: Problem, rho: float) -> Problem:
    """Modify a problem so that clients descend along the gradient at the worst point of a ball."""
    take = lambda loss: sharpness_aware(loss, rho=rho, eta=None)
    return dataclasses.replace(problem, local=dataclasses.replace(problem.local, gradient=take))


def fedsam(hyper: FedSAM, problem: Problem) -> Strategy:
    """Build FedSAM."""
    return averaging(sharp(problem, hyper.rho))


def mofedsam(hyper: MoFedSAM, problem: Problem) -> Strategy:
    """Build MoFedSAM.

    Raises:
      UserError: the optimizer of the clients is not SGD with momentum below 1.
    """
    return fedcm(hyper.beta, sharp(problem, hyper.rho))


def fedgamma(hyper: FedGAMMA, problem: Problem) -> Strategy:
    """Build FedGAMMA.

    Raises:
      UserError: the optimizer of the clients is not SGD with momentum below 1.
    """
    return scaffold.build(scaffold.Hyper(), sharp(problem, hyper.rho))


def fedspeed(hyper: FedSpeed, problem: Problem) -> Strategy:
    """Build FedSpeed."""
    return feddyn.build(feddyn.Hyper(alpha=hyper.strength), sharp(problem, hyper.rho))


class State(NamedTuple):
    """The global model and the mean step of the clients in the last round, as a gradient."""

    model: Variables
    gradient: trees.Params


def fedcm(beta: float, problem: Problem) -> Strategy:
    """Build FedCM (Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-Level Momentum, arXiv 2021).

    Raises:
      UserError: the optimizer of the clients is not SGD with momentum below 1.
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
        done = setting.num_steps(cohort.sizes, cohort.work)
        steps = jnp.maximum(done, 1).astype(jnp.float32)  # 0 steps: a lost client
        descents = jax.vmap(lambda params: trees.subtract(state.model["params"], params))(uploads["model"]["params"])
        gradients = jax.vmap(trees.scale)(descents, 1 / (steps * step_size))
        return State(*(trees.mean(each, weights=cohort.sizes) for each in (uploads["model"], gradients))), {}

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "gradient"),
        client_update=client_update,
        server_update=server_update,
    )
