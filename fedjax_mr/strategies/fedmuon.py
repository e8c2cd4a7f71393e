"""FedMuon: clients train with Muon, whose momentum is corrected by control variates before it is orthogonalised.

Takezawa, Koloskova, Jiang, Stich: FedMuon: Federated Learning with Bias-corrected LMO-based Optimization, ICLR 2026,
Algorithm 1. In a step, client i computes

    M <- (1 - alpha) M + alpha gradient,        x <- x - lr orthogonal(M - c_i + c),

where orthogonal(U S V^T) = U V^T, for each tensor as a matrix. M starts at c_i. After the last step c_i <- M. With K of
N clients in a round, the server computes

    c <- c + (1 / N) sum of the changes of c_i,        w <- (1 - K / N) w + (1 / N) sum of the clients' models.

Without the correction (LocalMuon) the paper proves that clients with different data may not leave the start: the mean
of orthogonalised momenta is not the orthogonalised mean. Without orthogonalisation and with alpha = 1 it is SCAFFOLD,
whose c_i is then the last gradient. The same name has another method (Liu et al., arXiv 2510.27403), which averages the
momenta and adds the last global change to each step.

Sources. We found no released code, and not the full text. The algorithm is that of a reader's notes on the paper and of
a reproduction (HiraNayak/FedMuon), which agree. ``orthogonal`` is approximated by T Newton-Schulz iterations on
M / |M|; the paper allows any T and has no coefficients in the notes. Here they are those of Muon (Jordan et al. 2024),
as in the reproduction.

Deviations:
* alpha is 1 - momentum of the clients' SGD (``momentum=``). ``clip_norm`` clips the gradient, and ``weight_decay`` acts
  on the weights, not on the momentum; the paper has neither.
* BatchNorm statistics are averaged over the clients of the round.
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
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging, participation, step_towards, to_all, zero_params
from fedjax_mr.strategies.scaffold import sgd_lr

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon
TINY = 1e-8  # added to norms


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedMuon."""

    iterations: int = field(
        5,
        "T, Newton-Schulz iterations; 0 divides a matrix by its norm",
        low=0,
        high=100,
        source="Muon, Jordan et al. 2024",
    )


class State(NamedTuple):
    """The global model and the server's control variate."""

    model: Variables
    control: Any  # c, like the parameters


def orthogonal(tensor: jax.Array, iterations: int) -> jax.Array:
    """Bring the singular values of a tensor [..., out] near to one, as a matrix with ``out`` columns."""
    matrix = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (jnp.sqrt(jnp.sum(x * x)) + TINY)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if is_tall else x).reshape(tensor.shape)


class Momentum(NamedTuple):
    """The state of the optimizer of a client."""

    momentum: trees.Params  # M
    steps: optax.OptState


def optimizer(setting: LocalSetting, own: Any, control: Any, iterations: int) -> optax.GradientTransformation:
    """The optimizer of a client with control variate ``own``; ``control`` is the server's."""
    beta = 0.0 if setting.momentum is None else setting.momentum
    clip = optax.identity() if setting.clip_norm is None else optax.clip_by_global_norm(setting.clip_norm)
    decay = optax.identity() if setting.weight_decay is None else optax.add_decayed_weights(setting.weight_decay)
    descent = optax.chain(decay, optax.scale_by_learning_rate(sgd_lr(setting)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Momentum]:
        gradient, _ = clip.update(updates, clip.init(params))
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, gradient)
        corrected = trees.add(trees.subtract(momentum, own), control)
        direction = jax.tree.map(lambda leaf: orthogonal(leaf, iterations), corrected)
        moves, steps = descent.update(direction, state.steps, params)
        return moves, Momentum(momentum, steps)

    return optax.GradientTransformation(lambda params: Momentum(own, descent.init(params)), update)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedMuon.

    Raises:
      UserError: the optimizer of the clients is not SGD with momentum below 1.
    """
    network, setting = problem.model, problem.local
    sgd_lr(setting)

    def init(key):
        model = network.init(key)
        return State(model, trees.zeros_like(model["params"]))

    def client_update(payload, memory, data, round, key):
        muon = optimizer(setting, memory, payload["control"], hyper.iterations)
        step = local.sgd(local.supervised(network), setting, optimizer=muon)
        both = step._replace(result=lambda carry: (step.result(carry), carry[-1].momentum))
        (model, momentum), metrics = local.run(both, setting, payload["model"], data, key)
        change = trees.subtract(momentum, memory)
        return {"model": model, "control": change}, trees.add(memory, change), metrics

    def server_update(state, uploads, cohort, round, key):
        share = participation(problem, cohort)
        model = step_towards(state.model, trees.mean(uploads["model"]), share)
        return State(model, trees.add(state.control, trees.scale(trees.mean(uploads["control"]), share))), {}

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "control"),
        client_update=client_update,
        server_update=server_update,
        init_memory=lambda key, client_id: zero_params(problem),
        increments=("control",),
    )
