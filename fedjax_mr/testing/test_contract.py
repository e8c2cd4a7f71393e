"""The contract: what every registered strategy must do.

It names no strategy: exceptions and special hyper-parameters are in the registry's rows (`strategies.Row`). Our own
quick suite leaves some strategies, and the tests with two devices of most, to the slow one (tests/test_contract.py).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.channel.base import upload_shapes
from fedjax_mr.channel.server import Server
from fedjax_mr.client import local
from fedjax_mr.engine import program
from fedjax_mr.engine.personal import part_of, personal_variables
from fedjax_mr.engine.program import Program
from fedjax_mr.engine.round import plan
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.settings import info, numbers_of
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.traffic import usual_traffic
from fedjax_mr.testing.federations import constants, default_hyper, simulator

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
# All quick tests use one federation, so that they share two programs of each strategy. It has BatchNorm, dropout and
# five of six clients in a round, which leaves empty slots on 2 x 2 lanes.
NORMED = {"network": "normed", "cohort": 5, "seed": 1}
LINEAR = {"network": "linear", "cohort": 6}  # convex; all clients in each round
THIN = {"network": "thin", "cohort": 3}  # with a convolution


def quick_and(*slow):
    """Parameters: the quick federation, and others that only the slow suite uses."""
    return [
        pytest.param(NORMED, id="normed"),
        *(pytest.param(each, id=each["network"], marks=pytest.mark.slow) for each in slow),
    ]


# Federation, devices and lanes. Each is compared with one device and one lane. The last layout has several lanes on one
# device, in a fused program.
LAYOUTS = [
    pytest.param(NORMED, 2, 2, id="normed-2-2"),
    pytest.param(LINEAR, 2, 2, id="linear-2-2", marks=pytest.mark.slow),
    *(
        pytest.param(THIN, *each, id=f"thin-{each[0]}-{each[1]}", marks=pytest.mark.slow)
        for each in [(2, 2), (2, 1), (1, 3)]
    ),
]


def run(engine, calls, *, start=None):
    """Run rounds in several calls. ``start``: an engine of another layout, whose compiled start is reused."""
    progress = engine.init() if start is None else engine.place(start.init())
    for count in calls:
        progress, report = engine.run(progress, count)
    return progress, report


@pytest.fixture
def results(monkeypatch):
    """The last result of each program."""
    results, call = {}, Program.__call__

    def recorded(program, *args):
        results[program] = call(program, *args)
        return results[program]

    monkeypatch.setattr(Program, "__call__", recorded)
    return results


@pytest.mark.parametrize("federation", quick_and(THIN))
def test_structure_shapes_and_dtypes_are_kept(engine, strategy, federation):
    engine = engine(strategy, **federation)
    before = engine.shapes()
    progress, _ = run(engine, [2])
    assert jax.tree.structure(before) == jax.tree.structure(progress)
    described = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
    assert described(before) == described(progress)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("federation", quick_and(THIN))
def test_any_division_into_calls_gives_the_same_bits_in_one_trace(engine, equal, strategy, federation, devices):
    engine = engine(strategy, devices=devices, **federation)
    whole, report = run(engine, [4])
    parts, last = run(engine, [1, 3])
    again, _ = run(engine, [1, 1, 1, 1])
    equal(whole, parts)
    equal(whole, again)
    of_the_last_round = lambda report: report._replace(images=0, steps=0, traffic=None)
    equal(of_the_last_round(report), of_the_last_round(last))
    assert {each.traces for each in engine.programs.values()} == {1}


@pytest.mark.parametrize("federation, devices, lanes", LAYOUTS)
def test_the_layout_changes_nothing(engine, close, strategy, federation, devices, lanes):
    """Clients, payloads and memories move together: one device and one lane give the same numbers as any layout.

    Tensors are compared by their norms: where a gradient is only rounding, an Adam on the server still takes steps of
    full length, so single numbers may differ.
    """
    alone, laid_out = engine(strategy, **federation), engine(strategy, devices=devices, lanes=lanes, **federation)
    one, report = run(alone, [3])
    other, other_report = run(laid_out, [3], start=alone)
    jax.tree.map(assert_close_as_a_whole, one, other)
    close(report, other_report)


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_other_numbers_seeds_and_partitions_train_in_the_same_program(engine, equal, strategy, alone):
    """Numbers are arguments: the learning rate, all numbers of the strategy, the seed, the sizes of the clients."""
    one, hyper = engine(strategy, **NORMED), default_hyper(strategy)
    other = NORMED | {"hyper": nudged(hyper), "lr": 0.03, "momentum": 0.4, "seed": 2, "sizes": (5, 4, 12, 1, 9, 7)}
    second = engine(strategy, **other)
    one.programs.clear()  # other tests may have filled `MAX_KEPT` since it took its own
    run(one, [1])
    trained, _ = run(second, [1])
    changed = [jax.tree.leaves((each.constants.build, each.constants.problem.local)) for each in (one, second)]
    assert all(float(a) != float(b) for a, b in zip(*changed, strict=True))
    assert second.programs["rounds"] is one.programs["rounds"] and one.programs["rounds"].traces == 1
    if alone:  # compiled for these numbers only
        program.forget()
        simulator.cache_clear()
        expected, _ = run(engine(strategy, **other), [1])
        equal(trained, expected)


def nudged(hyper):
    """Hyper-parameters with other values of all numbers, within their bounds."""
    changes = {}
    for each in numbers_of(hyper):
        value = getattr(hyper, each.name)
        known = info(each)
        allowed = known.allows if known else lambda value: True
        if value is not None:
            changes[each.name] = next(new for new in (0.75 * value, 1.1 * value, 0.05) if new != value and allowed(new))
    return dataclasses.replace(hyper, **changes) if changes else hyper


def assert_close_as_a_whole(a, b):
    a, b = (np.asarray(leaf, np.float64) for leaf in (a, b))
    size = lambda numbers: np.sqrt(np.mean(np.square(numbers)))
    assert size(a - b) <= 1e-4 * size(a) + 1e-5


@pytest.mark.slow  # one strategy is quick: engine/test_placement.py
@pytest.mark.parametrize("devices", [2, 1])
def test_memory_may_live_on_the_host(engine, equal, strategy, devices):
    kept = engine(strategy, devices=devices, lanes=2, memory_on_host=True, **THIN)
    if kept.strategy.init_memory is None:
        pytest.skip("clients have no memory")
    other = engine(strategy, devices=2, lanes=2, **THIN)  # in steps, as with memory on the host
    expected, _ = run(other, [3])
    progress, _ = run(kept, [2, 1])
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(progress.memory))
    progress = other.place(progress)  # adds the memories of clients that have not trained
    if devices == 2:
        equal(progress, expected)
    else:
        jax.tree.map(assert_close_as_a_whole, progress, expected)


def test_the_key_decides(engine, equal, strategy):
    ours, other = (engine(strategy, **NORMED | {"seed": seed}) for seed in (1, 3))
    (first, _), (second, _), (third, _) = run(ours, [2]), run(ours, [2]), run(other, [2], start=ours)
    equal(first, second)
    changed = jax.tree.map(lambda one, another: np.any(np.asarray(one) != np.asarray(another)), first, third)
    assert any(jax.tree.leaves(changed))


def test_a_checkpoint_continues_bit_for_bit(engine, equal, strategy, tmp_path):
    engine = engine(strategy, **NORMED)
    progress, _ = run(engine, [2])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, progress, {})
    straight, _ = engine.run(progress, 2)
    restored, _ = checkpoints.restore(engine.shapes())
    resumed, _ = engine.run(engine.place(restored), 2)
    equal(straight, resumed)


@pytest.mark.parametrize("federation", quick_and(LINEAR))
def test_the_loss_falls_on_an_easy_problem(engine, strategy, federation):
    """The deployed model is tested, because a strategy's own loss may have more terms than the cross-entropy."""
    engine = engine(strategy, **federation)
    problem, federated = engine.constants.problem, engine.constants.federation

    @jax.jit
    def personal_loss(progress):
        def on_its_own(client):
            data = engine.constants.client(client)
            memory = trees.take(progress.memory, client)
            part = part_of(engine.strategy, progress.server, client)
            model = personal_variables(engine.strategy, part, memory, data, engine.constants.key)
            return local.score(problem.model, model, data, batch_size=4).loss

        return jnp.sum(jax.lax.map(on_its_own, jnp.arange(problem.num_clients, dtype=jnp.int32)))

    def loss(progress):
        """The loss of the deployed model on all samples, or of the personal models on their clients' samples."""
        if engine.strategy.global_model:
            return deployed_loss(problem.model, engine.deployed(progress), federated.samples)
        return personal_loss(progress)

    before = loss(engine.init())
    progress, _ = run(engine, [1, 5, 5])
    assert float(loss(progress)) < 0.8 * float(before)


@functools.partial(jax.jit, static_argnames="model")  # one program for all strategies of one model
def deployed_loss(model, variables, samples):
    count = len(samples.y)
    return local.evaluate(model, variables, samples, jnp.ones(count), batch_size=count).loss


@pytest.mark.parametrize("extrapolating", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("federation", quick_and(THIN))
def test_no_variance_of_batchnorm_becomes_negative(engine, strategy, federation, extrapolating):
    """Only parameters may be extrapolated. Three methods failed here within eleven rounds when statistics were too."""
    hyper = STRATEGIES[strategy].contract.extrapolating if extrapolating else None
    if extrapolating and hyper is None:
        pytest.skip("no setting extrapolates")
    one = engine(strategy, hyper=hyper, **federation)
    progress = one.init()
    for _ in range(12):
        progress, report = one.run(progress, 1)
        for path, leaf in jax.tree_util.tree_leaves_with_path((progress.server, progress.memory)):
            if "['var']" in jax.tree_util.keystr(path):
                assert np.min(leaf) >= 0
        assert bool(trees.all_finite([one.deployed(progress), report.train_loss]))


def test_the_server_keeps_no_samples_of_the_clients(engine, strategy):
    """Checkpoints would write them to the disk."""
    engine = engine(strategy, **NORMED)
    progress, _ = run(engine, [1])
    kept = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(progress.server))
    assert not any(np.asarray(sample).tobytes() in kept for sample in engine.constants.federation.samples.x)


def test_a_server_that_reads_label_counts_says_so(engine, strategy):
    """Real clients report them only if the strategy's row has ``label_counts``."""
    problem, row = engine(strategy, **NORMED).constants.problem, STRATEGIES[strategy]
    built = row.build(default_hyper(strategy), problem)
    server = Server(built, problem, upload_shapes(built, problem))
    assert row.label_counts or not server.reads_of_problem("label_counts")


def test_traffic_equals_the_bytes_of_what_is_sent(engine, strategy, results):
    start, engine = engine(strategy, **NORMED), engine(strategy, devices=2, lanes=2, **NORMED)
    _, report = run(engine, [1], start=start)
    (_, rows), (uploads, _, _) = (results[engine.programs[name]] for name in ("begin", "clients"))
    count = engine.constants.problem.cohort_size
    sent = lambda tree: sum(count * leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(tree))  # without padding
    down, up = sent(rows.payload), sent(uploads)
    first = lambda tree: jax.tree.map(lambda leaf: leaf[:count], tree)
    assert usual_traffic(first(rows.payload), first(uploads)).num_bytes() == (down, up, 0)
    if engine.strategy.traffic is None:  # otherwise the strategy counts, and its own tests check how
        assert report.traffic.num_bytes() == (down, up, 0)


def test_the_client_part_holds_no_collective(engine, strategy):
    start, engine = engine(strategy, **NORMED), engine(strategy, devices=2, lanes=2, **NORMED)
    run(engine, [1], start=start)
    text = engine.programs.compiled("clients").as_text()
    assert [name for name in COLLECTIVES if name in text] == []


@functools.partial(jax.jit, static_argnames="axis")
def first_cohort(axis, constants, server):
    return plan(axis, constants, server, jnp.int32(0)).cohort


@pytest.mark.parametrize("federation", quick_and(LINEAR))
def test_a_client_of_one_sample_and_almost_all_clients_at_once_train(engine, strategy, federation):
    engine = engine(strategy, **federation)
    chosen, server = engine.constants, engine.init().server
    if engine.strategy.select is None:  # the engine selects: one program for all such strategies
        chosen, server = chosen._replace(build=constants("normed", cohort=5).build), None
    sizes = np.asarray(first_cohort(engine.axis, chosen, server).sizes)
    _, report = run(engine, [1])
    if not STRATEGIES[strategy].contract.own_batches:
        assert int(report.images) == 2 * sum(sizes)  # epochs x samples: every sample once per epoch
        assert int(report.steps) == 2 * sum(-(-sizes // 4))  # batches of 4; no step is spent on padding
    assert np.isfinite(float(report.train_loss))
    if engine.strategy.select is None:
        assert 1 in sizes and len(sizes) == federation["cohort"]
        if federation["cohort"] == 6:
            assert sorted(sizes) == sorted((7, 12, 1, 5, 9, 4))
