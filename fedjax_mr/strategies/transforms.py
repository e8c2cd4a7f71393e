"""Strategies made from strategies: an optimizer on the server, and an exchange of layers among the clients of a round.

Each function takes a strategy and returns one that differs from it in a few members; everything else is passed through.
They may be put around each other, as in ``server_optimizer(secure_exchange(fedcross, problem), optax.sgd(1.0))``.

The server's optimizer. Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, arXiv 1909.06335, 2019 (FedAvgM). Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan:
Adaptive Federated Optimization, ICLR 2021, Algorithm 2 (FedAdagrad, FedYogi, FedAdam).

The exchange. Hu, Yue, Xie, Chen, Huang, Wei, Lian, Liu, Chen: Is Aggregation the Only Choice? Federated Learning via
Layer-wise Model Recombination, KDD 2024, Appendix B (secure recombination). secure/exchange.py says how far it hides
owners, and from whom it does not; secure/messages.py has the real encrypted messages.

Momentum and K models. Momentum beta adds up about 1 / (1 - beta) changes of the parameters. FedAvgM's change is a mean
over the clients of a round, which momentum smooths further. In FedMR and FedCross the change of one of K models is that
of one client, which no mean has smoothed: with beta 0.9 and rate 1 every such step becomes ten times as long, and
training ends at chance or diverges. So the default rate of momentum is 1 - beta for a server that keeps K models, and
1 for one that keeps a single model.

Deviations. The papers of the optimizers know one global model; here each of K models has an optimizer of its own. They
leave BatchNorm open; here its statistics are those of the inner strategy, since a step beyond a mean of variances could
be negative. The paper of the exchange knows FedMR alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.secure.exchange import exchange
from fedjax_mr.strategies import base
from fedjax_mr.strategies.base import Info, LayerExchange, Parcels, Payload, Problem, Strategy, View

# --- An optimizer on the server --------------------------------------------------------------------------------------

LEARNING_RATES = {"momentum": 1.0, "adam": 0.1, "yogi": 0.01, "adagrad": 0.1}
"""The default learning rate of each optimizer for a server of one model: Hsu et al. 2019; Flower's others."""


class State(NamedTuple):
    """The state of the inner strategy and that of the server's optimizer."""

    inner: base.State
    optimizer: optax.OptState  # of K models: leaves [K, ...]


class Moments(NamedTuple):
    """The state of `adaptive`, two trees like the parameters."""

    first: trees.Params  # m
    second: trees.Params  # v


def server_optimizer(inner: Strategy, optimizer: optax.GradientTransformation) -> Strategy:
    """A strategy whose server takes the inner server's change of its models as a negative gradient.

    With the parameters x before a round and y after the inner server's update, the new ones are x + u, where u is the
    update that ``optimizer`` makes of the gradient x - y; plain SGD of rate 1 gives y again. The other collections
    (BatchNorm statistics) are those of the inner server: they are never extrapolated. So is everything else that the
    inner server keeps (control variates).

    Each of K models has its own optimizer, by ``vmap``, so that a norm is that of one model. In FedMR the change of
    model j includes that its layers came from other models. A model that the inner server leaves as it is (a cluster
    of HypCluster without clients) has the gradient zero, but may go on by momentum.

    Args:
      inner: a strategy that names its server's models (`Strategy.models`).
      optimizer: from `make_server_optimizer` or any other of optax.

    Raises:
      UserError: the inner strategy names none.
    """
    models = inner.models
    if models is None:
        raise UserError(
            "a server optimizer needs a server that moves a model, or K models; this strategy names none "
            "(Strategy.models): use --server_optimizer=none"
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

    def of_inner(member: Callable | None) -> Any:
        return member and (lambda state, *rest: member(state.inner, *rest))

    def between_rounds_of(member: Callable) -> Any:
        def between_rounds(state, *rest):
            new, info = member(state.inner, *rest)
            return state._replace(inner=new), info

        return between_rounds

    def traffic_of(member: Callable) -> Any:
        return lambda usual, state, *rest: member(usual, state.inner, *rest)

    part = inner.personal_part

    return inner._replace(
        init=init,
        dispatch=of_inner(inner.dispatch),
        server_update=server_update,
        global_model=of_inner(inner.global_model),
        individual_models=of_inner(inner.individual_models),
        select=of_inner(inner.select),
        between_rounds=inner.between_rounds and between_rounds_of(inner.between_rounds),
        traffic=inner.traffic and traffic_of(inner.traffic),
        personal_model=inner.personal_model if part else of_inner(inner.personal_model),
        personal_part=of_inner(part),
        models=View(
            lambda state: models.get(state.inner),
            lambda state, new: state._replace(inner=models.set(state.inner, new)),
            models.stacked,
        ),
    )


def make_server_optimizer(
    name: str,
    *,
    lr: float | None = None,
    momentum: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    several: bool = False,
) -> optax.GradientTransformation:
    """An optimizer for `server_optimizer` by its name.

    ``momentum`` (FedAvgM): v = beta v + delta, w = w + lr v, which is optax's SGD with momentum. ``adam``, ``yogi`` and
    ``adagrad``: see `adaptive`.

    Args:
      name: one of `LEARNING_RATES`.
      lr: learning rate. Defaults to 1 - momentum for momentum on K models, otherwise to that of `LEARNING_RATES`.
      momentum: beta of momentum, beta_1 of the others. Reddi et al. run FedAdagrad with 0.
      beta2: beta_2 of adam and yogi.
      tau: tau of adam, yogi and adagrad.
      several: whether the server keeps K models (`View.stacked`).
    """
    if lr is None:
        lr = 1 - momentum if several and name == "momentum" else LEARNING_RATES[name]
    if name == "momentum":
        return optax.sgd(lr, momentum=momentum)
    return optax.chain(adaptive(name, beta1=momentum, beta2=beta2, tau=tau), optax.scale_by_learning_rate(lr))


def adaptive(kind: str, *, beta1: float, beta2: float, tau: float) -> optax.GradientTransformation:
    """M / (sqrt(v) + tau) of Algorithm 2 of Reddi et al., as a transformation of gradients.

    From m = 0 and v = tau^2, with the gradient g: m = beta1 m + (1 - beta1) g, and v becomes v + g^2 (``adagrad``),
    beta2 v + (1 - beta2) g^2 (``adam``) or v - (1 - beta2) g^2 sign(v - g^2) (``yogi``). optax's own of these names
    differ: its Adam and Yogi correct the bias of both moments and start v at 0 and 1e-6; its Adagrad has no m and puts
    the small number under the root.
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


# --- An exchange of layers among the clients --------------------------------------------------------------------------


def secure_exchange(
    inner: Strategy, problem: Problem, *, when: str = "before_upload", share: float = 0.5, repetitions: int = 1
) -> Strategy:
    """Build a strategy whose K clients exchange layers among themselves, so that an upload is not all a client's own.

    Every layer's copies are permuted, so means and sums over the K models stay. Whole layers are exchanged, as in the
    paper, whatever the server does with the models afterwards. Before the upload the layers are encrypted for the
    server. Before the training they are in clear, because no client can train a model that it cannot read; there the
    exchange changes nothing but bytes if all clients receive the same model.

    The strategy only names the exchange (`Exchange`): the engine simulates it, real clients do it.

    The server takes an upload to be that of the client that sent it: weights by numbers of samples then belong to the
    senders of layers instead of their owners, so that uniform weights are the ones to combine with an exchange.

    The information of a round, with an exchange before the upload: ``layers_unmoved``, the share of layers that are
    uploaded by their owners, and ``layers_held_by_others``, the share of layers that another client has had in hand.

    Args:
      inner: a strategy whose payloads and uploads hold ``model``, one per client [K, ...], all of one network.
      problem: of the inner strategy.
      when: ``before_upload``, ``before_training`` or ``both``.
      share: the probability with which a client sends a layer, in 0..1.
      repetitions: exchanges each time.

    Raises:
      UserError: a round of a single client; the clients have different networks; they exchange layers already; a
        payload or upload without ``model`` (in a round).
    """
    if problem.cohort_size < 2:
        raise UserError("layers are exchanged among the clients of a round: --cohort must be at least 2")
    if not problem.layers:
        raise UserError("clients of different networks have no layers to exchange: take one network (--model)")
    if inner.exchange is not None:
        raise UserError("the clients exchange layers already; give more repetitions in place of a second exchange")
    layers, count = tuple(layer.leaves for layer in problem.layers), problem.cohort_size

    def mix(sent: Payload, key: jax.Array) -> tuple[Payload, Info]:
        outcome = exchange(key, num_units=len(layers), count=count, share=share, repetitions=repetitions)
        owners, others = jnp.arange(count)[None, :], ~jnp.eye(count, dtype=bool)[None]
        info = {
            "layers_unmoved": jnp.mean(outcome.permutations == owners),
            "layers_held_by_others": jnp.mean(jnp.any(outcome.held & others, axis=1)),
        }
        models = trees.permute(_model_of(sent), units=layers, permutations=outcome.permutations)
        return sent | {"model": models}, info

    def traffic(usual, state, uploads, cohort, round):
        """Every picked layer goes to another client and one comes back: expected bytes, without the encryption's."""
        counted = inner.traffic(usual, state, uploads, cohort, round) if inner.traffic else usual
        exchanges = repetitions * (2 if when == "both" else 1)
        size = 2 * share * exchanges * trees.num_bytes(_model_of(uploads))
        return counted._replace(peer=(*counted.peer, Parcels.of(1, int(size + 0.5))))

    return inner._replace(traffic=traffic, exchange=LayerExchange(mix, when, share, repetitions))


def _model_of(sent: Payload) -> Variables:
    """The models [K, ...] of a payload or upload.

    Raises:
      UserError: there are none.
    """
    if "model" not in sent:
        raise UserError(
            "the exchange of layers needs payloads and uploads that hold a model of each client ('model'); this "
            f"strategy sends {', '.join(sent) or 'nothing'}"
        )
    return sent["model"]
