"""Additions that take a strategy and return one: `server_optimizer`, and `keep_optimizer` for the clients.

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, arXiv
1909.06335, 2019 (FedAvgM). Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated
Optimization, ICLR 2021, Algorithm 2 (FedAdagrad, FedYogi, FedAdam).

Momentum with K models. Momentum beta accumulates about 1 / (1 - beta) updates of the parameters. The update of FedAvgM
is a mean over the clients of a round. In FedMR and FedCross the update of one of the K models is that of a single
client and is not averaged. With beta 0.9 and learning rate 1, its steps become ten times as long, and training ends at
chance accuracy or diverges. So the default learning rate of momentum is 1 - beta for a server with K models, and 1 for
a server with a single model.

Deviations. The papers of the optimizers have one global model; here each of K models has its own optimizer. These
papers do not mention BatchNorm. Here its statistics are those of the inner strategy, because a variance extrapolated
beyond the mean could be negative.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry
from fedjax_mr.settings import field
from fedjax_mr.strategies import interface, parts
from fedjax_mr.strategies.interface import Problem, Strategy

LEARNING_RATES = {"momentum": 1.0, "adam": 0.1, "yogi": 0.01, "adagrad": 0.1}
"""Default learning rate of each optimizer for a server with one model. Sources: Hsu et al. 2019; the others: Flower."""


_setting = functools.partial(field, group="Federation")


@dataclasses.dataclass(frozen=True)
class ServerOptimizer:
    """The settings of a server optimizer."""

    # fmt: off
    server_optimizer: str = _setting(
        "none", "Optimizer of the server. It uses the change of the global model in a round as a negative gradient; "
        "methods with K models use the change of each of them",
        names=("none", "momentum", "adam", "yogi", "adagrad"),
        source="our choice; momentum: FedAvgM, Hsu et al. 2019; adam, yogi, adagrad: Reddi et al., ICLR 2021, "
               "Algorithm 2", short=True)
    server_lr: float | None = _setting(
        None, "Learning rate of --server_optimizer. If omitted, 1 (momentum; 1 - --server_momentum for methods with "
        "several models), 0.1 (adam, adagrad) or 0.01 (yogi)", low=0, open_low=True,
        source="Hsu et al. 2019; Flower's FedAdam, FedAdagrad, FedYogi; Reddi et al. 2021 tune it; K models: ours",
        needs=("server_optimizer",), short=True)
    server_momentum: float = _setting(
        0.9, "beta of momentum, and beta_1 of adam, yogi and adagrad, on the server",
        low=0, high=1, open_high=True, source="Hsu et al. 2019; Reddi et al. 2021", needs=("server_optimizer",))
    server_beta2: float = _setting(
        0.99, "beta_2 of adam and yogi on the server", low=0, high=1, open_high=True, source="Reddi et al. 2021",
        needs=("server_optimizer",))
    server_tau: float = _setting(
        1e-3, "tau of adam, yogi and adagrad on the server: a larger value adapts less to single weights",
        low=0, open_low=True, source="Reddi et al. 2021", needs=("server_optimizer",))
    # fmt: on


class State(NamedTuple):
    """The states of the inner strategy and of the server optimizer."""

    inner: interface.State
    optimizer: optax.OptState  # for K models: leaves [K, ...]


class Moments(NamedTuple):
    """The state of `adaptive`: two trees with the structure of the parameters."""

    first: trees.Params  # m
    second: trees.Params  # v


def server_optimizer(inner: Strategy, optimizer: optax.GradientTransformation) -> Strategy:
    """Apply an optimizer to the server's models, with the negative update of the inner server as gradient.

    If the parameters are x before a round and y after the inner server's update, the new parameters are x + u, where u
    is the update that ``optimizer`` computes for the gradient x - y. SGD with learning rate 1 yields y. Other
    collections (BatchNorm statistics) and other fields (control variates) are those of the inner server.

    Each of K models has its own optimizer, through ``vmap``, so norms are norms of one model. In FedMR the update of
    model j includes the exchange of its layers with other models. A model that the inner server does not change (a
    cluster of HypCluster without clients) has gradient zero, but momentum may still move it.

    Args:
      inner: a strategy with `Strategy.models`.
      optimizer: the result of `make_server_optimizer`, or any optax optimizer.

    Raises:
      UserError: the inner strategy has no `Strategy.models`.
    """
    models = inner.models
    if models is None:
        raise UserError(
            "this strategy has no server models that a server optimizer could update (Strategy.models): pass "
            'server_optimizer=none, or, if the strategy is yours, add models=strategies.interface.view("model")'
        )
    batched = jax.vmap if models.stacked else lambda function: function

    def init(key):
        state = inner.init(key)
        return State(state, batched(optimizer.init)(models.get(state)["params"]))

    def step(old, new, state):
        updates, state = optimizer.update(trees.subtract(old, new), state, old)
        return optax.apply_updates(old, updates), state

    def server_update(state, uploads, cohort, round, key):
        new, info = inner.server_update(state.inner, uploads, cohort, round, key)
        before, after = models.get(state.inner), models.get(new)
        params, moments = batched(step)(before["params"], after["params"], state.optimizer)
        return State(models.set(new, after | {"params": params}), moments), info

    return parts.lifted(inner)._replace(init=init, server_update=server_update)


def make_server_optimizer(
    name: str,
    *,
    lr: float | None = None,
    momentum: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    several: bool = False,
) -> optax.GradientTransformation:
    """Create an optimizer for `server_optimizer` by name.

    ``momentum`` (FedAvgM): v = beta v + delta, w = w + lr v, which is optax's SGD with momentum. ``adam``, ``yogi`` and
    ``adagrad``: see `adaptive`.

    Args:
      name: one of `LEARNING_RATES`.
      lr: learning rate. Defaults to 1 - momentum for momentum on K models, otherwise to the value in `LEARNING_RATES`.
      momentum: beta of momentum, beta_1 of the others. Reddi et al. use 0 for FedAdagrad.
      beta2: beta_2 of adam and yogi.
      tau: tau of adam, yogi and adagrad.
      several: whether the server keeps K models (`View.stacked`).
    """
    if lr is None:
        lr = 1 - momentum if several and name == "momentum" else LEARNING_RATES[name]
    if name == "momentum":
        return optax.sgd(lr, momentum=momentum)
    return optax.chain(adaptive(name, beta1=momentum, beta2=beta2, tau=tau), optax.scale_by_learning_rate(lr))


def by_settings(settings: ServerOptimizer, *, several: bool) -> optax.GradientTransformation:
    """The optimizer that settings name: a row of `SERVER_OPTIMIZERS`.

    Args:
      settings: the numbers may be traced.
      several: whether the server keeps K models.
    """
    return SERVER_OPTIMIZERS[settings.server_optimizer](settings, several)


def _ours(settings: ServerOptimizer, several: bool) -> optax.GradientTransformation:
    return make_server_optimizer(
        settings.server_optimizer,
        lr=settings.server_lr,
        momentum=settings.server_momentum,
        beta2=settings.server_beta2,
        tau=settings.server_tau,
        several=several,
    )


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `SERVER_OPTIMIZERS`.

    Raises:
      UserError: the row is not a function.
    """
    if not callable(row):
        raise UserError(
            f"fmr.SERVER_OPTIMIZERS[{name!r}] takes a function build(settings, several) that returns an optax optimizer"
        )


SERVER_OPTIMIZERS = Registry(
    "server optimizer", "fmr.SERVER_OPTIMIZERS", check_row, dict.fromkeys(LEARNING_RATES, _ours)
)
"""All optimizers of the server: (`ServerOptimizer`, whether the server keeps K models) -> optimizer."""


def adaptive(kind: str, *, beta1: float, beta2: float, tau: float) -> optax.GradientTransformation:
    """The gradient transformation m / (sqrt(v) + tau) of Algorithm 2 of Reddi et al.

    Start: m = 0 and v = tau^2. With the gradient g, m becomes beta1 m + (1 - beta1) g, and v becomes v + g^2
    (``adagrad``), beta2 v + (1 - beta2) g^2 (``adam``) or v - (1 - beta2) g^2 sign(v - g^2) (``yogi``). The optax
    optimizers of the same names differ: Adam and Yogi correct the bias of both moments and start v at 0 and 1e-6;
    Adagrad has no m and adds the small number under the square root.
    """
    second_moment = {
        "adagrad": lambda v, square: v + square,
        "adam": lambda v, square: beta2 * v + (1 - beta2) * square,
        "yogi": lambda v, square: v - (1 - beta2) * square * jnp.sign(v - square),
    }[kind]

    def init(params):
        return Moments(trees.zeros_like(params), jax.tree.map(lambda leaf: jnp.full_like(leaf, tau**2), params))

    def update(updates, state, params=None):
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: second_moment(v, jnp.square(g)), state.second, updates)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + tau), first, second), Moments(first, second)

    return optax.GradientTransformation(init, update)


# --- The optimizer of the clients -------------------------------------------------------------------------------------


class KeptOptimizer(NamedTuple):
    """Memory of one client: the state of its optimizer after its last training."""

    state: optax.OptState
    trained: jax.Array  # bool; until it is True, ``state`` is not used


def keep_optimizer(inner: Strategy, problem: Problem) -> Strategy:
    """Let each client continue with the state of its optimizer from its last round, where it would start anew.

    DiLoCo needs it, whose clients train with AdamW for hundreds of steps. The state never leaves the client, so the
    traffic is the same. Of SGD with momentum it is the velocity.

    Args:
      inner: a strategy whose clients do nothing but train (`parts.PlainTraining`), such as FedAvg, FedMR or D-PSGD.
      problem: the federation.

    Raises:
      UserError: the clients of the strategy train in a way of their own or keep a memory.
    """
    training, network, setting = inner.client_update, problem.model, problem.local
    plain = isinstance(training, parts.PlainTraining) and training.train is None and inner.init_memory is None
    if not plain or len(network.networks) > 1:
        raise UserError(
            "this method trains its clients in a way of its own, so their optimizers start anew in every round: leave "
            "keep_optimizer out, or use a method such as fedavg, fedmr or dpsgd"
        )

    def init_memory(key, client_id):
        zeros = trees.zeros_like(network.shapes()["params"])
        return KeptOptimizer(setting.optimizer.init(zeros), jnp.zeros((), bool))

    def client_update(payload, memory, data, round, key):
        optimizer = setting.optimizer
        begin = lambda params: trees.where(memory.trained, memory.state, optimizer.init(params))
        step = local.sgd(
            local.supervised(network), setting, optimizer=optax.GradientTransformation(begin, optimizer.update)
        )
        both = step._replace(result=lambda carry: (step.result(carry), carry[-1]))
        (model, state), metrics = local.run(both, setting, payload["model"], data, key)
        return {"model": model}, KeptOptimizer(state, jnp.ones((), bool)), metrics

    return inner._replace(client_update=client_update, init_memory=init_memory)
