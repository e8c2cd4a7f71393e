"""FedMD: clients with different networks distil from their mean outputs on public data.

Li and Wang: FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS workshop 2019. A client first trains
on the labelled public data, then on its own samples. In every round the clients' logits on S public samples are
averaged. Each client trains towards this consensus (digest) and then on its own samples (revisit). No parameters are
sent.

Deviations. A client uploads once per round, after its training. The consensus of a round is the mean of the logits that
the clients of the previous round computed for the samples of this round. If all clients train in every round, this is
the order of the paper, because a client's logits do not change between its training and the next round. The initial
training on public and own samples takes place in a client's first round, which has no digest. Public samples are drawn
uniformly; the code draws them by class. The paper does not define the loss of the digest; as in the code, it is the
mean absolute difference of logits.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr.client import local
from fedjax_mr.client.samples import one_client
from fedjax_mr.settings import LARGEST_BATCH, field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import LastModel, kept_model, nothing, own_start, public_samples, require_epochs, to_all
from fedjax_mr.tasks import Task


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedMD."""

    subset: int = field(
        5000,
        "S, public samples per round; all of them if there are fewer",
        unit="samples",
        low=1,
        source="Li and Wang 2019",
    )
    public_epochs: int = field(
        10, "epochs on the public data in a client's first round", unit="epochs", low=0, source="ours; the code: 20"
    )
    private_epochs: int = field(
        10,
        "epochs on its own samples in a client's first round",
        unit="epochs",
        low=0,
        source="ours; the code: 25",
    )
    digest_epochs: int = field(1, "epochs of the digest", unit="epochs", low=0, source="the code")
    digest_batch: int = field(
        256, "batch size on public data", unit="samples", low=1, high=LARGEST_BATCH, source="the code"
    )
    digest_loss: str = field(
        "mae",
        "loss between a client's logits and the consensus: mean absolute (mae) or squared (mse) difference, or "
        "KL divergence of the softmaxes (kl)",
        choices=("mae", "mse", "kl"),
        source="the code; the paper leaves it open",
    )


class State(NamedTuple):
    """State of the server."""

    rows: jax.Array  # [S] the public samples of the next round
    next_rows: jax.Array  # [S] the public samples of the round after the next
    consensus: jax.Array  # [S, ...] the mean outputs on ``rows``


def difference(task: Task, logits: jax.Array, target: jax.Array, *, kind: str) -> jax.Array:
    """Distance of outputs [B, ...] from the consensus, mean over a sample [B]; its gradient is 0 where they agree."""
    each = tuple(range(1, logits.ndim))
    if kind == "mae":
        gap = logits - target
        return jnp.mean(jnp.where(gap == 0, 0.0, jnp.abs(gap)), axis=each)  # JAX's abs has derivative 1 at 0
    if kind == "mse":
        return jnp.mean(jnp.square(logits - target), axis=each)
    return task.divergence(logits, target)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedMD.

    Raises:
      UserError: there are no public data, or they have no labels; or the clients train steps in place of epochs.
    """
    network, public = problem.model, public_samples(problem, "fedmd", labelled=True)
    require_epochs(problem, "fedmd")
    count = public.x.shape[0]
    subset = min(hyper.subset, count)

    def on_public(epochs: Any) -> local.LocalSetting:
        """Local settings for public data; the number of epochs may be traced."""
        return dataclasses.replace(
            problem.local.in_epochs(epochs),
            batch_size=min(hyper.digest_batch, count),
            max_size=count,
            augment=None,
            mix=None,
        )

    def draw(key):
        return jax.random.permutation(key, count)[:subset].astype(jnp.int32)

    def init(key):
        one, other = jax.random.split(key)
        return State(draw(one), draw(other), jnp.zeros((subset, *network.task.outputs(network.input_shape))))

    def init_memory(key, client_id):
        return LastModel(own_start(problem, key, client_id), jnp.zeros((), bool))

    def client_update(payload, memory, data, round, key):
        public_key = jax.random.split(key)[1]  # own samples use the same key as Local-only
        choose = lambda start, later: jnp.where(memory.trained, later, start)

        def loss(params, state, batch, key):
            logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            supervised = local.task_losses(network, logits, batch)
            target = payload["consensus"][batch.position % subset]
            digested = difference(network.task, logits, target, kind=hyper.digest_loss)
            return local.masked_mean(choose(supervised, digested), batch.mask), state

        public_data = one_client(public)
        rows = jnp.where(memory.trained, jnp.resize(payload["rows"], (count,)), public_data.index)
        public_data = public_data._replace(index=rows, size=choose(count, subset))
        setting = on_public(choose(hyper.public_epochs, hyper.digest_epochs))
        model, _ = local.train(network, setting, memory.model, public_data, public_key, loss=loss)

        setting = problem.local.in_epochs(choose(hyper.private_epochs, problem.local.epochs))
        model, metrics = local.train(network, setting, model, data, key)
        logits = local.outputs(network, model, public, payload["next_rows"])
        return {"logits": logits}, LastModel(model, jnp.ones((), bool)), metrics

    def server_update(state, uploads, cohort, round, key):
        return State(state.next_rows, draw(key), jnp.mean(uploads["logits"], axis=0)), {}

    return Strategy(
        init,
        to_all(problem, *State._fields),
        client_update,
        server_update,
        init_memory=init_memory,
        personal_part=nothing,
        personal_model=kept_model,
    )
