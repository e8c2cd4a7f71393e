"""SCAFFOLD: control variates correct the drift in each client's gradients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
2020, Algorithm 1 with option II. The control variates have the shape of the parameters and start at zero.

Deviations from the paper, which has no momentum: a client's mean gradient is its change divided by its number of steps
and by lr / (1 - momentum), the step size that SGD with momentum converges to. Division by lr alone would give a result
that is 1 / (1 - momentum) times too large. ``variant=authors`` is the form behind the tables of FedMR's first version
and of FedCross: division by lr, sample weights r_i = N n_i / sum n, and gradients clipped to norm 10.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.local import LocalSetting
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field, require
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging, participation, step_towards, to_all, zero_params

AUTHORS_CLIP_NORM = 10.0  # the FedMR authors' code


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of SCAFFOLD."""

    server_lr: float = field(
        1.0,
        "eta_g, learning rate of the server; ignored with variant=authors",
        low=0,
        open_low=True,
        source="Karimireddy et al. 2020, section 7",
    )
    variant: str = field(
        "paper",
        "paper: Algorithm 1; authors: the code of FedMR's authors, weighted by samples, with clipped gradients",
        choices=("paper", "authors"),
        source="Karimireddy et al. 2020",
    )


class State(NamedTuple):
    """The global model and the server's control variate."""

    model: Variables
    control: Any  # c, like the parameters


def correct(correction: Any) -> optax.GradientTransformation:
    """A gradient transformation that adds ``correction``."""
    return optax.stateless(lambda gradient, _: trees.add(gradient, correction))


def sgd_lr(setting: LocalSetting) -> jax.Array:
    """The learning rate of the clients.

    Raises:
      UserError: the optimizer of the clients is not SGD with momentum below 1.
    """
    message = "this strategy derives gradients from the steps of SGD: pass optimizer=sgd and a momentum= below 1"
    require(setting.sgd_lr is not None, message)
    require(setting.momentum is None or setting.momentum < 1, message)
    return setting.sgd_lr


def steady_step(setting: LocalSetting) -> jax.Array:
    """The step size lr / (1 - momentum) that SGD converges to. A change divided by it is a sum of gradients.

    Raises:
      UserError: as `sgd_lr`.
    """
    return sgd_lr(setting) / (1 - (0.0 if setting.momentum is None else setting.momentum))


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build SCAFFOLD.

    Raises:
      UserError: as `sgd_lr`.
    """
    setting, authors = problem.local, hyper.variant == "authors"
    step_size = sgd_lr(setting) if authors else steady_step(setting)

    def relative_size(sizes):  # r_i, with mean 1 over all clients
        return sizes / (jnp.sum(problem.sizes.astype(jnp.float32)) / problem.num_present)

    def init(key):
        model = problem.model.init(key)
        return State(model, trees.zeros_like(model["params"]))

    def client_update(payload, memory, data, round, key):
        received, control, own = payload["model"], payload["control"], memory
        optimizer = optax.chain(correct(trees.subtract(control, own)), setting.optimizer)
        if authors:
            shared = trees.scale(control, 1 / relative_size(data.size.astype(jnp.float32)))
            clip = optax.clip_by_global_norm(AUTHORS_CLIP_NORM)
            optimizer = optax.chain(correct(trees.subtract(shared, own)), clip, setting.optimizer)
        model, metrics = local.train(problem.model, setting, received, data, key, optimizer=optimizer)

        steps = jnp.maximum(metrics.steps, 1).astype(jnp.float32)
        descent = trees.subtract(received["params"], model["params"])
        change = trees.subtract(trees.scale(descent, 1 / (steps * step_size)), control)
        return {"model": model, "control": change}, trees.add(own, change), metrics

    def server_update(state, uploads, cohort, round, key):
        changes, share = uploads["control"], participation(problem, cohort)
        if authors:
            model = trees.mean(uploads["model"], weights=cohort.sizes)
            relative = relative_size(cohort.sizes.astype(jnp.float32))
            changes = jax.vmap(trees.scale)(changes, relative)  # 0 for clients without samples
            share = problem.cohort_size / problem.num_present
        else:
            model = step_towards(state.model, trees.mean(uploads["model"]), hyper.server_lr)
        control = trees.add(state.control, trees.scale(trees.mean(changes), share))
        return State(model, control), {}

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "control"),
        client_update=client_update,
        server_update=server_update,
        init_memory=lambda key, client_id: zero_params(problem),
        increments=("control",),
    )
