"""pFedHR: what a client learns, what the server makes, and who gets what."""

import copy
import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.engine.placement import rows_of
from fedjax_mr.engine.round import HOST, round_key
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.strategies import Cohort
from fedjax_mr.strategies.pfedhr import Hyper, chains, groups, similarity
from fedjax_mr.strategies.pfedhr import strategy as pfedhr
from fedjax_mr.strategies.pfedhr.chains import Piece

QUICK = dict(groups=2, max_candidates=2, server_epochs=1)
# A client learns from no teacher; the server makes them all the same.
UNWEIGHTED = Hyper(distillation_weight=0.0, teachers="latest", **QUICK)
ZOO = "thin,linear,perceptron"
NETWORKS = ("linear", "linear,perceptron", "thin", ZOO)  # without convolutions there are no candidates


@pytest.fixture(scope="module")
def taught(engine):
    """An engine with clients of three networks, and its progress after each of two rounds."""
    one = engine("pfedhr", ZOO, hyper=Hyper(**QUICK))
    progress, rounds = one.init(), []
    for _ in range(2):
        progress, report = one.run(progress, 1)
        rounds.append((jax.tree.map(np.array, progress), report))
    return one, rounds


@pytest.fixture(scope="module")
def reassembler(taught):
    """The reassembler of that engine, with its compiled programs."""
    one, _ = taught
    return inspect.getclosurevars(one.strategy.between_rounds).nonlocals["reassembler"]


@pytest.fixture(scope="module")
def key(taught):
    """The key of the first round's reassembly: with another one, other candidates would be compiled."""
    one, _ = taught
    return round_key(one.constants.key, HOST, 1)


@pytest.fixture(scope="module")
def data_of(taught):
    """client -> its data, on the host as in a run."""
    one, _ = taught
    return one.constants._replace(federation=jax.device_get(one.constants.federation)).client


TUNED = Piece(None, {}, inherited=False)  # the mark of a chain that `Spy.train` has tuned


class Spy:
    """The programs of a reassembler, which compile nothing: results are looked up instead of computed."""

    def __init__(self, *, activations=None, logits=None):
        self._activations, self._logits, self.tuned, self.probes, self.keys = activations, logits, [], [], []

    def init(self, module, shape, key):
        self.keys.append(("stitch", *jax.random.key_data(key).tolist()))
        return Piece(module, {}, inherited=False)

    def activations(self, chain, samples):
        self.probes.append(samples)
        return self._activations(chain)

    def train(self, chain, samples, key, *, stitches_only=False, **options):
        assert TUNED not in chain
        self.keys.append(("tuning", *jax.random.key_data(key).tolist()))
        self.tuned.append(options | {"stitches_only": stitches_only, "samples": samples})
        return (*chain, TUNED)

    def logits(self, chain, samples, rows=None):
        return self._logits(chain, samples)


@pytest.fixture(scope="module")
def thin(federation):
    """The problem of the network `thin`, and the blocks (a convolution, a head) of two clients."""
    problem = federation("thin").problem
    zeros = lambda: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), problem.model.shapes())
    return problem, [chains.decompose(problem.model, zeros(), owner=owner) for owner in range(2)]


def with_spy(problem, hyper, **results):
    reassembler = pfedhr.Reassembler(hyper, problem)
    reassembler.programs = Spy(**results)
    return reassembler


def owner_of(chain, networks):
    """The client whose convolution a chain has."""
    (owner,) = [n for n, network in enumerate(networks) if any(piece is network[0].piece for piece in chain)]
    return owner


def test_fine_tuned_candidates_are_compared_with_fine_tuned_copies_of_the_clients_networks(thin):
    """By the mean cosine of their logits: the candidate of the other client's convolution, whatever the lengths."""
    problem, networks = thin
    rng = np.random.default_rng(0)
    inputs, maps, outputs = rng.normal(size=(3, 10, 4))  # the same in both networks: two groups, convolutions and heads
    of_client = {0: [[1.0, 0, 0], [0, 2, 0]], 1: [[0, 0, 3.0], [3, 0, 0]]}
    of_candidate = {0: [[0, 0, 0.1], [0.1, 0, 0]], 1: [[9.0, 9, 0], [0, 1, 0]]}

    def logits(chain, samples):
        if chain[-1] is not TUNED:
            return -np.ones((2, 3))
        table = of_client if chain[0].inherited else of_candidate
        return np.array(table[owner_of(chain, networks)])

    reassembler = with_spy(problem, Hyper(**QUICK), activations=lambda chain: [inputs, maps, outputs], logits=logits)
    result = reassembler.reassemble(networks, networks, jax.random.key(0))
    assert sorted(owner_of(chain, networks) for chain in result.chains) == [0, 1]
    assert all(chain[-1] is TUNED for chain in result.chains)
    columns = [owner_of(chain, networks) for chain in result.chains]
    expected = np.array([[0, (0.5**0.5 + 1) / 2], [1, (0 + 0) / 2]])
    np.testing.assert_allclose(result.logit_similarity, expected[:, columns], atol=1e-9)
    options = reassembler.programs.tuned
    assert len(options) == 4  # two candidates, two copies
    for each in options:
        assert (each["epochs"], each["batch_size"], each["stitches_only"]) == (1, 8, False)
        np.testing.assert_array_equal(each["samples"].y, problem.public.y)
        assert each["loss"] is chains.supervised(problem.model.task)


def test_only_the_stitches_of_candidates_are_tuned_if_asked(thin):
    problem, networks = thin
    same = np.random.default_rng(0).normal(size=(3, 10, 4))
    reassembler = with_spy(
        problem, Hyper(finetune="stitches", **QUICK), activations=lambda chain: same, logits=lambda *_: np.ones((2, 3))
    )
    reassembler.reassemble(networks, networks, jax.random.key(0))
    assert [each["stitches_only"] for each in reassembler.programs.tuned] == [True, True, False, False]


def test_blocks_are_grouped_by_the_similarity_of_their_inputs_and_of_their_outputs(thin):
    """Inputs alone, or outputs alone, would give other groups."""
    problem, networks = thin
    rng = np.random.default_rng(5)
    values = [rng.normal(size=(3, 10, 2)).astype(np.float32) for _ in networks]  # input, after block 0, after block 1
    reassembler = with_spy(
        problem,
        Hyper(**QUICK),
        activations=lambda chain: values[owner_of(chain, networks)],
        logits=lambda *_: np.ones((2, 3)),
    )
    result = reassembler.reassemble(networks, networks, jax.random.key(0))
    entering, leaving = (similarity.cka([each[block + step] for each in values for block in (0, 1)]) for step in (0, 1))
    np.testing.assert_allclose(result.similarity, (entering + leaving) / 2, atol=1e-6)
    with_first = lambda labels: (labels == labels[0]).tolist()  # which blocks are in the group of the first one
    by = lambda *tables: with_first(groups.k_medoids(1 / sum(tables), 2))
    assert with_first(result.groups) == by(entering, leaving)
    assert by(entering, leaving) not in (by(entering, entering), by(leaving, leaving))


def test_the_authors_grouping_is_of_averaged_inputs_and_outputs(thin, monkeypatch):
    problem, networks = thin
    values = [np.random.default_rng(owner).normal(size=(3, 10, 2, 2, 4)) for owner in range(2)]
    seen, four = [], np.array([0, 1, 0, 1])

    def grouped(entering, leaving, count, *, seed):
        seen.append((entering, leaving, count))
        return four

    monkeypatch.setattr(groups, "averaged_k_means", grouped)
    activations = lambda chain: values[owner_of(chain, networks)]
    reassembler = with_spy(
        problem, Hyper(grouping="means", **QUICK), activations=activations, logits=lambda *_: np.ones((2, 3))
    )
    result = reassembler.reassemble(networks, networks, jax.random.key(0))
    ((entering, leaving, count),) = seen
    means = [each.mean(axis=(2, 3)) for each in values]
    np.testing.assert_allclose(entering, [means[0][0], means[0][1], means[1][0], means[1][1]])
    np.testing.assert_allclose(leaving, [means[0][1], means[0][2], means[1][1], means[1][2]])
    assert count == 2 and result.groups is four


def test_blocks_are_compared_on_a_random_part_of_the_public_samples(thin):
    """Without labels, and the same for all networks."""
    problem, networks = thin
    same = np.random.default_rng(0).normal(size=(3, 6, 4))
    reassembler = with_spy(
        problem, Hyper(samples=6, **QUICK), activations=lambda chain: same, logits=lambda *_: np.ones((2, 3))
    )
    drawn = []
    for seed in range(2):
        reassembler.reassemble(networks, networks, jax.random.key(seed))
        one, other = (np.asarray(probe.x) for probe in reassembler.programs.probes[-2:])
        np.testing.assert_array_equal(one, other)
        public = [row.tobytes() for row in np.asarray(problem.public.x)]
        drawn.append({public.index(row.tobytes()) for row in one})
        assert len(drawn[-1]) == len(one) == 6
    assert drawn[0] != drawn[1] and all(probe.y is None for probe in reassembler.programs.probes)
    stitched = [key for key in reassembler.programs.keys if key[0] == "stitch"]
    assert len(stitched) == len(set(stitched)) > 2  # every new layer, in both reassemblies
    assert len(set(reassembler.programs.keys) - set(stitched)) == 2  # the same for all that is tuned in one of them


def test_the_server_keeps_the_networks_of_the_last_round_alone(federation):
    strategy = pfedhr.build(Hyper(**QUICK), federation("thin").problem)
    state = pfedhr.State(jnp.array([0, 1, 2, -1, -1, -1]), "old", None, jnp.array([0, 7, 7, 7, 0, 7]))
    state, info = strategy.server_update(state, {"model": "new"}, Cohort(jnp.array([4, 0, 2]), None), 0, None)
    assert state.rows.tolist() == [1, -1, 2, -1, 0, -1] and state.models == "new"
    assert float(info["taught"]) == 1  # client 2


def test_a_client_is_taught_by_the_candidate_that_is_most_similar_to_its_own_network(federation, monkeypatch):
    """The cohort is (4, 0, 2). The spy's logits are the number of the candidate and the mean of the client's images."""
    known = federation("thin")
    problem, strategy = known.problem, pfedhr.build(Hyper(**QUICK), known.problem)
    reassembler = with_spy(problem, Hyper(**QUICK))

    def logits(chain, samples):
        means = np.asarray(samples.x).mean(axis=(1, 2, 3))
        return np.stack([np.full(len(means), chain[0].variables["number"][0]), means, 0 * means], axis=1)

    reassembler.programs = Spy(logits=logits)
    chosen = [(Piece(None, {"number": np.full(size, number, np.float32)}),) for number, size in ((0, 5), (1, 7))]
    table = np.array([[0.1, 0.9], [0.8, -0.9], [-0.4, -0.5]])
    result = pfedhr.Reassembly([], np.zeros(0), np.zeros((0, 0)), [(), ()], chosen, table, {})
    monkeypatch.setattr(reassembler, "reassemble", lambda networks, sources, key: result)
    monkeypatch.setattr(pfedhr, "client_blocks", lambda model, variables, owner: owner)
    rows = np.array([1, -1, 2, -1, 0, -1])
    start = pfedhr.State(rows, np.zeros((3, 1)), np.full((6, problem.local.max_size, 3), -1.0), np.full(6, 9))
    state, info = reassembler.teach(start, None, known.client)
    assert info["clients"].tolist() == [4, 0, 2] and info["teachers"].tolist() == [1, 0, 0]
    assert state.teacher_size.tolist() == [5, 0, 5, 0, 7, 0]  # parameters; the teachers of other clients are gone
    for client, number in ((4, 1), (0, 0), (2, 0)):
        index, offsets = np.asarray(known.federation.index), known.federation.offsets
        images = known.federation.samples.x[index[offsets[client] : offsets[client + 1]]]
        expected = images.mean(axis=(1, 2, 3))
        np.testing.assert_allclose(state.teaching[client, : len(images), 0], number)
        np.testing.assert_allclose(state.teaching[client, : len(images), 1], expected, rtol=1e-5)
    np.testing.assert_array_equal(state.teaching[1], -1.0)
    payload = strategy.dispatch(state, Cohort(np.array([2, 3, 0]), np.ones(3)), None)
    assert payload["taught"].tolist() == [True, False, True] and payload["paused"].tolist() == [False, True, False]
    np.testing.assert_array_equal(payload["teaching"][0], state.teaching[2])
    reassembler.hyper = dataclasses.replace(reassembler.hyper, teachers="latest")
    assert reassembler.teach(start, None, known.client)[0].teacher_size.tolist() == [5, 9, 5, 9, 7, 9]


@pytest.mark.parametrize("paused, trained", [("keep", [10, 10]), ("restart", [7, 10])])
def test_a_paused_client_goes_on_or_starts_anew(federation, monkeypatch, paused, trained):
    """Its first network is drawn from the key of its number, and is 7; its last network is 10."""
    problem = federation("thin").problem
    strategy = pfedhr.build(Hyper(paused=paused, **QUICK), problem)
    own = jax.random.key_data(jax.random.fold_in(jax.random.key(5), 2))

    def init(self, key, architecture=0):
        return {"w": jnp.where(jnp.all(jax.random.key_data(key) == own), 7.0, -1.0)}

    monkeypatch.setattr(type(problem.model), "init", init)
    monkeypatch.setattr(pfedhr.local, "train", lambda model, setting, start, *own, loss: (start, own))
    memory = strategy.init_memory(jax.random.key(5), 2)
    assert float(memory.model["w"]) == 7
    memory = memory._replace(model={"w": jnp.float32(10)})
    for is_paused, expected in zip((True, False), trained, strict=True):
        payload = {"taught": jnp.array(True), "teaching": None, "paused": jnp.array(is_paused)}
        upload, new, used = strategy.client_update(payload, memory, "data", 0, "key")
        assert float(upload["model"]["w"]) == float(new.model["w"]) == expected and used == ("data", "key")
        assert strategy.personal_model((), new, None, None) is new.model


def test_without_labels_two_views_of_each_sample_are_contrasted(federation, monkeypatch):
    """The options are the same objects in every round, because compiled programs are found by them."""
    problem = federation("thin").problem
    monkeypatch.setattr(pfedhr.contrastive, "nt_xent", lambda logits, mask, *, temperature: (logits, mask, temperature))
    tuning = (reassembler := pfedhr.Reassembler(Hyper(public="unlabelled", temperature=0.7), problem)).tuning
    assert tuning["loss"]("logits", "labels", "mask") == ("logits", "mask", 0.7)
    assert tuning["views"].func is pfedhr.contrastive.view
    assert tuning["views"].keywords == {"low": np.min(problem.public.x), "high": np.max(problem.public.x)}
    assert reassembler.tuning is tuning
    assert pfedhr._range(np.array([3, 9], np.uint8)) == {"low": 0, "high": 255}


def test_similarity_of_logits_is_the_mean_cosine_of_their_rows():
    """Of 0 and 45 degrees; lengths do not matter."""
    a, b = np.array([[1.0, 0], [2, 2]]), np.array([[3.0, 0], [0, 0.5]])
    assert pfedhr.cosines(a, b) == pytest.approx((1 + 0.5**0.5) / 2)


@pytest.mark.slow
def test_without_weight_it_is_local_only(engine, close):
    alone, reassembled = engine("local", "thin"), engine("pfedhr", hyper=UNWEIGHTED)
    expected, _ = alone.run(alone.init(), 2)
    progress, _ = reassembled.run(reassembled.init(), 2)
    assert np.asarray(progress.server.teacher_size).any()
    close(progress.memory.model, expected.memory.model)


@pytest.mark.parametrize("weight", [0.7, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_client_learns_labels_and_teacher(transcription, weight):
    """Cross-entropy + lambda KL(teacher || student), beside PyTorch; a client without teacher learns labels only."""
    ours = transcription("pfedhr", Hyper(distillation_weight=weight, **QUICK))
    torch, server = ours.torch, ours.progress.server
    teaching = np.random.default_rng(0).normal(size=server.teaching.shape).astype(np.float32)
    constants = np.array([True, True, True, False])
    server = server._replace(teaching=jnp.asarray(teaching), teacher_size=jnp.asarray(constants.astype(np.int32)))
    ours.progress = ours.progress._replace(server=server)
    starts = ours.progress.memory.model
    before = [ours.read(trees.take(starts, client)) for client in range(4)]
    (clients,) = ours.rounds(1)

    def loss(weights, client):
        logits = ours.head(weights, ours.features(weights, ours.x[client]))
        teacher = torch.softmax(torch.tensor(teaching[client, : len(logits)], dtype=torch.float64), dim=1)
        far = torch.nn.functional.kl_div(torch.log_softmax(logits, dim=1), teacher, reduction="batchmean")
        return torch.nn.functional.cross_entropy(logits, ours.y[client]) + weight * constants[client] * far

    assert 3 in clients and len(clients) == 3
    for client in clients:
        expected = ours.train(before[client], client, loss=lambda weights, client=client: loss(weights, client))
        ours.check(trees.take(ours.progress.memory.model, client), expected)


def test_the_server_changes_no_clients_network(taught):
    _, rounds = taught
    for progress, report in rounds:
        server = progress.server
        for row, client in enumerate(report.info["clients"]):
            kept = jax.tree.map(lambda leaf, client=client: leaf[client], progress.memory.model)
            jax.tree.map(
                np.testing.assert_array_equal, kept, jax.tree.map(lambda leaf, row=row: leaf[row], server.models)
            )


def test_teachers_are_for_the_clients_of_the_round(taught):
    _, rounds = taught
    for progress, report in rounds:
        matched = report.info["teachers"] >= 0
        assert set(np.flatnonzero(progress.server.teacher_size)) == set(report.info["clients"][matched])
        assert (progress.server.teacher_size >= 0).all()
    (first, before), (_, report) = rounds
    both = set(before.info["clients"]) & set(report.info["clients"])
    assert int(report.info["taught"]) == len([client for client in both if first.server.teacher_size[client]])


def test_the_teachers_logits_are_those_of_the_matched_candidate(taught, reassembler, key, data_of):
    """Made once more with the same key: the candidate of the highest mean cosine, on the client's own samples."""
    one, rounds = taught
    progress, report = rounds[0]
    server = progress.server
    new, reported = reassembler.teach(server, key, data_of)
    models = server.models
    networks = [
        pfedhr.client_blocks(
            one.constants.problem.model, jax.tree.map(lambda leaf, row=row: leaf[row], models), owner=row
        )
        for row in range(3)
    ]
    result = reassembler.reassemble(networks, networks, key)
    assert (
        result.logit_similarity.shape == (3, len(result.chains)) and (np.abs(result.logit_similarity) <= 1 + 1e-6).all()
    )
    assert set(result.seconds) >= {"grouping", "matching"} and len(set(result.groups)) == 2
    for row, client in enumerate(report.info["clients"]):
        best = result.logit_similarity[row].argmax()
        assert reported["teachers"][row] == best
        data = data_of(client)
        rows = data.index[data.offset :][: data.size]
        own = jax.device_put(one.constants.problem.public)._replace(x=data.samples.x[rows], y=None)
        logits = reassembler.programs.logits(result.chains[best], own)
        np.testing.assert_allclose(new.teaching[client, : len(rows)], logits, rtol=1e-5, atol=1e-6)


def test_candidates_are_of_blocks_of_the_round(taught):
    _, rounds = taught
    for _, report in rounds:
        reported = report.info
        assert set(reported["owners"]) <= set(reported["clients"].tolist())
        assert (reported["groups"] >= 0).all() and (reported["similarity"] >= 0).all()
        assert reported["candidates"] == len(reported["chains"])
        for chain in reported["chains"]:
            chosen = chain[chain >= 0]
            assert (np.diff(reported["places"][chosen]) > 0).all() and (np.diff(reported["kinds"][chosen]) >= 0).all()
    assert any(report.info["candidates"] for _, report in rounds)


def test_accuracy_and_confidence_of_a_teacher():
    logits = np.log([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4], [0.25, 0.25, 0.5]]) + np.array([[3.0], [-500.0], [800.0]])
    accuracy, confidence = pfedhr.accuracy_and_confidence(logits, np.array([0, 1, 0]))
    assert accuracy == pytest.approx(2 / 3) and confidence == pytest.approx((0.7 + 0.5 + 0.5) / 3)


def test_how_well_the_teachers_know_their_pupils_samples(taught):
    """From the clients' own rows of the federation; no number where there is no candidate."""
    one, rounds = taught
    data = jax.tree.map(np.asarray, one.constants.federation)
    for progress, report in rounds:
        expected = []
        for client in report.info["clients"]:
            own = data.index[data.offsets[client] : data.offsets[client + 1]]
            chances = np.exp(progress.server.teaching[client, : len(own)].astype(np.float64))
            chances /= chances.sum(axis=1, keepdims=True)
            expected.append([np.mean(chances.argmax(axis=1) == data.samples.y[own]), np.mean(chances.max(axis=1))])
        reported = [report.info["teacher_accuracy"], report.info["teacher_confidence"]]
        has_teachers = len(report.info["chains"]) > 0
        np.testing.assert_allclose(reported, np.mean(expected, axis=0) if has_teachers else [np.nan, np.nan], rtol=1e-5)
    assert any(len(report.info["chains"]) for _, report in rounds)


def test_one_warning_of_teachers_near_chance(federation, caplog):
    problem = federation("thin").problem  # three classes
    reassembler = pfedhr.Reassembler(Hyper(), problem)
    for round, accuracy in ((5, 0.1), (6, 0.5), (7, np.nan), (8, 0.4), (9, 0.4)):
        reassembler.warn_if_near_chance(round, accuracy)
    pfedhr.Reassembler(Hyper(public="unlabelled"), problem).warn_if_near_chance(9, 0.1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "in round 8" in line and "40.0 %" in line and "33.3 %" in line and "\n" not in line


@pytest.mark.slow
def test_paused_clients_start_anew_if_asked(transcription):
    """Beside PyTorch: from the first network unless the client took part in the round before; tested is the last."""
    ours = transcription("pfedhr", Hyper(paused="restart", distillation_weight=0.0, **QUICK))
    starts = jax.tree.map(np.array, ours.progress.memory.model)
    before, latest, restarted = set(), {}, 0
    for clients in ours.rounds(5):
        for client in clients:
            goes_on = client in before
            restarted += client in latest and not goes_on
            first = latest[client] if goes_on else ours.read(trees.take(starts, client))
            latest[client] = ours.train(first, client)
            ours.check(trees.take(ours.progress.memory.model, client), latest[client])
        before = set(clients)
    assert restarted


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_a_restart_from_the_hosts_memory_and_from_a_checkpoint(engine, network, tmp_path):
    hyper = Hyper(paused="restart", distillation_weight=0.0, **QUICK)
    memories = []
    for on_host in (False, True):
        one = engine("pfedhr", network, hyper=hyper, memory_on_host=on_host)
        progress, _ = one.run(one.init(), 1)
        checkpoints = Checkpoints(tmp_path / str(on_host))
        template = one.shapes(kept=len(progress.memory) if on_host else None)
        checkpoints.save(1, progress, {})
        straight, _ = one.run(progress, 2)
        resumed, _ = one.run(one.place(checkpoints.restore(template)[0]), 2)
        jax.tree.map(np.testing.assert_array_equal, straight.memory, resumed.memory)
        memories.append(jax.tree.map(np.array, rows_of(straight.memory, np.arange(one.stacks[1]))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *memories)


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_the_first_network_is_the_one_that_memory_starts_with(engine, close, network):
    kept, restarted = (
        engine("pfedhr", network, hyper=Hyper(paused=each, distillation_weight=0.0, **QUICK))
        for each in ("keep", "restart")
    )
    assert kept.init().memory.start is None
    (ours, _), (theirs, _) = kept.run(kept.init(), 1), restarted.run(restarted.init(), 1)
    close(ours.memory.model, theirs.memory.model)


def test_programs_are_kept_over_the_rounds(taught, reassembler, key, data_of):
    """The reassembly of the first round, repeated after the second, compiles nothing."""
    _, rounds = taught
    traces = reassembler.programs.traces
    reassembler.teach(rounds[0][0].server, key, data_of)
    assert reassembler.programs.traces == traces


def test_traffic_counts_networks(taught):
    one, rounds = taught
    problem = one.constants.problem
    sizes = problem.model.num_bytes()[np.asarray(problem.architectures)]
    first = rounds[0][0].server
    (down, up, peer) = np.sum([report.traffic.num_bytes() for _, report in rounds], axis=0)
    assert up == sum(int(sizes[client]) for _, report in rounds for client in report.info["clients"]) > 0
    assert down == sum(4 * int(first.teacher_size[client]) for client in rounds[-1][1].info["clients"])
    assert peer == 0


def test_the_latest_teachers_stay(taught, reassembler, key, data_of):
    """The teachers of a round are assigned again after all clients had one; the others keep theirs."""
    _, rounds = taught
    progress, report = next(each for each in rounds if each[1].info["candidates"])
    latest = copy.copy(reassembler)
    latest.hyper = dataclasses.replace(reassembler.hyper, teachers="latest")
    before = progress.server._replace(teacher_size=np.full(6, 7, np.int32))
    new, _ = latest.teach(before, key, data_of)
    others = np.setdiff1d(np.arange(6), report.info["clients"])
    assert np.flatnonzero(np.asarray(new.teacher_size) == 7).tolist() == others.tolist()
    assert np.all(np.asarray(new.teacher_size) > 0)
    np.testing.assert_array_equal(np.asarray(new.teaching)[others], before.teaching[others])


@pytest.mark.slow
def test_the_latest_teachers_stay_in_the_engine(engine):
    one = engine("pfedhr", hyper=UNWEIGHTED)
    progress, seen = one.init(), set()
    for _ in range(2):
        progress, report = one.run(progress, 1)
        seen |= set(report.info["clients"].tolist())
        assert set(np.flatnonzero(np.asarray(progress.server.teacher_size))) == seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(public="unlabelled", distillation="raw"),
        dict(grouping="means", search="random", paused="restart", average=True, finetune="stitches", stitch="flat"),
    ],
    ids=["without labels", "as the authors"],
)
def test_the_other_options_train(engine, options):
    one = engine("pfedhr", hyper=Hyper(**(QUICK | options)))
    progress, report = one.run(one.init(), 2)
    assert np.isfinite(float(report.train_loss))
    assert np.asarray(progress.server.teacher_size).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(progress.memory))


def test_networks_of_one_architecture_are_averaged():
    models = {"params": {"vector": np.arange(8.0).reshape(4, 2)}, "architecture": np.array([1, 0, 1, 1])}
    (first, zero), (second, one) = pfedhr.averaged(models, models["architecture"])
    assert (first, second) == (1, 0)
    np.testing.assert_array_equal(zero["params"]["vector"], [2, 3])
    np.testing.assert_array_equal(one["params"]["vector"], np.mean([[0, 1], [4, 5], [6, 7]], axis=0))
    assert (zero["architecture"], one["architecture"]) == (0, 1)


def test_the_public_data_it_needs(federation):
    problem = federation("thin").problem
    with pytest.raises(UserError, match="public_share"):
        pfedhr.build(Hyper(), dataclasses.replace(problem, public=None))
    without = dataclasses.replace(problem, public=problem.public._replace(y=None))
    with pytest.raises(UserError, match="no labels"):
        pfedhr.build(Hyper(), without)
    pfedhr.build(Hyper(public="unlabelled"), without)
