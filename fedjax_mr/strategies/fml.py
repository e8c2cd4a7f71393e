"""Federated Mutual Learning: the personal network of a client and a copy of the global network learn from each other.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: Federated Mutual Learning, arXiv 2020. The personal networks may
have any architecture and never leave their clients. Only the copies of the global network (the "meme", network 0 of
several) are sent and averaged.

Deviations. ``variant=authors`` is FML as run by FedMe's authors: all weights are 1, which doubles the objective, and
copies are weighted by samples. Their final round of mutual learning before the test is omitted; fine-tuning before the
test is a setting of all methods. The released code of FML decays the learning rate every 10 rounds; here it is
constant.
"""

import dataclasses

from fedjax_mr.client import mutual
from fedjax_mr.client.mutual import Pair, Weights
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import GlobalModel, averaging, nothing, own_start


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FML."""

    alpha: float = field(
        0.5,
        "alpha, weight of the labels in the loss of the personal network; the meme's outputs have weight 1 - alpha",
        low=0,
        high=1,
        source="the authors' code",
    )
    beta: float = field(
        0.5,
        "beta, weight of the labels in the loss of the meme; the personal network's outputs have weight 1 - beta",
        low=0,
        high=1,
        source="the authors' code",
    )
    variant: str = field(
        "original",
        "original: the paper; authors: code of FedMe's authors, with all weights 1 and memes weighted by samples",
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
        init_memory=lambda key, client_id: own_start(problem, key, client_id),
        personal_part=nothing,
        personal_model=lambda part, memory, data, key: memory,
    )
