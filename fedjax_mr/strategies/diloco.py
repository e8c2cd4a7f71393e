"""DiLoCo: few messages; each client trains for many steps with its own AdamW, and the server takes a Nesterov step.

Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen: DiLoCo: Distributed Low-Communication Training
of Language Models, arXiv 2311.08105, 2023, Algorithm 1. It is FedAvg with equal weights and two additions of this
package: clients keep the state of their optimizer between rounds (`transforms.keep_optimizer`), and the mean change
is the gradient of an outer SGD with Nesterov momentum. H is ``local_steps``. The paper's inner optimizer is
``optimizer=adamw``, with H = 500. With one step of SGD, ``outer_lr=1`` and ``outer_momentum=0`` it is the gradient step
of FedAvg.

Ours, without a paper: ``combine=recombine``. The server keeps K models and permutes their tensors as FedMR in place of
averaging, and each model has an outer optimizer of its own.

Deviations:
* The paper's workers all take part in every round. Here a client that is not selected keeps its state.
* The learning rate of the inner steps follows ``lr_schedule`` by rounds, in the paper a cosine over all steps.
"""

import dataclasses

import optax

from fedjax_mr.settings import field
from fedjax_mr.strategies import fedmr
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging
from fedjax_mr.strategies.transforms import keep_optimizer, server_optimizer


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of DiLoCo."""

    outer_lr: float = field(0.7, "learning rate of the server", low=0, open_low=True, source="Douillard et al. 2023")
    outer_momentum: float = field(
        0.9, "Nesterov momentum of the server", low=0, high=1, open_high=True, source="Douillard et al. 2023"
    )
    combine: str = field(
        "average",
        "what the server does to the trained models: average them (average), or keep all and permute their tensors "
        "(recombine)",
        choices=("average", "recombine"),
        source="Douillard et al. 2023; recombine: ours",
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build DiLoCo."""
    if hyper.combine == "recombine":
        inner = fedmr.build(fedmr.Hyper(), problem)
    else:
        inner = averaging(problem, weights="uniform")
    outer = optax.sgd(hyper.outer_lr, momentum=hyper.outer_momentum, nesterov=True)
    return server_optimizer(keep_optimizer(inner, problem), outer)
