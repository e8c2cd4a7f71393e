"""Per-FedAvg: the global model is one from which a single step on a client's samples leads to a good model of its own.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, Algorithm 1. In a local step a client draws batches D, D' and D'' of its samples and computes

    u = w - alpha grad f(w; D),  w = w - beta (I - alpha Hessian f(w; D'')) grad f(u; D').

The two approximations of the paper's section 5: without the Hessian (``gradient=first_order``, as in the code of
pFedMe's authors), or the Hessian's product with v = grad f(u; D') as a difference of gradients (``hessian_free``),
(grad f(w + delta v; D'') - grad f(w - delta v; D'')) / (2 delta). beta is --lr; momentum and weight decay act on what
stands behind it. D' are the batches of the client's epochs; D and D'' are drawn anew in every step.

The column ``accuracy`` is that of w, which nobody uses as it is. A client's own model is u for a batch of its training
samples; the code of pFedMe's authors adapts it on batches of the test samples that it is then tested on.

Deviations. Clients are weighted by their numbers of samples, as in that code (the paper: equally). BatchNorm
statistics, which the paper does not know, are those of the pass at u.
"""

import dataclasses
from collections.abc import Callable

import jax

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.local import ClientData, Loss
from fedjax_mr.errors import UserError
from fedjax_mr.strategies.base import Problem, Strategy, averaging
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Per-FedAvg's own settings."""

    adapt_lr: float | None = field(
        None,
        "alpha, the learning rate of a client's step to its own model; none: --lr",
        low=0,
        source="ours; pFedMe's authors: 0.005 to 0.03, with 0.001 to 0.003 for beta (--lr)",
    )
    gradient: str = field(
        "first_order",
        "what becomes of the Hessian: it is left out, or its product is a difference of gradients (hessian_free)",
        choices=("first_order", "hessian_free"),
        source="Fallah et al. 2020 have both; pFedMe's authors: first_order",
    )
    delta: float = field(
        1e-3, "delta of hessian_free, how far apart its gradients are", low=0, open_low=True, source="ours"
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build Per-FedAvg.

    Raises:
      UserError: alpha is not given and the clients' optimizer is none with a plain learning rate.
    """
    setting = problem.local
    adapt_lr = setting.lr if hyper.adapt_lr is None else hyper.adapt_lr
    if adapt_lr is None:
        raise UserError("perfedavg needs a plain learning rate: --optimizer=sgd, or --perfedavg_adapt_lr")

    def step_to_own(params, gradient):
        return trees.subtract(params, trees.scale(gradient, adapt_lr))

    def through_the_step(data: ClientData) -> Callable[[Loss], Callable]:
        """How a client takes the gradient of a loss after one step of its own."""

        def of(loss: Loss) -> Callable:
            value_and_grad = jax.value_and_grad(loss, has_aux=True)

            def after_the_step(params, state, batch, key):
                first_key, third_key = jax.random.split(jax.random.fold_in(key, 2))
                first = local.draw(setting, data, first_key)  # D
                _, gradient = value_and_grad(params, state, first, first_key)
                result, gradient = value_and_grad(step_to_own(params, gradient), state, batch, key)
                if hyper.gradient == "first_order":
                    return result, gradient
                third = local.draw(setting, data, third_key)  # D''
                shift = trees.scale(gradient, hyper.delta)
                ends = (trees.add(params, shift), trees.subtract(params, shift))
                above, below = (value_and_grad(end, state, third, third_key)[1] for end in ends)
                product = trees.scale(trees.subtract(above, below), 0.5 / hyper.delta)
                return result, step_to_own(gradient, product)

            return after_the_step

        return of

    def train(received, data, key):
        gradient = through_the_step(data)
        return local.train(problem.model, setting, received, data, key, gradient=gradient)

    def personal_model(state, memory, data, key):
        params, others = state.model["params"], {name: leaf for name, leaf in state.model.items() if name != "params"}
        gradient = jax.grad(local.cross_entropy(problem.model), has_aux=True)
        gradient, others = gradient(params, others, local.draw(setting, data, key), key)
        return {"params": step_to_own(params, gradient), **others}

    return averaging(problem, train=train)._replace(personal_model=personal_model)
