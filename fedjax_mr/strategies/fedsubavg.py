"""FedSubAvg: FedAvg that moves the rows of an embedding as far as the clients that have them move them.

Ding, Niu, Wu, Tang, Lyu, Feng, Chen: Federated Submodel Optimization for Hot and Cold Data Features, NeurIPS 2022. A
client trains only the vectors of its own features, such as the films that it has seen. FedAvg averages them with the
unchanged vectors of all other clients, so the vectors of rare features hardly move. FedSubAvg multiplies the mean
change of row m by N / n_m, the number of all clients over the number of those that have feature m. Its expectation is
then the mean change of these clients. All parameters but embeddings are averaged as in FedAvg.

Computation here: a client has a feature if it has changed the row. This needs no message, but weight decay and noise
change every row; then FedSubAvg is FedAvg.

Deviations from the paper:
* There, N / n_m is collected before the training, by secure aggregation. Here n_m / N is the share of all uploads so
  far that have changed the row (``heat=seen``), which approaches it.
* Clients are weighted by their numbers of samples, in the mean and in n_m, as in the authors' code; the paper weights
  them equally (``weights=uniform``).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging

ROWS = "embedding"  # name of parameters whose rows are features, as in Flax's Embed


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedSubAvg."""

    heat: str = field(
        "seen",
        "n_m / N, the share of the clients that have a feature: of all uploads so far (seen), or of those of the "
        "round, so that a row becomes the mean of the clients that have it (round)",
        choices=("seen", "round"),
        source="our choice; Ding et al. 2022 collect it before the training. Their code also has the round's",
    )
    weights: str = field(
        "samples",
        "weights of the clients: their numbers of samples n_i (samples), or equal weights (uniform)",
        choices=("samples", "uniform"),
        source="code of FedSubAvg; the paper: uniform",
    )


class State(NamedTuple):
    """The global model and the heat of the features."""

    model: Variables
    heat: dict[str, jax.Array]  # by embedding [rows]: sum of the weights of the uploads that have changed the row
    uploads: jax.Array  # scalar, sum of the weights of all uploads


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedSubAvg."""

    def init(key):
        model = problem.model.init(key)
        heat = {name: jnp.zeros(leaf.shape[:-1]) for name, leaf in embeddings(model["params"]).items()}
        return State(model, heat, jnp.zeros(()))

    def server_update(state, uploads, cohort, round, key):
        weights = (cohort.sizes if hyper.weights == "samples" else cohort.sizes > 0).astype(jnp.float32)
        mean = trees.mean(uploads["model"], weights=weights)
        old, new = embeddings(state.model["params"]), embeddings(uploads["model"]["params"])
        having = {name: jnp.any(new[name] != old[name][None], axis=-1) for name in old}  # [K, rows]
        heat = {name: jnp.tensordot(weights, each.astype(jnp.float32), 1) for name, each in having.items()}
        total = jnp.sum(weights)
        if hyper.heat == "seen":
            heat, total = trees.add(state.heat, heat), state.uploads + total

        def moved(path, mean, old):
            if (name := name_of(path)) not in heat:
                return mean
            share = heat[name] / jnp.maximum(total, 1.0)
            return old + (mean - old) / jnp.where(share > 0, share, 1.0)[..., None]

        params = jax.tree_util.tree_map_with_path(moved, mean["params"], state.model["params"])
        return State(mean | {"params": params}, heat, total), {}

    return averaging(problem)._replace(init=init, server_update=server_update)


def embeddings(params: Any) -> dict[str, jax.Array]:
    """The parameters [..., rows, width] whose rows are features, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {name_of(path): leaf for path, leaf in leaves if path[-1].key == ROWS}


def name_of(path: tuple[Any, ...]) -> str:
    """The path of a parameter as a text."""
    return "/".join(each.key for each in path)
