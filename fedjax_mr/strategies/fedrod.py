"""FedRoD: a generic head that is trained as if all classes were equally frequent, and a personal head beside it.

Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022, with a linear
personal head (Fed-RoD (linear)). On the same batches, a client trains

* the generic model (body and head, logits g) by the balanced softmax: the cross-entropy of g + log n_c, where n_c is
  the client's number of samples of class c. It is sent and averaged.
* its personal head (logits p) by the cross-entropy of g + p, where g and the representation are constants. It stays.

The generic model is deployed; the personal model of a client has the logits g + p. Both heads are linear, so these are
the logits of one head whose parameters are the sums of both.

Two truths. The authors have released no code that runs; the well-known one is that of PFLlib. There each client's
personal head starts as a copy of the first generic head; here it starts at zero, so that an untrained client has the
generic model. Both average by the numbers of samples.

Deviations:
* The variant whose personal head is made by a hypernetwork is left out.
* BatchNorm statistics are updated once per step, by the generic model.
* ``clip_norm`` clips the gradients of both together.
"""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.errors import UserError
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging


def build(hyper: None, problem: Problem) -> Strategy:
    """Build FedRoD.

    Raises:
      UserError: the head of the network is not one linear layer.
    """
    network = problem.model
    head = network.head_name()
    tensors = flatten_dict(network.shapes()["params"][head])
    if {path[-1] for path in tensors} - {"kernel", "bias"} or len({path[:-1] for path in tensors}) > 1:
        raise UserError(f"fedrod adds two linear heads, but the head of {network.name} has {len(tensors)} tensors")

    def client_update(payload, memory, data, round, key):
        counts = problem.label_counts[data.client_id].astype(jnp.float32)
        prior = jnp.log(jnp.maximum(counts, 1e-9))  # an absent class has almost no weight

        def loss(params, state, batch, key):
            generic = params["generic"]
            z, state = network.train_apply(generic, state, batch.x, mask=batch.mask, key=key, method="features")
            g, state = network.train_apply(generic, state, z, mask=batch.mask, key=key, method="head")
            personal = generic | {head: params["head"]}
            fixed = jax.lax.stop_gradient((z, g))
            p, _ = network.train_apply(personal, state, fixed[0], mask=batch.mask, key=key, method="head")
            g = g + prior.reshape(*(1,) * (g.ndim - 1), -1)
            losses = local.task_losses(network, g, batch) + local.task_losses(network, fixed[1] + p, batch)
            return local.masked_mean(losses, batch.mask), state

        start = payload["model"] | {"params": {"generic": payload["model"]["params"], "head": memory}}
        trained, metrics = local.train(network, problem.local, start, data, key, loss=loss)
        return {"model": trained | {"params": trained["params"]["generic"]}}, trained["params"]["head"], metrics

    def personal_model(state, memory, data, key):
        params = state.model["params"]
        return state.model | {"params": params | {head: trees.add(params[head], memory)}}

    return averaging(problem)._replace(
        client_update=client_update,
        init_memory=lambda key, client_id: trees.zeros_like(network.shapes()["params"][head]),
        personal_model=personal_model,
    )
