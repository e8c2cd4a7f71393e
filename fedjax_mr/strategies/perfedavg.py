"""Per-FedAvg: the global model is trained so that a single gradient step adapts it to a client (meta-learning).

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, Algorithm 1. In a local step a client draws batches D, D' and D'' of its samples and computes

    u = w - alpha grad f(w; D),  w = w - beta (I - alpha Hessian f(w; D'')) grad f(u; D').

Section 5 of the paper has two approximations. ``gradient=first_order`` omits the Hessian, as in the code of pFedMe's
authors. ``gradient=hessian_free`` computes the product of the Hessian and v = grad f(u; D') as a difference of
gradients, (grad f(w + delta v; D'') - grad f(w - delta v; D'')) / (2 delta). beta is the clients' learning rate;
momentum and weight decay act on the gradient that it multiplies. D' are the batches of the client's epochs; D and D''
are drawn in every step.

The column ``accuracy`` is that of w without adaptation. The personal model of a client is u for a batch of its training
samples. The code of pFedMe's authors adapts the model on batches of the test samples on which it is then tested.

Deviations. Clients are weighted by their numbers of samples, as in that code; the paper weights them equally. The paper
does not mention BatchNorm; its statistics here are those of the pass at u.
"""

import dataclasses
from collections.abc import Callable

import jax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.local import Loss
from fedjax_mr.client.samples import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of Per-FedAvg."""

    adapt_lr: float | None = field(
        None,
        "alpha, learning rate of the adaptation step. If omitted, the clients' learning rate",
        low=0,
        source="ours; pFedMe's authors: 0.005 to 0.03, with 0.001 to 0.003 for beta, the clients' learning rate",
    )
    gradient: str = field(
        "first_order",
        "the Hessian: omitted (first_order), or its product by a difference of gradients (hessian_free)",
        choices=("first_order", "hessian_free"),
        source="Fallah et al. 2020 describe both; pFedMe's authors: first_order",
    )
    delta: float = field(
        1e-3, "delta, step size of the difference of gradients with hessian_free", low=0, open_low=True, source="ours"
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build Per-FedAvg.

    Raises:
      UserError: ``adapt_lr`` is omitted, and the optimizer of the clients has no constant learning rate.
    """
    setting = problem.local
    adapt_lr = setting.sgd_lr if hyper.adapt_lr is None else hyper.adapt_lr
    if adapt_lr is None:
        raise UserError("perfedavg needs a constant learning rate: pass optimizer=sgd, or hyper.adapt_lr=0.01")

    def adapt(params, gradient):
        return trees.subtract(params, trees.scale(gradient, adapt_lr))

    def meta_gradient(data: ClientData) -> Callable[[Loss], Callable]:
        """The gradient of the loss after one adaptation step, as `local.train` takes it."""

        def of(loss: Loss) -> Callable:
            value_and_grad = jax.value_and_grad(loss, has_aux=True)

            def after_the_step(params, state, batch, key):
                first_key, third_key = jax.random.split(jax.random.fold_in(key, 2))
                first = local.draw(setting, data, first_key)  # D
                _, gradient = value_and_grad(params, state, first, first_key)
                result, gradient = value_and_grad(adapt(params, gradient), state, batch, key)
                if hyper.gradient == "first_order":
                    return result, gradient
                third = local.draw(setting, data, third_key)  # D''
                shift = trees.scale(gradient, hyper.delta)
                ends = (trees.add(params, shift), trees.subtract(params, shift))
                above, below = (value_and_grad(end, state, third, third_key)[1] for end in ends)
                product = trees.scale(trees.subtract(above, below), 0.5 / hyper.delta)
                return result, adapt(gradient, product)

            return after_the_step

        return of

    def train(received, data, key):
        gradient = meta_gradient(data)
        return local.train(problem.model, setting, received, data, key, gradient=gradient)

    def personal_model(state, memory, data, key):
        params, others = state.model["params"], {name: leaf for name, leaf in state.model.items() if name != "params"}
        gradient = jax.grad(local.supervised(problem.model), has_aux=True)
        gradient, others = gradient(params, others, local.draw(setting, data, key), key)
        return {"params": adapt(params, gradient), **others}

    return averaging(problem, train=train)._replace(personal_model=personal_model)
