"""MAPPER against its equations, and its special case."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedavg, mapper
from fedjax_mr.strategies.mapper import Hyper, Memory
from fedjax_mr.strategies.parts import GlobalModel

GRID = (0.0, 0.4, 1.0)
divide = jax.jit(mapper.divide, static_argnums=1)


def data_of(constants, client):
    offset, size = jnp.asarray(constants.federation.offsets)[client], constants.problem.sizes[client]
    return ClientData(constants.federation.samples, constants.federation.index, offset, size, jnp.int32(client))


def rows_of(part):
    return np.asarray(part.index)[int(part.offset) : int(part.offset) + int(part.size)].tolist()


@pytest.mark.slow  # quick: the tests by hand
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


class Search:
    """MAPPER on models that are one number: training adds ``moves``, and the loss on B is the distance from 6.5.

    A client has nine samples, and its part is recognised by its first row. With the received model 2, the client's own
    model 10 and the grid (0.25, 0.5, 1), training on A moves by 4 and training on G by 1.
    """

    def __init__(self, tokens, monkeypatch, mode):
        self.federation, self.calls, self.keys = tokens([[0, 1, 0, 1, 0, 1, 0, 1, 0], [1]]), [], []
        self.strategy = mapper.build(Hyper(mode=mode, grid=(0.25, 0.5, 1.0)), self.federation.problem)
        third = lambda offset: self.federation.client(0)._replace(offset=offset, size=np.int32(3))
        self.parts = mapper.Parts(third(0), third(3), third(6))
        monkeypatch.setattr(mapper, "divide", lambda data, max_size: self.parts)
        monkeypatch.setattr(local, "train", self.train)
        monkeypatch.setattr(local, "score", self.score)
        monkeypatch.setattr(local, "supervised", lambda model: lambda params, state, batch, key: (params["w"], state))

    def name(self, data):
        return {int(part.offset): name for name, part in zip("ABG", self.parts, strict=True)}[int(data.offset)]

    def train(self, model, setting, variables, data, key, *, loss=None):
        part, size = self.name(data), int(data.size)
        self.calls.append((part, float(variables["params"]["w"]), loss))
        self.keys.append(tuple(jax.random.key_data(key).tolist()))
        moved = {"params": {"w": variables["params"]["w"] + (0 if size == 0 else {"A": 4, "G": 1}[part])}}
        return moved, local.Metrics(np.float32(3), np.int32(size), np.int32(1), np.int32(-1))

    def score(self, model, variables, data, *, batch_size):
        assert self.name(data) == "B"
        return local.Score(0, abs(variables["params"]["w"] - 6.5), 1)

    def client_update(self, tokens, *, trained=True, key=None):
        memory = Memory(tokens.point(10), jnp.float32(0.9), np.bool_(trained))
        with jax.disable_jit():
            return self.strategy.client_update(
                {"model": tokens.point(2)},
                memory,
                self.federation.client(0),
                0,
                jax.random.key(0) if key is None else key,
            )


def test_the_own_model_is_trained_through_the_interpolation_for_each_lambda_and_the_best_on_b_is_kept(
    tokens, monkeypatch
):
    """Interpolations of 14 and 2: 5, 8 and 14. The first two are equally near to 6.5, and the first one is kept."""
    search = Search(tokens, monkeypatch, "paper")
    upload, memory, metrics = search.client_update(tokens)
    assert [call[:2] for call in search.calls] == [("A", 10)] * 3 + [("G", 2)]
    assert float(upload["share"]) == float(memory.share) == 0.25
    assert memory.own == tokens.point(14) and upload["model"] == tokens.point(3) and bool(memory.trained)
    values = [[float(loss({"w": np.float32(w)}, {}, None, None)[0]) for w in (0, 1)] for *_, loss in search.calls]
    # Each share is that of the trained model. The other model is the received one, then the best own one.
    assert values == [[0.75 * 2, 0.75 * 2 + 0.25], [0.5 * 2, 0.5 * 2 + 0.5], [0, 1], [0.25 * 14, 0.25 * 14 + 0.75]]
    assert float(metrics.loss) == 4 * 3 and int(metrics.images) == 4 * 3 and int(metrics.steps) == 4
    own = search.strategy.personal_model(GlobalModel(tokens.point(2)), memory, None, None)
    assert float(own["params"]["w"]) == 0.25 * 14 + 0.75 * 2
    search.client_update(tokens, trained=False)
    assert search.calls[4][1] == 2  # the own model starts as the first received one


@pytest.mark.parametrize("mode", ["paper", "fedme"])
def test_every_training_has_a_key_of_its_own_from_the_clients_key(tokens, monkeypatch, mode):
    search = Search(tokens, monkeypatch, mode)
    for seed in (0, 1):
        search.client_update(tokens, key=jax.random.key(seed))
    assert len(search.keys) == len(set(search.keys)) == 8


def test_as_fedmes_authors_the_interpolation_is_trained_and_the_own_model_solved_from_it(tokens, monkeypatch):
    """Interpolations 4, 6 and 10 become 8, 10 and 14 on A. The first is best, so l = (8 - 0.75 x 2) / 0.25 = 26."""
    search = Search(tokens, monkeypatch, "fedme")
    upload, memory, _ = search.client_update(tokens)
    assert [call[:2] for call in search.calls] == [("A", 4), ("A", 6), ("A", 10), ("G", 8)]
    assert memory.own == tokens.point(26) and float(memory.share) == 0.25
    assert upload["model"] == tokens.point(2 + 1)  # moved as the interpolation on G
    with jax.disable_jit():  # interpolations of 26 and 2: 8, 14, 26, which training makes 12, 18, 30
        own = search.strategy.personal_model(
            GlobalModel(tokens.point(2)), memory, search.federation.client(0), jax.random.key(0)
        )
    assert own == tokens.point(12)


def test_with_lambda_0_the_own_model_stays(tokens, monkeypatch):
    search = Search(tokens, monkeypatch, "fedme")
    search.strategy = mapper.build(Hyper(mode="fedme", grid=(0.0,)), search.federation.problem)
    upload, memory, _ = search.client_update(tokens)
    assert search.calls[0][:2] == ("A", 2) and memory.own == tokens.point(10) and upload["model"] == tokens.point(3)


def test_clients_are_divided_differently_and_two_samples_are_all_in_each_part(tokens):
    federation = tokens([[0] * 6, [0] * 6, [0, 1]])
    parts = [[rows_of(part) for part in mapper.divide(federation.client(i), 6)] for i in range(3)]
    assert [[row - 6 for row in rows] for rows in parts[1]] != parts[0]
    assert [sorted(rows) for rows in parts[2]] == [[12, 13]] * 3


def test_the_server_averages_by_samples_and_reports_the_mean_lambda(tokens):
    federation = tokens([[0, 1, 1], [1]])
    uploads = {"model": {"params": {"w": np.array([10, 2], np.float32)}}, "share": np.array([0.25, 0.75], np.float32)}
    state, info = mapper.build(Hyper(), federation.problem).server_update(
        GlobalModel(None), uploads, federation.cohort, 0, None
    )
    assert float(state.model["params"]["w"]) == 8 and float(info["mean_lambda"]) == 0.5


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
