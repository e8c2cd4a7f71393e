"""pFedBayes against its equations, and its special case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import pfedbayes
from fedjax_mr.strategies.pfedbayes import Hyper


def same_noise(key, params):
    """The noise that stands in for a random one."""
    return jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), params)


@pytest.mark.parametrize("lr", [None, pytest.param(0.03, marks=pytest.mark.slow)])
def test_three_rounds_equal_the_equations(transcription, monkeypatch, lr):
    monkeypatch.setattr(pfedbayes, "noise", same_noise)
    zeta, steps = 0.05, 2
    by_hand = transcription("pfedbayes", Hyper(zeta=zeta, rho=-1.5, inner_steps=steps, lr=lr))
    torch, settings = by_hand.torch, by_hand.settings
    deviation = torch.nn.functional.softplus
    noise = by_hand.read(same_noise(None, by_hand.progress.server.model["params"]))

    def divergence(q, p):
        of = lambda leaves: [
            torch.distributions.Normal(m, deviation(r)) for m, r in zip(leaves[:4], leaves[4:], strict=True)
        ]
        return sum(torch.distributions.kl_divergence(a, b).sum() for a, b in zip(of(q), of(p), strict=True))

    def optimizer(leaves):
        if lr is None:
            return torch.optim.SGD(leaves, lr=settings["lr"], momentum=settings["momentum"])
        return torch.optim.Adam(leaves, lr=lr)

    def train(q, p, i):
        q, p = ([leaf.detach().clone().requires_grad_() for leaf in leaves] for leaves in (q, p))
        of_q, of_p, strength = optimizer(q), optimizer(p), zeta / by_hand.sizes[i]
        for _ in range(settings["epochs"]):  # one batch each
            for _ in range(steps):
                of_q.zero_grad()
                weights = [m + deviation(r) * e for m, r, e in zip(q[:4], q[4:], noise, strict=True)]
                (by_hand.cross_entropy(weights, i) + strength * divergence(q, [leaf.detach() for leaf in p])).backward()
                of_q.step()
            of_p.zero_grad()
            (strength * divergence([leaf.detach() for leaf in q], p)).backward()
            of_p.step()
        return [leaf.detach() for leaf in q], [leaf.detach() for leaf in p]

    p, own = by_hand.read(by_hand.progress.server.model) + by_hand.read(by_hand.progress.server.rho), {}
    again = 0
    for clients in by_hand.rounds(3):
        again += sum(i in own for i in clients)
        trained = {i: train(own.get(i, p), p, i) for i in clients}
        own |= {i: q for i, (q, _) in trained.items()}
        p = by_hand.mean([trained[i][1] for i in clients], by_hand.sizes_of(clients))
        server, memory = by_hand.progress.server, by_hand.progress.memory
        by_hand.check(server.model, p[:4])
        by_hand.check(server.rho, p[4:])
        for i, q in own.items():
            by_hand.check(trees.take(memory.model, i), q[:4])
            by_hand.check(trees.take(memory.rho, i), q[4:])
        assert np.flatnonzero(memory.trained).tolist() == sorted(own)
    assert again > 0


@pytest.mark.slow
def test_points_without_a_divergence_train_alone(engine, close):
    hyper = Hyper(zeta=0.0, rho=-20.0, inner_steps=1, lr=None)
    one, alone = engine("pfedbayes", "perceptron", hyper=hyper, cohort=6), engine("local", "perceptron", cohort=6)
    start = jax.device_get(one.init())
    progress, _ = one.run(one.place(start), 2)
    memory = alone.init().memory._replace(model=jax.device_get(trees.broadcast(start.server.model, 6)))
    expected, _ = alone.run(alone.place(jax.device_get(alone.init())._replace(memory=memory)), 2)
    close(progress.memory.model["params"], expected.memory.model["params"])
    close(progress.server.model["params"], start.server.model["params"])
    close(progress.server.rho, start.server.rho)


def test_noise_is_standard_normal_and_another_for_each_tensor():
    zeros = {"a": np.zeros((100, 50), np.float32), "b": np.zeros((100, 50), np.float32)}
    a, b = jax.device_get(jax.jit(pfedbayes.noise)(jax.random.key(0), zeros)).values()
    assert abs(a.mean()) < 0.05 and abs(a.std() - 1) < 0.03 and abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05
