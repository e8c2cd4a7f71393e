"""MAPPER against its equations, and its special case."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.samples import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedavg, mapper
from fedjax_mr.strategies.mapper import Hyper

GRID = (0.0, 0.4, 1.0)
divide = jax.jit(mapper.divide, static_argnums=1)


def data_of(constants, client):
    offset, size = jnp.asarray(constants.federation.offsets)[client], constants.problem.sizes[client]
    return ClientData(constants.federation.samples, constants.federation.index, offset, size, jnp.int32(client))


def rows_of(part):
    return np.asarray(part.index)[int(part.offset) : int(part.offset) + int(part.size)].tolist()


@pytest.mark.parametrize("mode", ["paper", pytest.param("fedme", marks=pytest.mark.slow)])
def test_two_rounds_equal_the_equations(transcription, mode):
    by_hand = transcription("mapper", Hyper(mode=mode, grid=GRID))
    constants, torch = by_hand.engine.constants, by_hand.torch
    x = torch.tensor(np.asarray(constants.federation.samples.x).reshape(-1, 16), dtype=torch.float64)
    y = torch.tensor(np.asarray(constants.federation.samples.y), dtype=torch.int64)
    parts = [[rows_of(part) for part in divide(data_of(constants, client), 6)] for client in range(4)]
    model, own, shares = by_hand.read(by_hand.progress.server.model), {}, {}

    def between(a, b, share):
        return [share * first + (1 - share) * second for first, second in zip(a, b, strict=True)]

    def loss(weights, rows):
        logits = by_hand.head(weights, by_hand.features(weights, x[rows]))
        return torch.nn.functional.cross_entropy(logits, y[rows])

    def train(weights, rows, through=lambda weights: weights):
        return by_hand.train(weights, None, loss=lambda weights: loss(through(weights), rows))

    def client_round(kept, g, a, b, c):
        best = None
        for share in GRID:
            candidate, middle = kept, between(kept, g, share)
            if share > 0 and mode == "paper":
                candidate = train(kept, a, lambda weights, share=share: between(weights, g, share))
                middle = between(candidate, g, share)
            elif share > 0:
                middle = train(middle, a)
                candidate = [(m - (1 - share) * each) / share for m, each in zip(middle, g, strict=True)]
            value = float(loss(middle, b))
            if best is None or value < best[0]:
                best = value, share, candidate, middle
        _, share, candidate, middle = best
        if mode == "fedme":
            sent = [each + moved - m for each, moved, m in zip(g, train(middle, c), middle, strict=True)]
        else:
            sent = train(g, c, lambda weights: between(weights, candidate, 1 - share)) if share < 1 else g
        return share, candidate, sent

    for clients in by_hand.rounds(2):
        sent = []
        for i in clients:
            shares[i], own[i], upload = client_round(own.get(i, model), model, *parts[i])
            sent.append(upload)
        model = by_hand.mean(sent, by_hand.sizes_of(clients))
        by_hand.check(by_hand.progress.server.model, model)
        for i, weights in own.items():
            by_hand.check(trees.take(by_hand.progress.memory.own, i), weights)
            assert float(by_hand.progress.memory.share[i]) == pytest.approx(shares[i])
    assert len(set(shares.values())) > 1  # the clients differ


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paper", "fedme"])
def test_with_lambda_0_alone_a_client_does_what_fedavgs_does_on_the_third_part(federation, close, mode):
    constants = federation("perceptron", batch_size=12)  # full batches: their order does not matter
    problem, key = constants.problem, jax.random.key(5)
    payload = {"model": jax.jit(problem.model.init)(key)}
    mine, theirs = mapper.build(Hyper(mode=mode, grid=(0.0,)), problem), fedavg.build(fedavg.Hyper(), problem)
    memory = jax.jit(mine.init_memory)(key, 0)
    ours = jax.jit(lambda data: mine.client_update(payload, memory, data, 0, key)[0])
    plain = jax.jit(lambda part: theirs.client_update(payload, None, part, 0, key)[0])
    for client in range(problem.num_clients):
        data = data_of(constants, client)
        upload = ours(data)
        close(upload["model"], plain(divide(data, problem.local.max_size).shared)["model"])
        assert float(upload["share"]) == 0


def test_the_parts_are_disjoint_random_and_the_same_in_every_round(federation):
    constants = federation("linear")
    for client, size in enumerate((7, 12, 1, 5, 9, 4)):
        data = data_of(constants, client)
        parts = [rows_of(part) for part in divide(data, 12)]
        if size < 3:
            assert parts == [rows_of(data)] * 3
            continue
        assert [len(part) for part in parts] == [size // 3, size // 3, size - 2 * (size // 3)]
        assert sorted(itertools.chain(*parts)) == sorted(rows_of(data))
        assert parts == [rows_of(part) for part in divide(data, 12)]
    assert list(itertools.chain(*parts)) != rows_of(data)


@pytest.mark.slow
def test_every_training_is_counted(engine):
    one = engine("mapper", "linear", hyper=Hyper(mode="fedme", grid=GRID), cohort=6)
    _, report = one.run(one.init(), 1)
    thirds = [(size // 3, size - 2 * (size // 3)) if size > 2 else (size, size) for size in (7, 12, 1, 5, 9, 4)]
    assert int(report.images) == 2 * sum(2 * a + g for a, g in thirds)  # epochs x (two lambdas above 0 on A, one on G)
    assert int(report.steps) == 2 * sum(2 * -(-a // 4) - (-g // 4) for a, g in thirds)


@pytest.mark.slow
@pytest.mark.parametrize("mode, cohort", [("paper", 3), ("fedme", 6)])  # of the paper, who did not train counts too
def test_a_clients_own_model(engine, close, mode, cohort):
    one = engine("mapper", "linear", hyper=Hyper(mode=mode, grid=GRID), cohort=cohort)
    progress, _ = one.run(one.init(), 2)
    trained = np.asarray(progress.memory.trained)
    own = jax.jit(lambda memory, data: one.strategy.personal_model(progress.server, memory, data, jax.random.key(1)))
    network = one.constants.problem.model
    loss = jax.jit(lambda variables, part: local.score(network, variables, part, batch_size=12).loss)
    for client in range(6):
        memory = trees.take(progress.memory, client)
        model = own(memory, data_of(one.constants, client))
        if mode == "paper" and trained[client]:
            close(model, jax.jit(trees.interpolate)(memory.own, progress.server.model, memory.share))
        elif mode == "paper":
            close(model, progress.server.model)
        else:  # the search leaves a model that is no worse on B than the global one
            part = divide(data_of(one.constants, client), 12).share
            assert float(loss(model, part)) <= float(loss(progress.server.model, part))


def test_an_empty_grid_is_an_error(federation):
    with pytest.raises(UserError, match="lambda"):
        mapper.build(Hyper(grid=()), federation("linear").problem)
