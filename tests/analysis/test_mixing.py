"""The maps of servers: exact for known ones, and their numbers."""

import dataclasses

import numpy as np
import pytest

from fedjax_mr.analysis import mixing
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES, dpsgd, fedavg, fedcross
from fedjax_mr.strategies.graphs import graph_of


@pytest.fixture(scope="module")
def found(engine):
    """(strategy, hyper, cohort) -> the maps of some rounds."""

    def make(name, hyper=None, cohort=6, draws=6):
        problem = dataclasses.replace(engine(name, "linear").constants.problem, cohort_size=cohort)
        row = STRATEGIES[name]
        hyper = hyper or (row.hyper and row.hyper())
        return mixing.maps(row.build(hyper, problem), problem, draws=draws)

    return make


def test_the_maps_of_known_methods_are_exact(found):
    np.testing.assert_allclose(found("fedavg", fedavg.Hyper("uniform")), 1 / 6, atol=1e-5)
    sizes = np.array([7, 12, 1, 5, 9, 4]) / 38
    np.testing.assert_allclose(found("fedavg"), np.broadcast_to(sizes, (6, 2, 6, 6)), atol=1e-5)
    np.testing.assert_allclose(found("indep"), np.broadcast_to(np.eye(6), (6, 2, 6, 6)), atol=1e-5)
    hyper = dpsgd.Hyper(graph="one_peer")
    weights = graph_of(hyper, 6, 6).weights
    expected = np.broadcast_to(weights[np.arange(6) % 3][:, None], (6, 2, 6, 6))
    np.testing.assert_allclose(found("dpsgd", hyper), expected, atol=1e-5)


def test_fedmr_permutes_each_tensor_and_averages_in_expectation(found):
    maps = found("fedmr", draws=300)
    assert np.all(np.isclose(maps, 0, atol=1e-5) | np.isclose(maps, 1, atol=1e-5))
    np.testing.assert_allclose(maps.sum(axis=2), 1, atol=1e-5)
    np.testing.assert_allclose(maps.sum(axis=3), 1, atol=1e-5)
    numbers = mixing.numbers_of(maps)
    assert numbers.each_round == pytest.approx(1, abs=1e-3) and numbers.expected < 0.15 and numbers.mean_moves < 1e-4


def test_numbers_of_a_ring_fedavg_and_fedcross(found):
    ring = mixing.numbers_of(found("dpsgd"))
    assert ring.expected == pytest.approx(2 / 3, abs=1e-4) == ring.each_round and ring.mean_moves < 1e-5
    average = mixing.numbers_of(found("fedavg"))
    assert average.expected < 1e-5 > average.each_round and average.mean_moves > 0.5
    cross = mixing.numbers_of(found("fedcross", fedcross.Hyper(alpha=0.9, selection="in_order")))
    assert 0.8 - 1e-5 <= cross.each_round < 1 and cross.mean_moves < 1e-5


def test_a_method_without_one_model_is_refused(found):
    with pytest.raises(UserError, match="receive one model and send one back"):
        found("hypcluster")


def test_the_command_prints_a_row_for_each_run(finished, capsys):
    assert main(["mixing", str(finished("fedmr")), str(finished("fedavg")), "--draws=3"]) == 0
    head, fedmr_row, fedavg_row = capsys.readouterr().out.strip().splitlines()
    assert head.split()[:2] == ["run", "method"]
    numbers = fedmr_row.split()
    assert numbers[1] == "fedmr" and float(numbers[3]) == pytest.approx(1, abs=1e-3) and float(numbers[6]) > 0
    assert fedavg_row.split()[1:4] == ["fedavg", "0.000", "0.000"] and fedavg_row.split()[6] == "-"
    assert main(["mixing", str(finished("fedmr")), "--draws=0"]) == 2
