"""Networks of which a part is shared: against their equations, and which part that is."""

import dataclasses

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES, partial

HEAD, BODY = (0, 1), (2, 3)  # positions of the perceptron's tensors


@pytest.mark.parametrize(
    "name, own",
    [
        ("fedrep", HEAD),
        pytest.param("fedper", HEAD, marks=pytest.mark.slow),
        pytest.param("lgfedavg", BODY, marks=pytest.mark.slow),
        pytest.param("fedbn", (), marks=pytest.mark.slow),
    ],
)
def test_three_rounds_equal_the_equations(transcription, name, own):
    by_hand = transcription(name, partial.FedRep(shared_epochs=2) if name == "fedrep" else None)
    settings = by_hand.settings

    def whole(client):
        """A client's network after the rounds so far."""
        joined = partial.join(by_hand.progress.server.part, trees.take(by_hand.progress.memory, client))
        return by_hand.read(joined)

    models = {i: whole(i) for i in range(4)}

    def train(weights, i):
        velocity = [0 * leaf for leaf in weights]
        for epoch in range(settings["epochs"]):  # one batch each
            moving = range(4)
            if name == "fedrep":
                moving = HEAD if epoch < 1 else BODY
            gradient = by_hand.gradient(lambda w: by_hand.cross_entropy(w, i), weights)
            for leaf in moving:
                velocity[leaf] = settings["momentum"] * velocity[leaf] + gradient[leaf]
            weights = [
                w - settings["lr"] * v if leaf in moving else w
                for leaf, (w, v) in enumerate(zip(weights, velocity, strict=True))
            ]
        return weights

    for clients in by_hand.rounds(3):
        trained = {i: train(models[i], i) for i in clients}
        mean = by_hand.mean([trained[i] for i in clients], by_hand.sizes_of(clients))
        models |= trained
        models = {i: [each[k] if k in own else mean[k] for k in range(4)] for i, each in models.items()}
        for i, model in models.items():
            for ours, theirs in zip(whole(i), model, strict=True):
                np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_what_stays_and_what_is_sent(federation):
    problem = federation("thin").problem
    shapes = problem.model.shapes()
    expected = {
        "fedper": lambda path: path[1] == "classifier",
        "fedrep": lambda path: path[1] == "classifier",
        "lgfedavg": lambda path: path[1] == "body",
        "fedbn": lambda path: path[2] == "norm",
    }
    for name, stays in expected.items():
        row = STRATEGIES[name]
        strategy = row.build(row.hyper() if row.hyper else None, problem)
        state = jax.eval_shape(strategy.init, jax.random.key(0))
        memory = jax.eval_shape(strategy.init_memory, jax.random.key(0), 0)
        kept = {path for path in flatten_dict(shapes) if stays(path)}
        assert set(flatten_dict(memory)) == kept and set(flatten_dict(state.part)) == set(flatten_dict(shapes)) - kept
        assert len(kept) in range(1, len(flatten_dict(shapes)))
        payload = jax.eval_shape(lambda state, each=strategy: each.dispatch(state, None, None), state)
        sent = problem.cohort_size * (trees.num_bytes(shapes) - trees.num_bytes(memory))
        assert trees.num_bytes(payload) == sent
        joined = partial.join(state.part, memory)
        assert jax.tree.structure(joined) == jax.tree.structure(shapes)


def test_fedrep_needs_an_epoch_for_the_head(federation):
    problem = federation().problem
    problem = dataclasses.replace(problem, local=dataclasses.replace(problem.local, epochs=1))
    with pytest.raises(UserError, match=r"local_epochs= must be larger than hyper.shared_epochs"):
        partial.fedrep(partial.FedRep(), problem)
