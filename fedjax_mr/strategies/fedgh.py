"""FedGH: clients with different networks share one header, which the server trains on their mean representations.

Yi, Wang, Liu, Shi, Yu: FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM MM 2023. All
networks end in representations of the same width d. A client trains its network with the received header and uploads
the mean representation of each of its classes. The server trains the header with one SGD step for each pair of
representation and class.

Deviations from the released code:
* The header is trained. The code's server steps the optimizer of another network, so that clients share a header that
  keeps its random initialisation.
* Gradients of the header are neither accumulated over pairs nor clipped.
* A class mean is taken over all samples of the class; the code takes the mean of batch means.

No public data are needed, although Table 1 of pFedHR lists FedGH among methods that use them, without saying how.

One pass over the pairs (``server_epochs=1``, as released) is at most K C steps of SGD. It changes the header little,
but every client replaces its own header by it. This may explain why FedGH is below Local-only here
(notebook, page of pFedHR); the effect has not been measured separately. HtFLlib's code takes 100 passes in batches of
10 and tests clients with the received header. Here, as in the released code, clients are tested after their training.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData, gather
from fedjax_mr.errors import UserError
from fedjax_mr.models import Model, Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import kept_model, nothing, own_start, to_all
from fedjax_mr.strategies.traffic import Parcels, Traffic


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedGH."""

    server_lr: float = field(
        0.01, "learning rate of the header (SGD)", low=0, open_low=True, source="Yi et al. 2023 and HtFLlib's code"
    )
    server_epochs: int = field(
        1,
        "passes over the received pairs, with one step per pair; 1 changes the header little",
        unit="epochs",
        low=0,
        source="the authors' code, in which the header is not trained; code of HtFLlib: 100",
    )


class State(NamedTuple):
    """State of the server."""

    header: Any  # parameters of the classifier
    trained: jax.Array  # bool; clients ignore the header before its first training


class Memory(NamedTuple):
    """Memory of one client."""

    model: Variables


def with_header(network: Model, variables: Variables, header: Any) -> Variables:
    """Replace the header in the variables of a network."""

    def replace(number, member, own):
        return network.pack(own | {"params": own["params"] | {member.head_name(): header}}, number)

    return network.switch(variables, replace)


def representation_width(network: Model) -> int:
    """The width d of the representations of all networks.

    Raises:
      UserError: the networks' representations differ in width.
    """
    sample = lambda model: jax.ShapeDtypeStruct((1, *model.input_shape), model.input_dtype)
    width = lambda model: math.prod(jax.eval_shape(model.features, model.shapes(), sample(model)).shape[1:])
    widths = {model.name: width(model) for model in network.networks}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise UserError(
            f"all networks need representations of the same width, but they have {listed}: pass projection=64"
        )
    return next(iter(widths.values()))


def class_means(
    network: Model, variables: Variables, data: ClientData, *, num_classes: int, width: int, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """The mean representation of each class [C, d] and the number of its samples [C]."""

    def step(number: jax.Array, total: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        position = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        rows = jnp.asarray(data.index)[data.offset + jnp.minimum(position, data.size - 1)]
        mask = (position < data.size).astype(jnp.float32)
        labels = jax.nn.one_hot(jnp.asarray(data.samples.y)[rows], num_classes) * mask[:, None]
        z = network.features(variables, gather(data.samples, rows)).reshape(batch_size, -1)
        return total[0] + labels.T @ z, total[1] + jnp.sum(labels, axis=0)

    start = jnp.zeros((num_classes, width)), jnp.zeros(num_classes)
    sums, counts = jax.lax.fori_loop(0, (data.size + batch_size - 1) // batch_size, step, start)
    return sums / jnp.maximum(counts, 1.0)[:, None], counts


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedGH.

    Raises:
      UserError: the networks' representations have different widths.
    """
    network, num_classes = problem.model, problem.num_classes
    first, width = network.networks[0], representation_width(network)

    def logits_of(header: Any, z: jax.Array) -> jax.Array:
        """Logits of representations [B, d] by the first network's head with the parameters ``header``."""
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first.shapes())
        return first.head(with_header(first, blank, header), z)

    def init(key):
        header = first.init(key)["params"][first.head_name()]
        return State(header, jnp.zeros((), bool))

    def init_memory(key, client_id):
        return Memory(own_start(problem, key, client_id))

    def client_update(payload, memory, data, round, key):
        shared = with_header(network, memory.model, payload["header"])
        start = trees.where(payload["trained"], shared, memory.model)
        model, metrics = local.train(network, problem.local, start, data, key)
        means, counts = class_means(
            network, model, data, num_classes=num_classes, width=width, batch_size=problem.local.batch_size
        )
        return {"means": means, "owned": counts > 0}, Memory(model), metrics

    def server_update(state, uploads, cohort, round, key):
        pairs = uploads["means"].reshape(-1, width)
        owned = uploads["owned"].reshape(-1).astype(jnp.float32)
        classes = jnp.tile(jnp.arange(num_classes, dtype=jnp.int32), uploads["owned"].shape[0])

        def loss(header, pair):
            logits = logits_of(header, pairs[pair][None])
            return owned[pair] * jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, classes[pair][None]))

        def epoch(number, header):
            order = jax.random.permutation(jax.random.fold_in(key, number), owned.shape[0])
            descend = lambda header, pair: (
                trees.subtract(header, trees.scale(jax.grad(loss)(header, pair), hyper.server_lr)),
                None,
            )
            return jax.lax.scan(descend, header, order)[0]

        header = jax.lax.fori_loop(0, hyper.server_epochs, epoch, state.header)
        return State(header, jnp.ones((), bool)), {}

    def traffic(usual, state, uploads, cohort, round):
        """Down: a header per client, once it is trained. Up: label and mean of each of a client's classes."""
        headers = Parcels.of(jnp.where(state.trained, problem.cohort_size, 0), trees.num_bytes(state.header))
        means = Parcels.of(jnp.sum(uploads["owned"]), 4 * (width + 1))
        return Traffic(down=(headers,), up=(means,))

    return Strategy(
        init,
        to_all(problem, "header", "trained"),
        client_update,
        server_update,
        init_memory=init_memory,
        traffic=traffic,
        personal_part=nothing,
        personal_model=kept_model,
    )
