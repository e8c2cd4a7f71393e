"""pFedBayes against its equations, and its special case."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.strategies import pfedbayes
from fedjax_mr.strategies.pfedbayes import Gaussian, Hyper, Memory, State


def same_noise(key, params):
    """The noise that stands in for a random one."""
    return jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), params)


@pytest.mark.slow  # quick: the tests by hand
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


def rho_of(deviation):
    """The rho of a standard deviation: the inverse of softplus."""
    return np.float32(np.log(np.expm1(deviation)))


def gaussian(mean, deviation):
    return Gaussian({"w": np.float32(mean)}, {"w": rho_of(deviation)})


def test_the_divergence_is_that_of_two_gaussians():
    """KL(N(1, 1) || N(0, 2^2)) = log 2 + (1 + 1) / (2 x 4) - 1/2."""
    found = pfedbayes.divergence(gaussian(1, 1), gaussian(0, 2))
    assert float(found) == pytest.approx(np.log(2) + 2 / 8 - 1 / 2, rel=1e-5)


def test_weights_are_drawn_around_the_mean_by_their_standard_deviation(monkeypatch):
    monkeypatch.setattr(pfedbayes, "noise", lambda key, params: {"w": np.float32(0.5)})
    assert float(pfedbayes.draw(gaussian(3, 2), None)["w"]) == pytest.approx(3 + 2 * 0.5)


@pytest.mark.parametrize("lr, step", [(0.25, -0.25), (None, -0.5 * 100)])
def test_both_distributions_have_adam_or_the_optimizer_of_the_clients(tokens, monkeypatch, lr, step):
    """The first step of Adam is its learning rate, and that of SGD the learning rate times the gradient 100."""
    federation, seen = tokens([[0, 1], [1]], lr=0.5), []
    monkeypatch.setattr(pfedbayes, "local_round", lambda loss, optimizer, **numbers: seen.append(optimizer))
    monkeypatch.setattr(local, "run", lambda *arguments: ((gaussian(5, 1), gaussian(6, 2), {}), None))
    payload = {"model": tokens.point(1), "rho": {"w": np.float32(-1)}}
    memory = Memory(tokens.point(2), {"w": np.float32(-2)}, np.bool_(True))
    pfedbayes.build(Hyper(lr=lr), federation.problem).client_update(payload, memory, federation.client(0), 0, None)
    with jax.numpy_dtype_promotion("standard"):
        update, _ = seen[0].update({"w": np.float32(100)}, seen[0].init({"w": np.float32(0)}))
    assert float(update["w"]) == pytest.approx(step, rel=1e-4)


def test_a_mini_batch_moves_q_with_new_noise_in_each_step_and_then_p_once(monkeypatch):
    """f = w, so each step of q subtracts 1 + KL's slope from its mean, and p follows on zeta / n KL alone."""
    keys = []

    def fixed_noise(key, params):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return {"w": np.float32(0.5)}

    monkeypatch.setattr(pfedbayes, "noise", fixed_noise)
    loss = lambda params, state, batch, key: (params["w"], state)
    sgd = optax.stateless(lambda gradient, params: jax.tree.map(lambda leaf: -0.5 * leaf, gradient))
    step = pfedbayes.local_round(loss, sgd, strength=np.float32(0.2), steps=2)
    with jax.disable_jit():
        carry, _ = step.step(step.init((gaussian(3, 1), gaussian(1, 2), {})), None, jax.random.key(0))
    q, p, _ = step.result(carry)
    assert len(set(keys)) == 2
    slope = 1 + 0.2 * (3 - 1) / 4  # of the mean of q: f, and (q - p) / deviation of p squared
    first = 3 - 0.5 * slope
    second = first - 0.5 * (1 + 0.2 * (first - 1) / 4)
    assert float(q.mean["w"]) == pytest.approx(second, rel=1e-5)
    assert float(p.mean["w"]) == pytest.approx(1 + 0.5 * 0.2 * (second - 1) / 4, rel=1e-5)


def test_the_copy_of_p_is_sent_and_q_stays_and_the_divergence_is_divided_by_the_samples(tokens, monkeypatch):
    federation, seen = tokens([[0, 1, 1, 0], [1]]), {}
    monkeypatch.setattr(pfedbayes, "local_round", lambda loss, optimizer, **numbers: seen.update(numbers))

    def run(step, setting, start, data, key):
        seen["start"] = start
        return (gaussian(5, 1), gaussian(6, 2), {}), None

    monkeypatch.setattr(local, "run", run)
    strategy = pfedbayes.build(Hyper(zeta=10.0, inner_steps=3), federation.problem)
    payload = {"model": tokens.point(1), "rho": {"w": np.float32(-1)}}
    for trained in (True, False):
        memory = Memory(tokens.point(2), {"w": np.float32(-2)}, np.bool_(trained))
        upload, kept, _ = strategy.client_update(payload, memory, federation.client(0), 0, None)
        q, p, _ = seen["start"]
        assert float(seen["strength"]) == pytest.approx(10 / 4) and seen["steps"] == 3
        assert p == Gaussian({"w": 1}, {"w": -1})
        assert q == (Gaussian({"w": 2}, {"w": -2}) if trained else p)
        assert upload == {"model": tokens.point(6), "rho": {"w": rho_of(2)}}
        assert kept == Memory(tokens.point(5), {"w": rho_of(1)}, np.bool_(True))
        own = strategy.personal_model(strategy.personal_part(State(tokens.point(1), None), 0), memory, None, None)
        assert own == tokens.point(2 if trained else 1)


def test_the_server_averages_both_halves_by_samples_and_all_deviations_start_alike(tokens):
    federation = tokens([[0, 1, 1], [1]])
    strategy = pfedbayes.build(Hyper(rho=-1.5), federation.problem)
    uploads = {"model": {"params": {"w": np.array([10, 2], np.float32)}}, "rho": {"w": np.array([-4, -8], np.float32)}}
    state, _ = strategy.server_update(None, uploads, federation.cohort, 0, None)
    assert float(state.model["params"]["w"]) == pytest.approx(8) and float(state.rho["w"]) == pytest.approx(-5)
    one, other = (strategy.init(jax.random.key(seed)) for seed in (0, 1))
    assert all((np.asarray(leaf) == -1.5).all() for leaf in jax.tree.leaves(one.rho))
    models = (jax.tree.leaves(each.model) for each in (one, other))
    assert any(not np.array_equal(*pair) for pair in zip(*models, strict=True))


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
