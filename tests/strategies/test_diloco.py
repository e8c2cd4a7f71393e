"""DiLoCo against its equations, its special case, and the optimizer that clients keep."""

import dataclasses

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import simulator_of
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.models.base import Layer
from fedjax_mr.strategies import STRATEGIES, diloco, fedavg, fedmr
from fedjax_mr.strategies.diloco import Hyper
from fedjax_mr.strategies.parts import averaging
from fedjax_mr.strategies.traffic import usual_traffic
from fedjax_mr.strategies.transforms import keep_optimizer
from fedjax_mr.testing.federations import federated, first_cohort, network_of


def test_three_rounds_equal_the_equations(transcription):
    """SGD with momentum as inner optimizer: its velocity stays on the client."""
    by_hand = transcription("diloco", Hyper(outer_lr=0.7, outer_momentum=0.9), seed=1)
    model = by_hand.read(by_hand.progress.server.inner.model)
    outer, velocities, again = [0 * leaf for leaf in model], {}, 0
    for clients in by_hand.rounds(4):
        trained = []
        for i in clients:
            weights, velocity = model, velocities.get(i, [0 * leaf for leaf in model])
            again += i in velocities
            for _ in range(3):
                gradient = by_hand.gradient(lambda w, i=i: by_hand.cross_entropy(w, i), weights)
                velocity = [0.5 * v + g for v, g in zip(velocity, gradient, strict=True)]
                weights = [w - 0.1 * v for w, v in zip(weights, velocity, strict=True)]
            trained.append(weights)
            velocities[i] = velocity
        delta = [x - y for x, y in zip(model, by_hand.mean(trained), strict=True)]
        outer = [0.9 * v + d for v, d in zip(outer, delta, strict=True)]
        model = [x - 0.7 * (d + 0.9 * v) for x, d, v in zip(model, delta, outer, strict=True)]
        by_hand.check(by_hand.progress.server.inner.model, model)
    assert again > 0


@pytest.mark.parametrize("velocity", [0.9, pytest.param(0.0, marks=pytest.mark.slow)])
def test_with_two_fragments_each_is_sent_in_every_other_round(transcription, velocity):
    """Hidden layer and head in turn. A client keeps training its own copy of the other one, and its velocity."""
    by_hand = transcription("diloco", Hyper(outer_lr=0.7, outer_momentum=velocity, fragments=2), cohort=4)
    parts = [slice(2, 4), slice(0, 2)]  # of the leaves: first the hidden layer, then the head
    model = by_hand.read(by_hand.progress.server.inner.model)
    outer = [0 * leaf for leaf in model]
    own, inner = [list(model) for _ in range(4)], [[0 * leaf for leaf in model] for _ in range(4)]
    sizes = [sum(4 * leaf.numel() for leaf in model[part]) for part in parts]
    for round, clients in enumerate(by_hand.rounds(5)):
        for i in clients:
            for _ in range(3):
                gradient = by_hand.gradient(lambda w, i=i: by_hand.cross_entropy(w, i), own[i])
                inner[i] = [0.5 * v + g for v, g in zip(inner[i], gradient, strict=True)]
                own[i] = [w - 0.1 * v for w, v in zip(own[i], inner[i], strict=True)]
        mean, part = by_hand.mean(own), parts[round % 2]
        for leaf in range(4)[part]:
            delta = model[leaf] - mean[leaf]
            outer[leaf] = velocity * outer[leaf] + delta
            model[leaf] = model[leaf] - 0.7 * (delta + velocity * outer[leaf])
            for i in range(4):
                own[i][leaf] = model[leaf]
        by_hand.check(by_hand.progress.server.inner.model, model)
        received = sum(sizes) if round == 0 else sizes[(round - 1) % 2]
        assert by_hand.report.traffic.num_bytes() == (4 * received, 4 * sizes[round % 2], 0)


def test_a_round_of_fragments_changes_and_sends_every_second_layer(federation):
    """Statistics of BatchNorm wait like the parameters of their layer."""
    problem = federation("normed", cohort=6).problem
    scale, bias, *statistics = sorted(problem.layers[0].leaves, reverse=True)
    in_four = [Layer("", tuple(leaves), ()) for leaves in ([scale, bias], statistics, [4], [5])]
    problem = dataclasses.replace(problem, layers=tuple(in_four))
    strategy = diloco.build(Hyper(fragments=2), problem)

    @jax.jit
    def one_round(state, round):
        uploads = {"model": trees.broadcast(jax.tree.map(lambda leaf: leaf + 1, state.inner.model), 6)}
        new, _ = strategy.server_update(state, uploads, first_cohort(problem), round, None)
        return new, strategy.traffic(usual_traffic({}, uploads), state, uploads, first_cohort(problem), round)

    state = jax.device_get(jax.jit(strategy.init)(jax.random.key(0)))
    for round in range(3):
        new, traffic = jax.device_get(one_round(state, np.int32(round)))
        leaves = list(zip(*map(jax.tree.leaves, (state.inner.model, new.inner.model)), strict=True))
        for place, layer in enumerate(problem.layers):
            assert all(np.any(leaves[leaf][0] != leaves[leaf][1]) == (place % 2 == round % 2) for leaf in layer.leaves)
        in_turn = [leaf for layer in problem.layers[round % 2 :: 2] for leaf in layer.leaves]
        assert traffic.num_bytes()[1] == 6 * sum(leaves[leaf][0].nbytes for leaf in in_turn)
        state = new


def test_networks_and_federations_that_cannot_be_streamed_are_refused(federation):
    everybody, some = federation("linear", cohort=6).problem, federation("linear", cohort=3).problem
    for hyper, problem, message in (
        (Hyper(fragments=2), everybody, "divides 1 layers: set hyper.fragments= to at most that"),
        (Hyper(fragments=2, combine="recombine"), everybody, "needs hyper.combine=average"),
        (Hyper(fragments=2), dataclasses.replace(some, layers=2 * some.layers), "every round: set cohort=6"),
    ):
        with pytest.raises(UserError, match=message):
            diloco.build(hyper, problem)


def simulator(build, *, optimizer="sgd", momentum=0.0, **setting):
    setting = local.setting(optimizer, lr=0.05, momentum=momentum, batch_size=12, **setting)
    return fmr.Simulator(
        build, network_of("linear"), federated(), cohort=6, local=setting, layout=fmr.Layout(devices=1)
    )


@pytest.mark.slow
def test_with_one_step_of_sgd_it_is_the_gradient_step_of_fedavg(close):
    hyper = Hyper(outer_lr=1.0, outer_momentum=0.0)
    ours = simulator(lambda _, problem: STRATEGIES["diloco"].build(hyper, problem), steps=1)
    average = simulator(lambda _, problem: fedavg.build(fedavg.Hyper("uniform"), problem), steps=1)
    (found, _), (expected, _) = ours.run(ours.init(), 3), average.run(average.init(), 3)
    close(found.server.inner.model, expected.server.model)


@jax.numpy_dtype_promotion("standard")  # optax's Adam divides by 1 - decay**count, a float to an integer power
@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "schedule_free"))]
)
def test_a_client_that_keeps_its_optimizer_trains_as_without_a_break(optimizer, close):
    """With one client, two rounds of one step are one round of two steps. Without the memory they are not."""

    def keeping(steps):
        setting = local.setting(optimizer, lr=0.05, momentum=0.5, steps=steps, batch_size=12)
        kept = lambda _, problem: keep_optimizer(averaging(problem), problem)
        return fmr.Simulator(
            kept, network_of("linear"), federated((9,)), cohort=1, local=setting, layout=fmr.Layout(devices=1)
        )

    one, two = keeping(1), keeping(2)
    start = jax.device_get(one.init())
    middle = jax.device_get(one.run(one.rounds.place(start), 1)[0])
    again = lambda progress: jax.device_get(one.run(one.rounds.place(progress), 1)[0])
    apart, together = again(middle), two.run(two.init(), 1)[0]
    close(apart.memory, together.memory)
    if optimizer != "schedule_free":  # whose gradients are not those of the uploaded mean
        close(apart.server, together.server)
    new = again(middle._replace(memory=start.memory)).server
    assert any(np.any(np.abs(a - b) > 1e-6) for a, b in zip(*map(jax.tree.leaves, (new, apart.server)), strict=True))


def test_methods_whose_clients_do_more_than_train_are_refused(engine):
    problem = engine("fedavg", "linear").constants.problem
    for name in ("scaffold", "fedprox", "ditto", "diloco"):
        row = STRATEGIES[name]
        with pytest.raises(UserError, match="leave keep_optimizer out"):
            keep_optimizer(row.build(row.hyper(), problem), problem)


def test_the_flag_keeps_the_velocity():
    def kept(keep):
        config = fmr.Config(dataset="digits", model="logistic", clients=4, cohort=4, keep_optimizer=keep, devices=1)
        config, user_objects, _ = resolve(config)
        federated = federated_data(config)
        config, network = user_objects.build(config, federated)
        return simulator_of(config, federated, network).rounds.shapes().memory

    assert kept(False) is None
    assert {leaf.shape for leaf in jax.tree.leaves(kept(True).state)} == {(4, 10), (4, 64, 10)}  # of four clients


def test_the_server_of_recombined_models_without_an_outer_velocity_is_that_of_fedmr(federation, close, sent_after):
    problem = federation("linear").problem
    ours = diloco.build(Hyper(combine="recombine", outer_lr=1.0, outer_momentum=0.0), problem)
    close(sent_after(ours, problem), sent_after(fedmr.build(fedmr.Hyper(), problem), problem))


@pytest.mark.slow  # quick: the server
def test_recombined_models_each_have_an_outer_optimizer(engine, close):
    one = engine("diloco", "linear", hyper=Hyper(combine="recombine", outer_lr=1.0, outer_momentum=0.0))
    other = engine("fedmr", "linear")
    (first, _), (expected, _) = one.run(one.init(), 1), other.run(other.init(), 1)  # velocities start at zero
    close(first.server.inner.models, expected.server.models)
