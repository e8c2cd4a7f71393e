"""Federated fine-tuning with adapters (LoRA): eight methods that differ in what clients send and how servers join it.

The mean of products differs from the product of means: mean(A_k B_k) = mean(A) mean(B) + cov, where cov is the mean of
(A_k - mean A)(B_k - mean B). The methods differ in how they treat cov. Here x A B, with A [in, r] random and B [r, out]
zero at the start; papers often write B A.

* FedIT (Zhang et al., ICASSP 2024, "Towards Building the Federated GPT"): mean of A and mean of B, without cov. It is
  FedAvg over adapters.
* FFA-LoRA (Sun et al., ICLR 2024): A is random, common and frozen, so the mean is exact. Half of the bytes are
  sent.
* RoLoRA (Chen et al., NeurIPS 2025): B trains in even rounds (counted from 0), A in odd ones, so each mean is exact.
  Clients upload the factor of the round. The code in the paper's supplement begins with B, too, and freezes the
  classifier (``lora_head=False``). Here it trains in every round if ``lora_head`` is set, as with the other methods.
* FedSA-LoRA (Guo et al., ICLR 2025): A is averaged. B and the head stay on the client.
* FedEx-LoRA (Singhal et al., ACL 2025): mean of A and mean of B, and cov is added to the base: exact. The paper and the
  released code weight all clients equally; ``weights=samples`` weights them by their samples, as FedAvg does. The
  released code adds cov transposed.
* FLoRA (Wang et al., NeurIPS 2024): each round starts from new adapters. The server adds the stacked adapters, whose
  product is the mean of the products, to the base: exact.
* FlexLoRA (Bai et al., NeurIPS 2024): the server keeps the mean of the products, and sends each client as much of its
  singular value decomposition U S V as the client's rank r_i allows. As in the released code (FederatedScope, branch
  FlexLoRA), A = U and B = S V / (alpha / r_i), and client i scales by alpha / r_i. The paper does not say how S is
  divided. ``split=roots`` gives each factor the square roots of S, and all clients scale by alpha / r: after a cohort
  of smaller ranks, both factors of the other directions are then nearly zero, so that they hardly train.
* HetLoRA (Cho et al., EMNLP 2024): mean of A and mean of B, padded with zeros to the largest rank, with weights
  proportional to the norms of the products. A client receives as many columns as its rank. The paper is read here as
  one norm for each matrix; most ports by others take one norm for each client, over all its matrices
  (``norms=client``). The head is weighted by samples. The pruning of ranks on clients is left out. FlexLoRA's authors
  have its penalty in their code (gamma = 0.99, lambda = 0.001), on the columns from round(0.99 r) on: with ranks up to
  50 there are none.

FedEx-LoRA and FLoRA change the base. Their server's state and payload hold the change of the targeted matrices, which
is dense, and the traffic counts it; the papers send the factors of all clients in its place. In FLoRA, FlexLoRA and
HetLoRA a client's rank may be smaller than ``lora_rank`` (``ranks``); FLoRA and HetLoRA scale by the same alpha / r, as
in FLoRA's code. A client of rank r_i has zeros in the other columns of A and rows of B, which stay zero, and are not
counted.

FLoRA and FlexLoRA make new factors in every update, and a change of old factors means nothing beside new ones. So they
refuse asynchronous clients.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import unflatten_dict

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.errors import UserError
from fedjax_mr.models import Variables, adapters, parts
from fedjax_mr.models.adapters import CHANGE, A, B
from fedjax_mr.settings import field
from fedjax_mr.strategies import fedavg, partial
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy
from fedjax_mr.strategies.parts import GlobalModel, averaging, to_all
from fedjax_mr.strategies.traffic import Parcels, Traffic


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Hyper-parameters of the methods whose clients may have different ranks."""

    ranks: str = field(
        "",
        "r_i of the clients in turn, separated by commas, such as 8,4,2; at most lora_rank. If omitted, all have it",
        source="FLoRA's code: 64,32,16,16,8,8,4,4,4,4",
    )


@dataclasses.dataclass(frozen=True)
class FedExLora:
    """Hyper-parameters of FedEx-LoRA."""

    weights: str = field(
        "uniform",
        "weights of the clients in the means: equal (uniform), or by their numbers of samples (samples; as in FedIT)",
        choices=("uniform", "samples"),
        source="paper and code",
        before="samples",
    )


@dataclasses.dataclass(frozen=True)
class FlexLora(Ranks):
    """Hyper-parameters of FlexLoRA."""

    split: str = field(
        "released",
        "how the singular values S are divided: B has them, and client i scales by alpha / r_i (released); or A and B "
        "have their square roots, and all scale by alpha / r (roots; unused directions then hardly train)",
        choices=("released", "roots"),
        source="the authors' code, FederatedScope",
        before="roots",
    )


@dataclasses.dataclass(frozen=True)
class HetLora(Ranks):
    """Hyper-parameters of HetLoRA."""

    norms: str = field(
        "matrix",
        "the weight of a client is the norm of its product of each matrix (matrix), or one norm over all its matrices "
        "(client)",
        choices=("matrix", "client"),
        source="our reading of the paper; ports of others: client",
    )


def require_adapters(problem: Problem, name: str) -> None:
    """Raise a UserError if the network has no adapters whose factors both train."""
    model = problem.model
    if model.adapter is None:
        raise UserError(f"{name} trains adapters, which {model.name} does not have: set adapter=lora")
    if not list(adapters.pairs(model.shapes())):
        raise UserError(f"{name} trains both factors of the adapters: leave out trainable=")


def fedit(hyper: fedavg.Hyper, problem: Problem) -> Strategy:
    """Build FedIT."""
    require_adapters(problem, "fedit")
    return fedavg.build(hyper, problem)


def ffalora(hyper: fedavg.Hyper, problem: Problem) -> Strategy:
    """Build FFA-LoRA: FedAvg of a network in which A is frozen, too."""
    require_adapters(problem, "ffalora")
    model = problem.model
    start, fixed = parts.split(model.start, lambda path: not path.endswith(A))
    frozen = dataclasses.replace(model, start=start, frozen=parts.joined(model.frozen, fixed))
    strategy = fedavg.build(hyper, dataclasses.replace(problem, model=frozen))
    return strategy._replace(global_model=lambda state: parts.joined(fixed, state.model))


def fedsalora(hyper: None, problem: Problem) -> Strategy:
    """Build FedSA-LoRA."""
    require_adapters(problem, "fedsalora")
    return partial.build(lambda path: path[-1] != A, problem)


def rolora(hyper: None, problem: Problem) -> Strategy:
    """Build RoLoRA."""
    require_adapters(problem, "rolora")
    setting = problem.local

    def idle(params: trees.Params, round: jax.Array) -> trees.Params:
        """Whether each tensor rests in a round: A in even ones, B in odd ones, a head never."""
        resting = {A: round % 2 == 0, B: round % 2 == 1}
        return unflatten_dict({path: resting.get(path[-1], jnp.zeros((), bool)) for path in parts.flat(params)})

    def without_idle(round: jax.Array) -> optax.GradientTransformation:
        zero = lambda rests, leaf: jnp.where(rests, jnp.zeros_like(leaf), leaf)
        return optax.stateless(lambda updates, params: jax.tree.map(zero, idle(updates, round), updates))

    def client_update(payload, memory, data, round, key):
        rest = without_idle(round)
        optimizer = optax.chain(rest, setting.optimizer, rest)  # the second removes weight decay
        model, metrics = local.train(problem.model, setting, payload["model"], data, key, optimizer=optimizer)
        return {"model": model}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        mean = trees.mean(uploads["model"], weights=cohort.sizes)
        kept = jax.tree.map(jnp.where, idle(mean["params"], round), state.model["params"], mean["params"])
        return state._replace(model=mean | {"params": kept}), {}

    def traffic(usual: Traffic, state: GlobalModel, uploads: Any, cohort: Cohort, round: jax.Array) -> Traffic:
        leaves = parts.flat(problem.model.shapes())
        size = lambda name: sum(_bytes(leaf) for path, leaf in leaves.items() if path[-1] == name)
        count, others = jnp.sum(cohort.sizes > 0), _bytes_of(leaves) - size(A) - size(B)  # not those that were late
        turns = ((B, round % 2 == 0), (A, round % 2 == 1))
        up = [Parcels.of(jnp.where(turn, count, 0), size(name)) for name, turn in turns]
        return usual._replace(up=(*up, Parcels.of(count, others)))

    return averaging(problem)._replace(
        client_update=client_update, server_update=server_update, traffic=traffic, stale="lost"
    )


# --- methods that change the base ------------------------------------------------------------------------------------


class Changed(NamedTuple):
    """State of a server that keeps a model and the dense change of its base."""

    model: Variables
    change: Variables  # leaves ``kernel`` [in, out]


def deployed(state: Changed) -> Variables:
    """The model on its changed base."""
    return adapters.with_change(state.model, state.change)


def fedexlora(hyper: FedExLora, problem: Problem) -> Strategy:
    """Build FedEx-LoRA."""
    require_adapters(problem, "fedexlora")
    model = problem.model

    def init(key):
        return Changed(model.init(key), adapters.no_change(model))

    def client_update(payload, memory, data, round, key):
        start = adapters.with_change(payload["model"], payload["change"])
        trained, metrics = local.train(model, problem.local, start, data, key)
        return {"model": _without_change(trained)}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        weights = cohort.sizes if hyper.weights == "samples" else (cohort.sizes > 0).astype(jnp.float32)
        mean = trees.mean(uploads["model"], weights=weights)
        products = adapters.mean_changes(model, uploads["model"], weights=weights)
        cov = trees.subtract(products, adapters.changes(model, mean))
        return Changed(mean, trees.add(state.change, cov)), {}

    return Strategy(init, to_all(problem, "model", "change"), client_update, server_update, global_model=deployed)


def flora(hyper: Ranks, problem: Problem) -> Strategy:
    """Build FLoRA. Each client draws a new A."""
    require_adapters(problem, "flora")
    model, ranks = problem.model, client_ranks(hyper, problem)

    def init(key):
        return Changed(adapters.without_products(model.init(key)), adapters.no_change(model))

    def dispatch(state, cohort, key):
        sent = {"model": _without_pairs(state.model), "change": state.change}  # clients make the adapters themselves
        return trees.broadcast(sent, problem.cohort_size)

    def client_update(payload, memory, data, round, key):
        train_key, key = jax.random.split(key)
        fresh = truncated(adapters.fresh(model, key), ranks[data.client_id])
        start = adapters.with_change(parts.joined(payload["model"], fresh), payload["change"])
        trained, metrics = local.train(model, problem.local, start, data, train_key)
        return {"model": _without_change(trained)}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        products = adapters.mean_changes(model, uploads["model"], weights=cohort.sizes)
        others = _without_pairs(trees.mean(uploads["model"], weights=cohort.sizes))
        return Changed(parts.joined(state.model, others), trees.add(state.change, products)), {}

    strategy = Strategy(init, dispatch, client_update, server_update, global_model=deployed)
    return strategy._replace(traffic=_traffic_of_ranks(problem, ranks, down=False), stale="renewed")


# --- ranks per client ------------------------------------------------------------------------------------------------


class Products(NamedTuple):
    """State of FlexLoRA's server."""

    model: Variables  # the factors of ``change`` up to rank r
    change: Variables  # mean of the products, leaves ``kernel`` [in, out]


def flexlora(hyper: FlexLora, problem: Problem) -> Strategy:
    """Build FlexLoRA."""
    require_adapters(problem, "flexlora")
    model, ranks, roots = problem.model, client_ranks(hyper, problem), hyper.split == "roots"

    def larger(clients):
        """Quotient of the scale of a client in its training and of alpha / r, the scale of the state."""
        return jnp.ones(clients.shape) if roots else adapters.larger_scale(model, ranks[clients])

    def init(key):
        return Products(model.init(key), adapters.no_change(model))

    def dispatch(state, cohort, key):
        send = lambda client: adapters.with_scaled_b(truncated(state.model, ranks[client]), 1 / larger(client))
        return {"model": jax.vmap(send)(cohort.ids)}

    def client_update(payload, memory, data, round, key):
        own = model if roots else adapters.scaled_for(model, ranks[data.client_id])
        trained, metrics = local.train(own, problem.local, payload["model"], data, key)
        return {"model": trained}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        models = adapters.with_scaled_b(uploads["model"], larger(cohort.ids)[:, None, None])
        products = adapters.mean_changes(model, models, weights=cohort.sizes)
        mean = trees.mean(models, weights=cohort.sizes)
        return Products(parts.joined(mean, adapters.factors(model, products, roots=roots)), products), {}

    def global_model(state):
        return adapters.with_change(adapters.without_products(state.model), state.change)

    strategy = Strategy(init, dispatch, client_update, server_update, global_model=global_model)
    return strategy._replace(traffic=_traffic_of_ranks(problem, ranks, down=True), stale="renewed")


def hetlora(hyper: HetLora, problem: Problem) -> Strategy:
    """Build HetLoRA."""
    require_adapters(problem, "hetlora")
    ranks = client_ranks(hyper, problem)

    def dispatch(state, cohort, key):
        return {"model": jax.vmap(lambda client: truncated(state.model, ranks[client]))(cohort.ids)}

    def server_update(state, uploads, cohort, round, key):
        models, found = uploads["model"], list(adapters.pairs(uploads["model"]))
        mean = parts.flat(trees.mean(models, weights=cohort.sizes))
        takes_part = (cohort.sizes > 0).astype(jnp.float32)
        products = [jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST) for _, a, b in found]
        squares = [jnp.sum(jnp.square(product), axis=(1, 2)) for product in products]  # [K] for each matrix
        if hyper.norms == "client":
            squares = [functools.reduce(jnp.add, squares)] * len(found)
        for (path, a, b), square in zip(found, squares, strict=True):
            norms = takes_part * jnp.sqrt(square)
            weights = jnp.where(jnp.sum(norms) > 0, norms, takes_part)  # no client may have trained
            for name, leaf in zip(adapters.PAIR, (a, b), strict=True):
                mean["params", *path, name] = trees.mean(leaf, weights=weights)
        return state._replace(model=unflatten_dict(mean)), {}

    strategy = averaging(problem)._replace(dispatch=dispatch, server_update=server_update)
    return strategy._replace(traffic=_traffic_of_ranks(problem, ranks, down=True))


def client_ranks(hyper: Ranks, problem: Problem) -> jax.Array:
    """The rank of each client [N].

    Raises:
      UserError: a rank is not a number from 1 to the rank of the network.
    """
    (_, a, _), *_ = adapters.pairs(problem.model.shapes())
    most = a.shape[-1]
    ranks = [int(each) if each.strip().isdecimal() else 0 for each in hyper.ranks.split(",")] if hyper.ranks else [most]
    if not all(1 <= rank <= most for rank in ranks):
        raise UserError(f"hyper.ranks={hyper.ranks} must be numbers from 1 to lora_rank={most}, separated by commas")
    return jnp.asarray(np.resize(np.array(ranks, np.int32), problem.num_clients))


def truncated(variables: Variables, rank: jax.Array) -> Variables:
    """The first ``rank`` columns of A and rows of B; the others are zero. ``rank`` is a scalar."""
    params = parts.flat(variables["params"])
    for path, a, b in adapters.pairs(variables):
        kept = jnp.arange(a.shape[-1]) < rank
        params[(*path, A)] = jnp.where(kept[None, :], a, jnp.zeros_like(a))
        params[(*path, B)] = jnp.where(kept[:, None], b, jnp.zeros_like(b))
    return variables | {"params": unflatten_dict(params)}


def _traffic_of_ranks(problem: Problem, ranks: jax.Array, *, down: bool) -> Any:
    """Count the columns of A and rows of B that a client has, in the uploads and if ``down`` in the payloads."""

    def traffic(usual: Traffic, state: Any, uploads: Any, cohort: Cohort, round: jax.Array) -> Traffic:
        shapes = problem.model.shapes()
        found = list(adapters.pairs(shapes))
        one = sum((_bytes(a) + _bytes(b)) // a.shape[-1] for _, a, b in found)
        others = _bytes_of(parts.flat(shapes)) - sum(_bytes(a) + _bytes(b) for _, a, b in found)

        def sent(to: jax.Array) -> tuple[Parcels, ...]:
            count = lambda each: jnp.sum(jnp.where(to, each, 0))
            return Parcels.of(count(ranks[cohort.ids]), one), Parcels.of(count(1), others)

        up = sent(cohort.sizes > 0)  # not those that were late
        return Traffic(sent(jnp.ones(cohort.ids.shape, bool)) if down else usual.down, up, usual.peer)

    return traffic


def _bytes(leaf: Any) -> int:
    return int(np.prod(leaf.shape)) * leaf.dtype.itemsize


def _bytes_of(leaves: dict) -> int:
    return sum(map(_bytes, leaves.values()))


def _without_change(variables: Variables) -> Variables:
    return {name: tree for name, tree in variables.items() if name != CHANGE}


def _without_pairs(variables: Variables) -> Variables:
    """A model without its adapters: the head, if it trains. The collection ``params`` may be empty."""
    return {"params": {}} | parts.split(variables, lambda path: path.rpartition("/")[2] not in adapters.PAIR)[0]
