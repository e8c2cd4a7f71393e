"""Sharpness-aware methods against their equations, and what each is without sharpness."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import Cohort, fedavg, feddyn, flatness, scaffold
from fedjax_mr.strategies.fedasam import sharpness_aware

LR, MOMENTUM, STEPS, CLIENTS = 0.1, 0.5, 3, 4  # full batches: one step per epoch
SETTINGS = {
    "fedsam": flatness.FedSAM(rho=0.3),
    "mofedsam": flatness.MoFedSAM(rho=0.3, beta=0.4),
    "fedgamma": flatness.FedGAMMA(rho=0.3),
    "fedspeed": flatness.FedSpeed(rho=0.3, strength=0.2),
}
SLOW = {"mofedsam", "fedgamma", "fedspeed"}  # compositions, whose parts have quick transcriptions of their own


def sharp_gradient(by_hand, weights, client, rho):
    """The gradient at the worst point of a ball."""
    loss = lambda w: by_hand.cross_entropy(w, client)
    gradient = by_hand.gradient(loss, weights)
    norm = sum((g**2).sum() for g in gradient).sqrt()
    return by_hand.gradient(loss, [w + rho * g / norm for w, g in zip(weights, gradient, strict=True)])


def fedsam(by_hand, hyper):
    """Yield the model after each round, here and in the functions below."""
    model = by_hand.read(by_hand.progress.server.model)
    for clients in by_hand.rounds(2):
        trained = [
            by_hand.train(model, i, gradient=lambda w, i=i: sharp_gradient(by_hand, w, i, hyper.rho)) for i in clients
        ]
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        yield model


def mofedsam(by_hand, hyper):
    model = by_hand.read(by_hand.progress.server.model)
    last = [0 * leaf for leaf in model]
    for clients in by_hand.rounds(3):

        def mixed(weights, i, last):
            own = sharp_gradient(by_hand, weights, i, hyper.rho)
            return [hyper.beta * g + (1 - hyper.beta) * m for g, m in zip(own, last, strict=True)]

        trained = [by_hand.train(model, i, gradient=lambda w, i=i, m=last: mixed(w, i, m)) for i in clients]
        steps = [[(a - b) for a, b in zip(model, each, strict=True)] for each in trained]
        sizes = by_hand.sizes_of(clients)
        last = [leaf / (STEPS * LR / (1 - MOMENTUM)) for leaf in by_hand.mean(steps, sizes)]
        model = by_hand.mean(trained, sizes)
        by_hand.check(by_hand.progress.server.gradient, last)
        yield model


def fedgamma(by_hand, hyper):
    model = by_hand.read(by_hand.progress.server.model)
    zeros = [0 * leaf for leaf in model]
    control, controls = zeros, [zeros] * CLIENTS
    for clients in by_hand.rounds(3):

        def corrected(weights, i, control):
            own = sharp_gradient(by_hand, weights, i, hyper.rho)
            return [g + c - ci for g, c, ci in zip(own, control, controls[i], strict=True)]

        trained = [by_hand.train(model, i, gradient=lambda w, i=i, c=control: corrected(w, i, c)) for i in clients]
        for i, local in zip(clients, trained, strict=True):
            parts = zip(controls[i], control, model, local, strict=True)
            controls[i] = [ci - c + (x - y) / (STEPS * LR / (1 - MOMENTUM)) for ci, c, x, y in parts]
        control, model = by_hand.mean(controls), by_hand.mean(trained)
        yield model


def fedspeed(by_hand, hyper):
    model = by_hand.read(by_hand.progress.server.model)
    drifts = [[0 * leaf for leaf in model]] * CLIENTS
    for clients in by_hand.rounds(3):

        def dynamic(weights, i, received):
            own = sharp_gradient(by_hand, weights, i, hyper.rho)
            parts = zip(own, weights, received, drifts[i], strict=True)
            return [g + hyper.strength * (w - r + h) for g, w, r, h in parts]

        trained = [by_hand.train(model, i, gradient=lambda w, i=i, r=model: dynamic(w, i, r)) for i in clients]
        for i, local in zip(clients, trained, strict=True):
            drifts[i] = [h + new - old for h, new, old in zip(drifts[i], local, model, strict=True)]
        model = [new + h for new, h in zip(by_hand.mean(trained), by_hand.mean(drifts), strict=True)]
        yield model


@pytest.mark.slow  # quick: the tests by hand
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in SETTINGS]
)
def test_every_round_equals_the_equations(transcription, name):
    hyper = SETTINGS[name]
    by_hand = transcription(name, hyper)
    count = 0
    for model in globals()[name](by_hand, hyper):
        by_hand.check(by_hand.progress.server.model, model)
        count += 1
    assert count >= 2


WITHOUT_SHARPNESS = {
    "fedsam": ("fedavg", fedavg.Hyper()),
    "fedgamma": ("scaffold", scaffold.Hyper()),
    "fedspeed": ("feddyn", feddyn.Hyper(alpha=0.2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_SHARPNESS)
def test_radius_zero_is_the_method_behind_it(engine, close, name):
    other, hyper = WITHOUT_SHARPNESS[name]
    flat, plain = engine(name, hyper=dataclasses.replace(SETTINGS[name], rho=0.0)), engine(other, hyper=hyper)
    close(flat.run(flat.init(), 3)[0].server, plain.run(plain.init(), 3)[0].server)


@pytest.mark.slow
def test_without_the_mean_step_mofedsam_is_fedsam(engine, close):
    own, flat = engine("mofedsam", hyper=flatness.MoFedSAM(beta=1.0)), engine("fedsam")
    close(own.run(own.init(), 3)[0].server.model, flat.run(flat.init(), 3)[0].server.model)


def test_without_eta_the_neighbourhood_is_a_ball():
    """Of |w|^2 / 2 the worst neighbour at distance rho lies further out on the same line; at zero there is none."""
    loss = lambda params, state, batch, key: (trees.squared_norm(params) / 2, state)
    take = sharpness_aware(loss, rho=0.5, eta=None)
    for kernel, expected in [([3.0, 4.0], [3.3, 4.4]), ([0.0, 0.0], [0.0, 0.0])]:
        _, gradient = take({"layer": {"kernel": jnp.array(kernel)}}, {}, None, None)
        np.testing.assert_allclose(gradient["layer"]["kernel"], expected, rtol=1e-6)


# A zero head with x = (1, 0) and label 0 has the gradient (-1/2, 1/2), of length 1/sqrt(2). At its worst point in a
# ball of this radius, the label's share is 1/4, and the gradient is (-3/4, 3/4).
RADIUS = float(np.sqrt(2) * np.log(3) / 2)
SHARP = np.array([[-0.75, 0.75], [0.0, 0.0]])
MATRIX = np.array([[3.0, 1.0], [0.0, 2.0]])


def test_a_client_of_fedsam_descends_along_the_gradient_at_the_worst_point_of_a_ball(tiny):
    start = {"model": tiny.model(np.zeros((2, 2)))}
    upload, _, _ = tiny.train(flatness.fedsam(flatness.FedSAM(RADIUS), tiny.problem(lr=0.5)), start)
    np.testing.assert_allclose(tiny.head(upload["model"]), -0.5 * SHARP, rtol=1e-5)


def test_a_client_of_mofedsam_mixes_its_sharp_gradient_with_the_last_mean_step(tiny):
    strategy = flatness.mofedsam(flatness.MoFedSAM(RADIUS, beta=0.25), tiny.problem(lr=0.5))
    payload = {"model": tiny.model(np.zeros((2, 2))), "gradient": tiny.params(MATRIX)}
    upload, _, _ = tiny.train(strategy, payload)
    np.testing.assert_allclose(tiny.head(upload["model"]), -0.5 * (0.25 * SHARP + 0.75 * MATRIX), rtol=1e-5)


def test_the_server_of_mofedsam_keeps_the_mean_descent_per_step_weighted_by_samples(tiny):
    """Descents 2 and -6 in one and three steps of size 0.5 / (1 - 0.5): per step 2 and -2, weighted 1 : 3."""
    problem = tiny.problem((1, 3, 2), steps=1, lr=0.5, momentum=0.5)
    problem = dataclasses.replace(problem, local=dataclasses.replace(problem.local, batch_size=1))
    strategy = flatness.mofedsam(flatness.MoFedSAM(), problem)
    start = flatness.State({"params": {"w": jnp.array(10.0)}}, {"w": jnp.array(99.0)})
    uploads = {"model": {"params": {"w": jnp.array([8.0, 16.0])}}}
    cohort = Cohort(jnp.array([0, 1]), jnp.array([1, 3]))
    state, _ = strategy.server_update(start, uploads, cohort, 0, None)
    assert (float(state.model["params"]["w"]), float(state.gradient["w"])) == (14.0, (1 * 2 + 3 * -2) / 4)
    unfinished = cohort._replace(work=jnp.array([1.0, 2 / 3]))  # the second one did two of three steps
    state, _ = strategy.server_update(start, uploads, unfinished, 0, None)
    assert float(state.gradient["w"]) == (1 * 2 + 3 * -3) / 4
    sent = strategy.dispatch(state, cohort, None)
    assert sent["gradient"]["w"].shape == sent["model"]["params"]["w"].shape == (2,)


def test_a_client_of_fedgamma_corrects_its_sharp_gradient_as_scaffold(tiny):
    strategy = flatness.fedgamma(flatness.FedGAMMA(RADIUS), tiny.problem(lr=0.5))
    payload = {"model": tiny.model(np.zeros((2, 2))), "control": tiny.params(MATRIX)}
    upload, memory, _ = tiny.train(strategy, payload, tiny.params(2 * MATRIX))
    np.testing.assert_allclose(tiny.head(upload["model"]), -0.5 * (SHARP + MATRIX - 2 * MATRIX), rtol=1e-5)
    np.testing.assert_allclose(tiny.head(memory), SHARP, atol=1e-5)


def test_a_client_of_fedspeed_adds_the_pull_of_feddyn_to_its_sharp_gradient(tiny):
    strategy = flatness.fedspeed(flatness.FedSpeed(RADIUS, strength=0.25), tiny.problem(lr=0.5))
    upload, memory, _ = tiny.train(strategy, {"model": tiny.model(np.zeros((2, 2)))}, tiny.params(MATRIX))
    change = -0.5 * (SHARP + 0.25 * MATRIX)
    np.testing.assert_allclose(tiny.head(upload["model"]), change, rtol=1e-5)
    np.testing.assert_allclose(tiny.head(memory), MATRIX + change, rtol=1e-5)
