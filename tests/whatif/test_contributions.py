"""The rules of contributions on games whose answers are known."""

import itertools

import numpy as np
import pytest

from fedjax_mr.whatif.coalitions import by_slots, of_text, random_orders, sets_of, text
from fedjax_mr.whatif.contributions import contributions, from_orders, rank_correlation

NO_ORDERS = np.zeros((0, 3), int)


def game(value, count=3):
    """The values of all coalitions, with one seed."""
    every = (each for size in range(count + 1) for each in itertools.combinations(range(count), size))
    return {frozenset(each): np.array([float(value(frozenset(each)))]) for each in every}


def test_the_glove_game():
    """Clients 0 and 1 have a left glove and client 2 a right one; a pair is worth 1."""
    found = contributions(game(lambda each: 2 in each and len(each) > 1), 3, NO_ORDERS)
    np.testing.assert_allclose(found["shapley"], [[1 / 6, 1 / 6, 2 / 3]])
    np.testing.assert_allclose(found["banzhaf"], [[1 / 4, 1 / 4, 3 / 4]])
    np.testing.assert_allclose(found["leave_one_out"], [[0, 0, 1]])
    np.testing.assert_allclose(found["alone"], [[0, 0, 0]])


def test_all_orders_give_the_shapley_values():
    random = np.random.default_rng(0)
    values = game(lambda each: random.normal(), 4)
    every = np.array(list(itertools.permutations(range(4))))
    exact = contributions(values, 4, every)
    np.testing.assert_allclose(exact["orders"], exact["shapley"])


def test_strata_are_exact_if_gains_depend_on_the_place_alone():
    found = contributions(game(lambda each: len(each) ** 2), 3, random_orders(3, 1))
    np.testing.assert_allclose(found["stratified"], [[3, 3, 3]])
    assert sorted(found["orders"][0]) == [1, 3, 5]


def test_a_truncated_order_gives_nothing_to_the_clients_after_its_end():
    values = game(lambda each: {0: 0.0, 1: 0.8, 2: 0.97, 3: 1.0}[len(each)])
    order = np.array([[2, 0, 1]])
    np.testing.assert_allclose(from_orders(values, order), [[0.17, 0.03, 0.8]])
    np.testing.assert_allclose(from_orders(values, order, 0.05), [[0.17, 0.0, 0.8]])


def test_each_rule_needs_its_coalitions():
    everyone = game(len)
    some = {each: everyone[each] for each in sets_of("leave_one_out", 3, NO_ORDERS)}
    assert list(contributions(some, 3, NO_ORDERS)) == ["leave_one_out"]
    orders = random_orders(3, 2)
    some = {each: everyone[each] for each in sets_of("orders", 3, orders)}
    assert set(contributions(some, 3, orders)) >= {"orders", "truncated"}


def test_coalitions():
    sets = sets_of("leave_one_out", 3, NO_ORDERS)
    assert [text(each) for each in sets] == ["", "0 1", "0 2", "1 2", "0 1 2"]
    assert [of_text(text(each)) for each in sets] == sets
    assert len(sets_of("all", 5, NO_ORDERS)) == 32
    assert sets_of([(2, 0)], 3, NO_ORDERS) == [frozenset(), frozenset({0, 2}), frozenset({0, 1, 2})]
    pairs = [(0, each) for each in sets_of("all", 3, NO_ORDERS)]
    numbers = lambda vacant: {slots: len(each) for slots, each in by_slots(pairs, 2, vacant=vacant).items()}
    assert numbers(False) == {0: 1, 1: 3, 2: 4}
    assert numbers(True) == {0: 1, 2: 7}
    assert sorted(random_orders(5, 3)[2]) == list(range(5))


def test_rank_correlation():
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([10.0, 20, 40])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert rank_correlation(np.array([1.0, 1, 2, 3]), np.array([1.0, 2, 3, 3])) == pytest.approx(8 / 9)
    assert np.isnan(rank_correlation(np.ones(3), np.arange(3.0)))
