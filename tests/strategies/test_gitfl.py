"""GitFL: merge, pull, push and the selection, by hand. tests/clock compares it with a plain event loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import Cohort, gitfl
from fedjax_mr.strategies.interface import History

BRANCHES = np.array([[3.0, 5.0], [-1.0, 0.5], [2.0, 2.0]], np.float32)


def built(federation, **hyper):
    return gitfl.build(gitfl.Hyper(**hyper), dataclasses.replace(federation().problem, cohort_size=1, in_flight=3))


def state_of(versions):
    return gitfl.State({"w": jnp.asarray(BRANCHES)}, jnp.asarray(versions, jnp.float32))


def cohort_of(branch):
    return Cohort(jnp.array([0]), jnp.array([4]), jnp.array([branch]))


@pytest.mark.parametrize("versions", [(0, 0, 0), (4, 4, 4)])
def test_with_equal_versions_a_branch_keeps_ten_of_eleven_parts(federation, versions):
    strategy, state = built(federation), state_of(versions)
    for branch in range(3):
        sent = strategy.dispatch(state, cohort_of(branch), None)["model"]["w"][0]
        np.testing.assert_allclose(sent, (10 * BRANCHES[branch] + BRANCHES.mean(0)) / 11, rtol=1e-6)


def test_merge_pull_and_push(federation):
    strategy, state = built(federation), state_of((1, 2, 90))
    master = (BRANCHES * np.array([[1], [2], [90]])).sum(0) / 93
    np.testing.assert_allclose(strategy.global_model(state)["w"], master, rtol=1e-5)
    for branch, keep in enumerate((2, 2, 50)):  # 10 + version - 31 within its bounds
        sent = strategy.dispatch(state, cohort_of(branch), None)["model"]["w"][0]
        np.testing.assert_allclose(sent, (keep * BRANCHES[branch] + master) / (keep + 1), rtol=1e-5)
    new, _ = strategy.server_update(state, {"model": {"w": jnp.array([[7.0, 8.0]])}}, cohort_of(1), 0, None)
    assert new.versions.tolist() == [1, 3, 90]
    np.testing.assert_array_equal(new.branches["w"], [BRANCHES[0], [7, 8], BRANCHES[2]])


def test_only_the_released_code_counts_branches_that_have_never_returned(federation):
    assert built(federation, variant="authors").init(jax.random.key(0)).versions.tolist() == [1, 1, 1]


def history(versions, time, starts=(0, 3, 8, 0), returned=()):
    seconds = np.array([100.0, 200.0, 500.0, 0.0])
    return History(time, np.array([0]), np.array(versions), np.array(starts), seconds, np.array(returned, int))


def test_rewards_by_hand():
    none, curiosity = np.zeros(4, bool), np.array([1, 1 / 2, 1 / 3, 1])
    reward = lambda ahead: np.maximum(1e-6, (np.array([100, 200, 500, 0]) - 200) / 5000 * ahead)
    weights = lambda selection, *known: gitfl.rewards(gitfl.Hyper(selection, 1000.0), history(*known), none, 0)
    np.testing.assert_allclose(weights("curiosity", (5, 2, 2), 500), curiosity)
    np.testing.assert_allclose(weights("versions", (5, 2, 2), 500), reward(2))  # ahead: slow clients
    np.testing.assert_allclose(weights("versions", (1, 4, 4), 500), reward(-2))  # behind: fast clients
    np.testing.assert_allclose(weights("both", (5, 2, 2), 99), curiosity)
    assert weights("both", (5, 2, 2), 100)[2] < 0.2 < curiosity[2], "the exploration ends at a tenth of the budget"
    ahead = (np.array([100, 200, 500, 0]) - 200) / 5000 * 2
    np.testing.assert_allclose(weights("both", (5, 2, 2), 500), np.maximum(1e-6, curiosity / 4 + 3 / 4 * ahead))
    for later in (1000, 5000):  # from the end of the budget on, both have half of the weight
        np.testing.assert_allclose(weights("both", (5, 2, 2), later), np.maximum(1e-6, curiosity / 2 + ahead / 2))
    np.testing.assert_array_equal(weights("random", (5, 2, 2), 500), 1)


def test_clients_are_drawn_by_their_rewards_and_busy_ones_never(federation):
    busy = np.array([False, True, False, False])
    drawn = lambda count, **hyper: np.bincount(
        [
            built(federation, **hyper).choose(history((1, 1, 1), 0.0, returned=[3]), busy, jax.random.key(n))[0]
            for n in range(count)
        ],
        minlength=4,
    )
    counts = drawn(300)
    shares = np.array([1, 0, 1 / 3, 1]) / (7 / 3)
    assert np.all(np.abs(counts / 300 - shares) < 4 * np.sqrt(shares * (1 - shares) / 300) + 1e-9)
    assert drawn(30, variant="authors")[3] == 0  # it has just returned
    busy[:3] = True
    assert drawn(3, variant="authors").tolist() == [0, 0, 0, 3]  # but no other is free


def test_several_branches_draw_different_clients(federation):
    known = history((1, 1, 1), 0.0)._replace(branches=np.array([0, 1, 2]))
    chosen = built(federation).choose(known, np.array([False, True, False, False]), jax.random.key(1))
    assert sorted(chosen) == [0, 2, 3]
