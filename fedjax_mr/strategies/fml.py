"""Federated Mutual Learning: each client's own network and a copy of the global one learn from each other.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: Federated Mutual Learning, arXiv 2020. The personal networks may
have any architecture and never leave their clients; only the copies of the global network (the "meme", network 0 of
several) are sent and averaged.

Deviations. ``variant=authors`` is FML as the authors of FedMe run it: all weights 1 (twice the objective), copies
weighted by samples; their last round of mutual learning before the test is left out (``--finetune_epochs`` trains on).
The released code of FML decays its learning rate every 10 rounds; here it stays.
"""

import dataclasses

from fedjax_mr.engine import mutual
from fedjax_mr.engine.mutual import Pair, Weights
from fedjax_mr.strategies.base import GlobalModel, Problem, Strategy, averaging, nothing, own_starts
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FML's own settings."""

    alpha: float = field(
        0.5,
        "alpha, the weight of the labels in the personal network's loss; 1 - alpha is that of the meme's outputs",
        low=0,
        high=1,
        source="the FML authors' code",
    )
    beta: float = field(
        0.5,
        "beta, the weight of the labels in the meme's loss; 1 - beta is that of the personal network's outputs",
        low=0,
        high=1,
        source="the FML authors' code",
    )
    variant: str = field(
        "original",
        "authors: as the FedMe authors run it, all weights 1 in place of alpha and beta, memes weighted by samples",
        choices=("original", "authors"),
        source="Shen et al. 2020",
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FML."""
    network, authors = problem.model, hyper.variant == "authors"
    meme_network = network.networks[0]
    weights = Pair(Weights(hyper.alpha, 1 - hyper.alpha), Weights(hyper.beta, 1 - hyper.beta))
    if authors:
        weights = Pair(Weights(), Weights())

    def init(key):
        return GlobalModel(meme_network.init(key))

    def client_update(payload, memory, data, round, key):
        networks, both = Pair(network, meme_network), Pair(memory, payload["model"])
        (personal, meme), metrics = mutual.train_pair(networks, problem.local, both, data, key, weights=weights)
        return {"model": meme}, personal, metrics

    return averaging(problem, weights="samples" if authors else "uniform")._replace(
        init=init,
        client_update=client_update,
        global_model=lambda state: network.pack(state.model, 0),
        init_memory=lambda key: own_starts(problem, key),
        personal_part=nothing,
        personal_model=lambda part, memory, data, key: memory,
    )
