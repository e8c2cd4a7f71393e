"""FedAWA against the released code's objective and optimizer, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_mr.strategies.fedawa import Hyper
from fedjax_mr.strategies.interface import Cohort


@pytest.mark.parametrize(
    "near, steps",  # one step of Adam only knows signs
    [("models", 3), ("mean", 3), pytest.param("models", 1, marks=pytest.mark.slow)],
)
def test_three_rounds_equal_the_code(transcription, near, steps):
    by_hand = transcription("fedawa", Hyper(near=near, steps=steps, lr=0.05))
    torch, model = by_hand.torch, by_hand.read(by_hand.progress.server.model)
    sizes = np.array(by_hand.sizes, np.float64)
    logits, flat = torch.tensor(sizes / sizes.sum()), lambda leaves: torch.cat([leaf.ravel() for leaf in leaves])
    cosine = torch.nn.CosineSimilarity(dim=-1, eps=1e-8)
    for clients in by_hand.rounds(3):
        trained = [by_hand.train(model, client) for client in clients]
        models, old = torch.stack([flat(each) for each in trained]), flat(model)
        own = logits[clients].clone().requires_grad_()
        adam = torch.optim.Adam([own], lr=0.05, betas=(0.5, 0.999))
        for _ in range(steps):
            weights = torch.softmax(own, dim=0)
            changes = models - old
            apart = torch.linalg.norm(changes - weights @ changes, dim=1)
            far = weights @ (1 - cosine(models, old)) if near == "models" else 1 - cosine(weights @ models, old)
            adam.zero_grad()
            (weights @ apart + far).backward()
            adam.step()
        logits[clients] = own.detach()
        model = by_hand.mean(trained, weights.detach().numpy())
        by_hand.check(by_hand.progress.server.model, model)
        np.testing.assert_allclose(by_hand.progress.server.logits, logits, atol=1e-4)


@pytest.fixture(scope="module")
def update(engine):
    """(models [4, P], sizes [4]) -> the new model [P], the logits and info; the global model is 1, ..., 1."""
    one = engine("fedawa", "linear", hyper=Hyper(steps=20, lr=0.1))
    start = jax.tree.map(jnp.ones_like, one.init().server)
    start = start._replace(logits=jnp.zeros_like(start.logits))
    flat, tree = ravel_pytree(start.model)

    @jax.jit
    def compiled(models, sizes):
        cohort = Cohort(jnp.arange(4, dtype=jnp.int32), sizes)
        new, info = one.strategy.server_update(start, {"model": jax.vmap(tree)(models)}, cohort, 0, None)
        return ravel_pytree(new.model)[0], new.logits, info["largest_weight"]

    def make(models, sizes):
        rows = np.broadcast_to(np.asarray(models, np.float32), (flat.size // 2, len(models), 2))
        rows = rows.transpose(1, 0, 2).reshape(len(models), -1)
        return jax.device_get(
            compiled(np.pad(rows, ((0, 0), (0, flat.size % 2)), mode="edge"), np.array(sizes, np.int32))
        )

    return make


def test_the_client_that_differs_loses_weight_and_a_late_one_has_none(update):
    model, logits, largest = update([(2, 2), (2.1, 2.1), (-1, -1), (9, 9)], [4, 4, 4, 0])
    assert logits[2] < -0.5 and min(logits[:2]) > 0 and logits[3] == 0
    assert 1.5 < model.mean() < 2.1 and 1 / 3 < largest < 0.6


def test_of_two_clients_as_far_from_their_mean_the_one_in_the_direction_of_the_model_gains(update):
    _, logits, _ = update([(2, 2), (1, 2), (9, 9), (9, 9)], [4, 4, 0, 0])  # cosines with (1, 1): 1 and 0.95
    assert logits[0] > 0.1 > -0.1 > logits[1]


def test_equal_changes_keep_the_weights(update):
    model, logits, _ = update([(2, 2)] * 4, [4, 4, 4, 4])
    np.testing.assert_allclose(model, 2, rtol=1e-6)
    np.testing.assert_allclose(logits, 0, atol=1e-6)
