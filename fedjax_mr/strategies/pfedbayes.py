"""pFedBayes: every client learns a distribution over its weights, near a global one, which follows the clients'.

Zhang, Li, Li, Guo, Zhu: Personalized Federated Learning via Variational Bayesian Inference, ICML 2022, Algorithm 1. All
weights are independent Gaussians of mean m and standard deviation softplus(rho). On a mini-batch of a client with n
samples its own distribution q takes ``inner_steps`` steps down the mean of

    -log p(label | weights) + zeta / n KL(q || p),

with weights drawn anew from q, by the gradient with respect to m and rho of m + softplus(rho) times standard normal
noise; p is the client's copy of the global distribution. Then p takes one step down zeta / n KL(q || p). The server
averages m and rho of the copies. What is tested are the networks of the means.

Deviations. The optimizer is the paper's Adam (``lr=none``: the clients' own, which as plain SGD diverges unless zeta is
small), and like all optimizers here it starts anew in every round. There is no released code of the authors; what is
said of code is that of an unofficial one. It divides the divergence by the samples of a client's mini-batches in a
round in place of n, and draws noise of standard deviation 0.001 in place of 1, which leaves next to nothing of the
distributions; it tests networks drawn so. In each divergence it takes the standard deviations of the other distribution
from that one's last draw, which is older than its last step; here they are the present ones, as in Algorithm 1. A
client's q begins as the first p that it receives. Clients are weighted by their numbers of samples, as in that code
(the paper: equally). BatchNorm statistics are those of the networks drawn from q; the server averages them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.local import Batch, LocalStep, Loss
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, to_all
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """pFedBayes's own settings."""

    zeta: float = field(
        10.0,
        "zeta, how strongly the own and the global distribution are held together",
        low=0,
        source="unofficial code",
    )
    rho: float = field(
        -3.0,
        "rho of all weights at the start: their standard deviation is log(1 + exp(rho)), 0.049 at -3",
        source="unofficial code, which names -2.5 as the paper's",
    )
    inner_steps: int = field(
        5, "steps of the own distribution on a mini-batch", unit="steps", low=1, source="unofficial code"
    )
    lr: float | None = field(
        0.001,
        "learning rate of Adam, for both distributions; none: the clients' optimizer in place of Adam",
        low=0,
        open_low=True,
        source="Zhang et al. 2022",
    )


class Gaussian(NamedTuple):
    """Independent Gaussians, two trees like the parameters."""

    mean: trees.Params
    rho: trees.Params  # the standard deviations are softplus(rho)


class State(NamedTuple):
    """The global distribution."""

    model: Variables  # of the means
    rho: trees.Params


class Memory(NamedTuple):
    """A client's own distribution."""

    model: Variables  # of the means
    rho: trees.Params
    trained: jax.Array  # whether it has trained


def noise(key: jax.Array, params: trees.Params) -> trees.Params:
    """Standard normal noise for each parameter; consumes ``key``."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])


def drawn(q: Gaussian, key: jax.Array) -> trees.Params:
    """Weights drawn from a distribution, differentiable with respect to it; consumes ``key``."""
    return jax.tree.map(lambda mean, rho, noise: mean + jax.nn.softplus(rho) * noise, *q, noise(key, q.mean))


def divergence(q: Gaussian, p: Gaussian) -> jax.Array:
    """KL(q || p) in nats."""

    def of_leaf(q_mean: jax.Array, q_rho: jax.Array, p_mean: jax.Array, p_rho: jax.Array) -> jax.Array:
        q_deviation, p_deviation = jax.nn.softplus(q_rho), jax.nn.softplus(p_rho)
        ratio = q_deviation / p_deviation
        return jnp.sum(0.5 * (ratio**2 + ((q_mean - p_mean) / p_deviation) ** 2 - 1) - jnp.log(ratio))

    return jax.tree.reduce(jnp.add, jax.tree.map(of_leaf, *q, *p))


def local_round(loss: Loss, optimizer: optax.GradientTransformation, *, strength: jax.Array, steps: int) -> LocalStep:
    """Steps of q, then one of p, on a mini-batch, from (q, p, state) to (q, p, state).

    Args:
      loss: of drawn weights.
      optimizer: of either distribution.
      strength: zeta / n.
      steps: of q.
    """

    def objective(q: Gaussian, p: Gaussian, state: Variables, batch: Batch, key: jax.Array) -> tuple:
        noise_key, key = jax.random.split(key)
        value, state = loss(drawn(q, noise_key), state, batch, key)
        return value + strength * divergence(q, p), state

    def moved(gradient: Any, optimizer_state: Any, distribution: Any) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises floats to integer powers
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, distribution)
        return optax.apply_updates(distribution, updates), optimizer_state

    def init(start: tuple[Gaussian, Gaussian, Variables]) -> tuple:
        q, p, state = start
        return q, p, state, optimizer.init(q), optimizer.init(p)

    def step(carry: tuple, batch: Batch, key: jax.Array) -> tuple[tuple, jax.Array]:
        q, p, state, of_q, of_p = carry

        def step_of_q(number: jax.Array, carry: tuple) -> tuple:
            q, state, of_q, _ = carry
            descend = jax.value_and_grad(objective, has_aux=True)
            (value, state), gradient = descend(q, p, state, batch, jax.random.fold_in(key, number))
            q, of_q = moved(gradient, of_q, q)
            return q, state, of_q, value

        q, state, of_q, value = jax.lax.fori_loop(0, steps, step_of_q, (q, state, of_q, jnp.zeros(())))
        p, of_p = moved(jax.grad(lambda p: strength * divergence(q, p))(p), of_p, p)
        return (q, p, state, of_q, of_p), value

    return LocalStep(init, step, lambda carry: carry[:3])


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build pFedBayes."""
    optimizer = problem.local.optimizer if hyper.lr is None else optax.adam(hyper.lr)

    def init(key):
        model = problem.model.init(key)
        return State(model, jax.tree.map(lambda leaf: jnp.full_like(leaf, hyper.rho), model["params"]))

    def init_memory(key):
        unused = Memory(*init(key), trained=jnp.zeros((), bool))
        return trees.broadcast(unused, problem.num_clients)

    def client_update(payload, memory, data, round, key):
        p = Gaussian(payload["model"]["params"], payload["rho"])
        model = trees.where(memory.trained, memory.model, payload["model"])
        q = Gaussian(model["params"], trees.where(memory.trained, memory.rho, payload["rho"]))
        strength = hyper.zeta / jnp.maximum(data.size, 1).astype(jnp.float32)
        loss = local.cross_entropy(problem.model)
        both = local_round(loss, optimizer, strength=strength, steps=hyper.inner_steps)
        start = (q, p, local.trained_and_state(model)[1])
        (q, p, state), metrics = local.run(both, problem.local, start, data, key)
        of_means = lambda means: {"params": means, **state}
        upload = {"model": of_means(p.mean), "rho": p.rho}
        return upload, Memory(of_means(q.mean), q.rho, jnp.ones((), bool)), metrics

    def server_update(state, uploads, cohort, round, key):
        mean = trees.mean(uploads, weights=cohort.sizes)
        return State(mean["model"], mean["rho"]), {}

    return Strategy(
        init,
        to_all(problem, "model", "rho"),
        client_update,
        server_update,
        global_model=lambda state: state.model,
        init_memory=init_memory,
        personal_part=lambda state, client_id: state.model,
        personal_model=lambda part, memory, data, key: trees.where(memory.trained, memory.model, part),
    )
