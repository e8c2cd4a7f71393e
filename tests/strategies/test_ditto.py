"""Ditto against its equations, and its special case."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import ditto
from fedjax_mr.strategies.ditto import Hyper
from fedjax_mr.strategies.parts import GlobalModel, LastModel


@pytest.mark.slow  # quick: the tests by hand
def test_three_rounds_equal_the_equations(transcription):
    strength = 0.6
    by_hand = transcription("ditto", Hyper(strength=strength))
    model, own = by_hand.read(by_hand.progress.server.model), {}
    again = 0
    for clients in by_hand.rounds(3):

        def held(weights, i, received):
            plain = by_hand.gradient(lambda w: by_hand.cross_entropy(w, i), weights)
            return [g + strength * (v - w) for g, v, w in zip(plain, weights, received, strict=True)]

        again += sum(i in own for i in clients)
        own |= {i: by_hand.train(own.get(i, model), i, gradient=lambda v, i=i, w=model: held(v, i, w)) for i in clients}
        model = by_hand.mean([by_hand.train(model, i) for i in clients], by_hand.sizes_of(clients))
        by_hand.check(by_hand.progress.server.model, model)
        for i, weights in own.items():
            by_hand.check(trees.take(by_hand.progress.memory.model, i), weights)
        assert np.flatnonzero(by_hand.progress.memory.trained).tolist() == sorted(own)
    assert again > 0  # somebody went on with its own


def test_the_personal_model_continues_on_the_same_batches_and_is_pulled_to_the_received_one(tokens, trainings):
    federation, key = tokens([[0, 1], [1]], lr=0.1), jax.random.key(1)
    strategy = ditto.build(Hyper(strength=0.5), federation.problem)
    for trained, start in ((True, 5.0), (False, 2.0)):
        trainings.clear()
        memory = LastModel(tokens.point(5), np.bool_(trained))
        upload, kept, _ = strategy.client_update({"model": tokens.point(2)}, memory, federation.client(0), 0, key)
        shared, personal = trainings
        assert shared.start == tokens.point(2) and personal.start == tokens.point(start)
        assert upload == {"model": tokens.point(3)} and kept.model == tokens.point(start + 1) and bool(kept.trained)
        assert shared.key is key and personal.key is key  # the same batches
        params = {"w": np.float32(10)}  # at 10, where the loss is flat, a step is -0.1 x 0.5 (10 - 2)
        optimizer = personal.optimizer
        step, _ = optimizer.update({"w": np.float32(0)}, optimizer.init(params), params)
        np.testing.assert_allclose(step["w"], -0.4, rtol=1e-6)


def test_a_client_that_has_not_trained_is_tested_with_the_global_model(tokens):
    strategy = ditto.build(Hyper(), tokens([[0, 1], [1]]).problem)
    tested = lambda trained: strategy.personal_model(
        GlobalModel(tokens.point(2)), LastModel(tokens.point(5), np.bool_(trained)), None, None
    )
    assert tested(True) == tokens.point(5) and tested(False) == tokens.point(2)


@pytest.mark.slow
def test_the_global_model_is_fedavgs_and_without_the_pull_a_client_trains_alone(engine, close):
    alone, average = engine("ditto", hyper=Hyper(strength=0.0), cohort=6), engine("fedavg", cohort=6)
    first, _ = alone.run(alone.init(), 1)
    local = engine("local", cohort=6)
    progress = local.init()
    start = trees.broadcast(alone.init().server.model, 6)
    progress = local.place(progress._replace(memory=progress.memory._replace(model=start)))
    close(first.memory.model, local.run(progress, 1)[0].memory.model)
    second, _ = alone.run(first, 1)
    close(second.server.model, average.run(average.init(), 2)[0].server.model)
