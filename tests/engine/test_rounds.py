"""Several seeds in one program train as they do one by one."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from fedjax_mr.data import Split
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.round import Federation, RunConstants
from fedjax_mr.engine.rounds import Rounds, TrialRounds
from fedjax_mr.errors import UserError
from fedjax_mr.settings import bind
from fedjax_mr.strategies import STRATEGIES

SEEDS = 3


def divided(federation, network, seed):
    """Return a federation whose samples each seed divides among the clients in its own way."""
    one = federation(network, seed=seed)
    sizes = np.roll(np.asarray(one.problem.sizes), seed) + (seed == 1) * np.array([-1, -1, 3, 0, -1, 0])
    assert sizes.min() > 0 and sizes.max() == (15 if seed == 1 else 12)
    rows = np.random.default_rng(seed).permutation(one.federation.index)
    split = Split.of(np.split(rows, np.cumsum(sizes)[:-1]))
    labels = np.stack([np.bincount(one.federation.samples.y[split.rows(i)], minlength=3) for i in range(len(sizes))])
    problem = dataclasses.replace(
        one.problem,
        local=dataclasses.replace(one.problem.local, max_size=int(sizes.max())),
        sizes=jax.numpy.asarray(sizes, jax.numpy.int32),
        label_counts=jax.numpy.asarray(labels, jax.numpy.int32),
    )
    return RunConstants(one.build, problem, Federation(one.federation.samples, split.index, split.offsets), one.key)


def of(tree, seed):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[seed], tree)


@functools.cache
def engines(strategy, federation, devices, lanes, network="linear"):
    """Return the rounds of all seeds together, and a function that returns those of one; compiled once."""
    row = STRATEGIES[strategy]
    build = bind(row.build, row.hyper() if row.hyper else None)
    givens = [divided(federation, network, seed)._replace(build=build) for seed in range(SEEDS)]
    cohort = givens[0].problem.cohort_size
    alone = client_axis(devices=1, lanes=1, cohort_size=cohort)
    together = client_axis(devices=devices, lanes=lanes, cohort_size=SEEDS * cohort)
    largest = max(given.problem.local.max_size for given in givens)

    @functools.cache
    def one(seed):
        """The rounds of a seed; a larger bound on the clients' sizes changes nothing, and all seeds share a program."""
        problem = givens[seed].problem
        local = dataclasses.replace(problem.local, max_size=largest)
        given = givens[seed]._replace(problem=dataclasses.replace(problem, local=local))
        return Rounds(given, alone)

    return TrialRounds(givens, together), one


@pytest.mark.parametrize(
    ("strategy", "devices", "lanes"),
    [
        ("scaffold", 1, 4),
        pytest.param("fedmr", 2, 1, marks=pytest.mark.slow),
        pytest.param("fedmr", 1, 1, marks=pytest.mark.slow),
        pytest.param("scaffold", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_of_the_seeds_one_by_one(strategy, devices, lanes, federation, close):
    together, one = engines(strategy, federation, devices, lanes)
    progress, report = together.run(together.init(), 3)
    for seed in range(SEEDS):
        engine = one(seed)
        expected, its_report = engine.run(engine.init(), 3)
        close(of(progress, seed), expected)
        close(of(report, seed), its_report)
    assert {program.traces for program in together.programs.values()} == {1}


def test_a_seed_that_diverges_ends_the_call_and_then_no_longer_matters(federation, close):
    together, one = engines("scaffold", federation, 1, 4)
    progress = together.init()
    broken = jax.jit(lambda server: jax.tree.map(lambda leaf: leaf.at[1].set(np.nan), server))(progress.server)
    progress, report = together.run(progress._replace(server=broken), 3)
    assert int(progress.round[0]) == 1
    assert list(np.asarray(report.bad_client) >= 0) == [False, True, False]
    together.keep_running([True, False, True])
    progress, report = together.run(progress, 2)
    together.keep_running([True] * SEEDS)
    assert int(progress.round[0]) == 3
    assert int(report.steps[1]) == 0
    for seed in (0, 2):
        engine = one(seed)
        close(of(progress, seed), engine.run(engine.init(), 3)[0])


def test_what_cannot_be_batched(federation):
    with pytest.raises(UserError, match="works on the host between rounds"):
        engines("clusamp", federation, 1, 1)
    givens = [divided(federation, "linear", seed) for seed in range(2)]
    local = dataclasses.replace(givens[1].problem.local, momentum=None)
    givens[1] = givens[1]._replace(problem=dataclasses.replace(givens[1].problem, local=local))
    with pytest.raises(UserError, match="in all trials or in none"):
        TrialRounds(givens, client_axis(devices=1, lanes=1, cohort_size=6))
