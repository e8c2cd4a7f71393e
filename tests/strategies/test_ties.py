"""TIES-Merging by hand, and task arithmetic."""

import jax
import numpy as np
import pytest

from fedjax_mr.strategies import fedavg, ties
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.ties import TIES, TaskArithmetic
from fedjax_mr.testing.federations import first_cohort


def merged_by_hand(changes, kept):
    """The released code's rule, number by number."""
    count = len(changes[0])
    rank = max(count - int(count * kept), 1)  # the rank, from 1, of the smallest absolute value that stays
    trimmed = [[v if abs(v) >= sorted(map(abs, row))[rank - 1] else 0.0 for v in row] for row in changes]
    sums = [sum(column) for column in zip(*trimmed, strict=True)]
    signs = [float(np.sign(each)) for each in sums]
    signs = [sign or float(np.sign(sum(signs))) for sign in signs]
    out = []
    for sign, column in zip(signs, zip(*trimmed, strict=True), strict=True):
        agree = [v for v in column if (v > 0 if sign > 0 else v < 0)]
        out.append(sum(agree) / max(len(agree), 1))
    return out


merged = jax.jit(ties.merged, static_argnums=1)


@pytest.mark.parametrize("kept", [0.2, 0.5, 1.0])
def test_the_rule_is_that_of_the_code(kept):
    rng = np.random.default_rng(0)
    changes = rng.normal(size=(4, 23)).astype(np.float32)
    changes[:, 5] = [1, -1, 2, -2]  # a sum of zero
    found = merged(changes, kept)
    np.testing.assert_allclose(found, merged_by_hand(changes.tolist(), kept), rtol=1e-5, atol=1e-6)
    assert kept < 1 or float(found[5]) != 0


def test_it_keeps_the_largest_and_averages_what_agrees():
    changes = np.float32([[4, 1, -9, 0.1], [2, -8, -1, 0.1], [-3, 7, -3, 0.1]])
    # With half of four kept (three, as the code counts), the smallest of each row becomes zero.
    np.testing.assert_allclose(merged(changes, 0.5), [3.0, -8.0, -13 / 3, 0.0], rtol=1e-6)


def test_the_server_moves_by_the_scaled_change_over_all_tensors(federation):
    problem = federation("linear").problem
    strategy, cohort = ties.ties(TIES(kept=0.3, scale=0.8), problem), first_cohort(problem)
    start = jax.device_get(jax.jit(strategy.init)(jax.random.key(0)))
    rng = np.random.default_rng(0)
    models = jax.tree.map(lambda leaf: leaf + rng.normal(size=(3, *leaf.shape)).astype(np.float32), start.model)
    new, _ = jax.jit(lambda *sent: strategy.server_update(*sent, 0, None))(start, {"model": models}, cohort)
    flat = lambda model: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model)])
    changes = [(flat(jax.tree.map(lambda leaf, i=i: leaf[i], models)) - flat(start.model)).tolist() for i in range(3)]
    expected = flat(start.model) + 0.8 * np.array(merged_by_hand(changes, 0.3))
    np.testing.assert_allclose(flat(new.model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # quick: the server
def test_three_rounds_equal_the_equations(transcription):
    by_hand = transcription("ties", TIES(kept=0.3, scale=0.8))
    flat = lambda model: np.concatenate([leaf.numpy().ravel() for leaf in model])
    model = by_hand.read(by_hand.progress.server.model)
    for clients in by_hand.rounds(3):
        changes = [flat(by_hand.train(model, i)) - flat(model) for i in clients]
        change = 0.8 * np.array(merged_by_hand([each.tolist() for each in changes], 0.3))
        parts = np.split(change, np.cumsum([leaf.numel() for leaf in model])[:-1])
        model = [leaf + by_hand.torch.tensor(part).reshape(leaf.shape) for leaf, part in zip(model, parts, strict=True)]
        by_hand.check(by_hand.progress.server.model, model)
        model = by_hand.read(by_hand.progress.server.model)  # a float may fall on the other side of the threshold


def test_the_server_of_task_arithmetic_with_one_kth_is_that_of_fedavg(federation, close, sent_after):
    problem = federation("normed").problem
    ours = ties.taskarithmetic(TaskArithmetic(scale=1 / 3), problem)
    close(sent_after(ours, problem), sent_after(fedavg.build(fedavg.Hyper("uniform"), problem), problem))


@pytest.mark.slow  # quick: the server
def test_task_arithmetic_with_one_kth_is_fedavg(engine, close):
    ours, average = (
        engine("taskarithmetic", "normed", hyper=TaskArithmetic(scale=1 / 3)),
        engine("fedavg", "normed", hyper=fedavg.Hyper("uniform")),
    )
    close(ours.run(ours.init(), 2)[0].server.model, average.run(average.init(), 2)[0].server.model)


def test_a_late_client_is_left_out(engine):
    one = engine("taskarithmetic", "linear", hyper=TaskArithmetic(scale=1.0))
    state = jax.device_get(one.init()).server
    models = jax.tree.map(lambda leaf: np.stack([leaf + 1, leaf + 10, leaf + 2]), state.model)
    cohort = Cohort(np.arange(3, dtype=np.int32), np.int32([4, 0, 5]))
    new, _ = jax.jit(one.strategy.server_update)(state, {"model": models}, cohort, 0, None)
    for a, b in zip(*map(jax.tree.leaves, (new.model, state.model)), strict=True):
        np.testing.assert_allclose(a, b + 3, rtol=1e-5)
