"""Exchange of layers among the K clients of a round, so that an upload mixes layers of several clients.

Hu, Yue, Xie, Chen, Huang, Wei, Lian, Liu, Chen: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model
Recombination, KDD 2024, Appendix B (secure recombination). secure/exchange.py describes the protection of owners and
its limits. secure/messages.py implements the encrypted messages.

Deviation. The paper applies the exchange only to FedMR, in which it changes no distribution, because the server
permutes the layers itself. Other methods with K models receive the same copies of each layer and the same mean, but in
another combination: FedCross then mixes models whose layers come from several clients.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.channel.base import Link
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.secure import exchange as secure
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Info, LayerExchange, Payload, Problem, Strategy

_setting = functools.partial(field, group="Channel")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchange of layers among the clients of a round."""

    # fmt: off
    exchange: str = _setting(
        "none", "When the clients of a round exchange layers among themselves, so that a model mixes layers of several "
        "clients: before_upload (encrypted for the server), before_training (unencrypted), or both",
        choices=("none", "before_upload", "before_training", "both"), source="KDD'24, Appendix B: the first two")
    exchange_share: float = _setting(
        0.5, "Probability that a client sends a given layer in one exchange", low=0, high=1, static=True,
        source="KDD'24, Figure 13, shows 2 of 4", needs=("exchange",))
    exchange_repetitions: int = _setting(
        1, "Exchanges in a row", low=1, high=1000, source="KDD'24, Appendix B, allows several", needs=("exchange",))
    # fmt: on


def build(settings: Exchange, problem: Problem) -> Link:
    """The link of the settings, see `exchange`."""
    share, repetitions = settings.exchange_share, settings.exchange_repetitions
    return exchange(problem, when=settings.exchange, share=share, repetitions=repetitions)


def exchange(problem: Problem, *, when: str = "before_upload", share: float = 0.5, repetitions: int = 1) -> Link:
    """A link with which the clients of a round exchange layers of their models.

    The copies of each layer are permuted, so means and sums over the K models do not change. Whole layers are
    exchanged, as in the paper. Before the upload, layers are encrypted for the server. Before the training they are not
    encrypted, because a client must read the model that it trains. If all clients receive the same model, an exchange
    before the training changes only the traffic.

    The link only declares the exchange (`LayerExchange`): the engine simulates it, and real clients perform it.

    The server assigns an upload to the client that sent it. Weights by numbers of samples then belong to the senders of
    layers, not to their owners. So an exchange should be combined with uniform weights.

    Information of a round with an exchange before the upload: ``layers_unmoved``, the share of layers that their owners
    upload, and ``layers_held_by_others``, the share of layers that another client received.

    Args:
      problem: the problem of the strategy, whose payloads and uploads have a ``model`` for each client [K, ...].
      when: ``before_upload``, ``before_training`` or ``both``.
      share: probability that a client sends a given layer, in 0..1.
      repetitions: number of exchanges in a row.

    Raises:
      UserError: the cohort has a single client, or clients have different networks. `Link.check` raises it if the
        strategy already exchanges layers, and a round if a payload or upload has no ``model``, or a part of one.
    """
    if problem.cohort_size < 2:
        raise UserError("layers are exchanged among the clients of a round: cohort= must be at least 2")
    if not problem.layers:
        raise UserError("clients with different networks cannot exchange layers: pass a single network in model=")
    layers, count = tuple(layer.leaves for layer in problem.layers), problem.cohort_size

    def mix(sent: Payload, key: jax.Array) -> tuple[Payload, Info]:
        outcome = secure.exchange(key, num_units=len(layers), count=count, share=share, repetitions=repetitions)
        owners, others = jnp.arange(count)[None, :], ~jnp.eye(count, dtype=bool)[None]
        info = {
            "layers_unmoved": jnp.mean(outcome.permutations == owners),
            "layers_held_by_others": jnp.mean(jnp.any(outcome.held & others, axis=1)),
        }
        models = trees.mix(_model_of(sent, layers), outcome.permutations, units=layers)
        return sent | {"model": models}, info

    def check(strategy: Strategy, problem: Problem) -> None:
        if strategy.exchange is not None:
            raise UserError("the clients already exchange layers: increase repetitions instead of adding an exchange")

    return Link("exchange", exchange=LayerExchange(mix, when, share, repetitions), check=check)


def _model_of(sent: Payload, layers: trees.Units) -> Variables:
    """The models [K, ...] of a payload or upload.

    Raises:
      UserError: it has no ``model``, or a part of one.
    """
    if "model" not in sent:
        raise UserError(
            "an exchange of layers needs payloads and uploads with a model for each client ('model'), but this "
            f"strategy sends {', '.join(sent) or 'nothing'}"
        )
    if len(jax.tree.leaves(sent["model"])) != sum(map(len, layers)):
        raise UserError("an exchange of layers needs whole models, but this strategy sends a part of each")
    return sent["model"]
