"""Sharpness-aware methods against their equations, and what each is without sharpness."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import fedavg, feddyn, flatness, scaffold
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
