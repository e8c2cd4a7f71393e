"""IFCA against its equations: both options, the shared body, and the clusters that it finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import ifca
from fedjax_mr.strategies.ifca import Hyper
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import Models


@pytest.mark.parametrize(
    ("average", "shared"),
    [
        ("model", "body"),
        ("gradient", "none"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("model", "none"), ("gradient", "body"))),
    ],
)
def test_three_rounds_equal_the_equations(transcription, average, shared):
    by_hand = transcription("ifca", Hyper(clusters=3, average=average, shared=shared))
    models = [by_hand.read(trees.take(by_hand.progress.server.models, number)) for number in range(3)]
    sizes = []
    for clients in by_hand.rounds(3):
        losses = [[float(by_hand.cross_entropy(model, client)) for model in models] for client in clients]
        chosen = np.argmin(losses, axis=1)
        trained = [by_hand.train(models[number], client) for client, number in zip(clients, chosen, strict=True)]
        body = by_hand.mean(trained)[2:]  # the first two tensors are the classifier
        for number in range(3):
            members = [trained[row] for row in np.flatnonzero(chosen == number)]
            sizes.append(len(members))
            if members:
                share = 1.0 if average == "model" else len(members) / len(clients)
                new = by_hand.mean(members)
                models[number] = [(1 - share) * x + share * y for x, y in zip(models[number], new, strict=True)]
            if shared == "body":
                models[number] = [*models[number][:2], *body]
            assert float(by_hand.report.info[f"clients_of_cluster_{number}"]) == len(members)
        for number, model in enumerate(models):
            by_hand.check(trees.take(by_hand.progress.server.models, number), model)
    assert 0 in sizes and max(sizes) > 1


@pytest.mark.parametrize(("average", "share"), [("model", 1.0), ("gradient", 0.5)])
def test_a_late_client_is_in_no_cluster(tiny, average, share):
    strategy = ifca.build(Hyper(average=average), tiny.problem((3, 3, 3), cohort=3))
    filled = lambda numbers: jax.vmap(tiny.model)(jnp.stack([jnp.full((2, 2), number) for number in numbers]))
    uploads = {"model": filled([10.0, 20.0, 30.0]), "cluster": jnp.array([0, 0, 1])}
    cohort = Cohort(np.arange(3, dtype=np.int32), np.int32([3, 0, 3]))
    new, info = jax.jit(strategy.server_update)(Models(filled([1.0, 2.0])), uploads, cohort, jnp.int32(0), None)
    for number, (old, mean) in enumerate(((1, 10), (2, 30))):
        np.testing.assert_allclose(tiny.head(trees.take(new.models, number)), (1 - share) * old + share * mean)
        assert info[f"clients_of_cluster_{number}"] == 1


def test_the_clusters_share_their_body_from_the_start(engine):
    models = jax.device_get(engine("ifca", "perceptron", hyper=Hyper(shared="body")).init()).server.models
    for path, leaf in jax.tree_util.tree_leaves_with_path(models):
        assert np.array_equal(leaf[0], leaf[1]) != ("classifier" in jax.tree_util.keystr(path))
