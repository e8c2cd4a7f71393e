"""pFedBayes: each client learns a distribution over its weights, regularised towards a global distribution.

Zhang, Li, Li, Guo, Shao: Personalized Federated Learning via Variational Bayesian Inference, ICML 2022, Algorithm 1.
All weights are independent Gaussians with mean m and standard deviation softplus(rho). On a mini-batch of a client with
n samples, its personal distribution q takes ``inner_steps`` gradient steps on the mean of

    -log p(label | weights) + zeta / n KL(q || p),

where the weights are drawn from q in each step by the reparametrisation m + softplus(rho) times standard normal noise,
and p is the client's copy of the global distribution. Then p takes one gradient step on zeta / n KL(q || p). The server
averages m and rho of the copies. Tests use the networks with the means as weights.

Deviations:
* The optimizer is Adam, as in the paper. If ``lr`` is omitted, it is the clients' optimizer; plain SGD diverges unless
  zeta is small. Like all optimizers here, it is reset in every round.
* A client's q starts as the first p that the client receives.
* Clients are weighted by their numbers of samples, as in the unofficial code; the paper weights them equally.
* BatchNorm statistics are those of the networks drawn from q. The server averages them.

The authors released no code. Differences to an unofficial code: it divides the divergence by the number of samples in a
client's mini-batches of a round in place of n. It draws noise with standard deviation 0.001 in place of 1, so that
almost nothing of the distributions remains, and tests networks drawn in this way. In each divergence it takes the
standard deviations of the other distribution from the last draw, which precedes the last step; here they are the
current ones, as in Algorithm 1.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local, optimizers
from fedjax_mr.client.local import Batch, LocalStep, Loss
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import to_all


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of pFedBayes."""

    zeta: float = field(
        10.0,
        "zeta, weight of the divergence between the personal and the global distribution",
        low=0,
        source="unofficial code",
    )
    rho: float = field(
        -3.0,
        "initial rho of all weights: their standard deviation is log(1 + exp(rho)), which is 0.049 for -3",
        source="unofficial code, which states -2.5 for the paper",
    )
    inner_steps: int = field(
        5, "steps of the personal distribution per mini-batch", unit="steps", low=1, source="unofficial code"
    )
    lr: float | None = field(
        0.001,
        "learning rate of Adam, for both distributions. If none, the clients' optimizer replaces Adam",
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
    """Memory of one client: its personal distribution."""

    model: Variables  # of the means
    rho: trees.Params
    trained: jax.Array  # bool, whether the client has trained


def noise(key: jax.Array, params: trees.Params) -> trees.Params:
    """Draw standard normal noise for each parameter; consumes ``key``."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])


def draw(q: Gaussian, key: jax.Array) -> trees.Params:
    """Draw weights from a distribution, differentiable with respect to it; consumes ``key``."""
    return jax.tree.map(lambda mean, rho, noise: mean + jax.nn.softplus(rho) * noise, *q, noise(key, q.mean))


def divergence(q: Gaussian, p: Gaussian) -> jax.Array:
    """KL(q || p) in nats."""

    def of_leaf(q_mean: jax.Array, q_rho: jax.Array, p_mean: jax.Array, p_rho: jax.Array) -> jax.Array:
        q_deviation, p_deviation = jax.nn.softplus(q_rho), jax.nn.softplus(p_rho)
        ratio = q_deviation / p_deviation
        return jnp.sum(0.5 * (ratio**2 + ((q_mean - p_mean) / p_deviation) ** 2 - 1) - jnp.log(ratio))

    return jax.tree.reduce(jnp.add, jax.tree.map(of_leaf, *q, *p))


def local_round(loss: Loss, optimizer: optax.GradientTransformation, *, strength: jax.Array, steps: int) -> LocalStep:
    """A local step on a mini-batch: several steps of q, then one of p. It maps (q, p, state) to (q, p, state).

    Args:
      loss: loss of drawn weights.
      optimizer: optimizer of each distribution.
      strength: zeta / n.
      steps: number of steps of q.
    """

    def objective(q: Gaussian, p: Gaussian, state: Variables, batch: Batch, key: jax.Array) -> tuple:
        noise_key, key = jax.random.split(key)
        value, state = loss(draw(q, noise_key), state, batch, key)
        return value + strength * divergence(q, p), state

    def apply_gradient(gradient: Any, optimizer_state: Any, distribution: Any) -> tuple[Any, Any]:
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
            q, of_q = apply_gradient(gradient, of_q, q)
            return q, state, of_q, value

        q, state, of_q, value = jax.lax.fori_loop(0, steps, step_of_q, (q, state, of_q, jnp.zeros(())))
        p, of_p = apply_gradient(jax.grad(lambda p: strength * divergence(q, p))(p), of_p, p)
        return (q, p, state, of_q, of_p), value

    def result(carry: tuple) -> tuple[Gaussian, Gaussian, Variables]:
        q, p, state, of_q, of_p = carry
        return optimizers.trained(q, of_q), optimizers.trained(p, of_p), state

    return LocalStep(init, step, result)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build pFedBayes."""
    optimizer = problem.local.optimizer if hyper.lr is None else optax.adam(hyper.lr)

    def init(key):
        model = problem.model.init(key)
        return State(model, jax.tree.map(lambda leaf: jnp.full_like(leaf, hyper.rho), model["params"]))

    def init_memory(key, client_id):
        return Memory(*init(key), trained=jnp.zeros((), bool))

    def client_update(payload, memory, data, round, key):
        p = Gaussian(payload["model"]["params"], payload["rho"])
        model = trees.where(memory.trained, memory.model, payload["model"])
        q = Gaussian(model["params"], trees.where(memory.trained, memory.rho, payload["rho"]))
        strength = hyper.zeta / jnp.maximum(data.size, 1).astype(jnp.float32)
        loss = local.supervised(problem.model)
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
