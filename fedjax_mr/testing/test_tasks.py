"""The contract of the tasks: every strategy trains every task, or refuses it in one line."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.testing.tasks import KINDS, refusal, simulator


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_is_trained_and_tested(equal, strategy, kind):
    """Two rounds have finite numbers, in one call or in two, and every metric of the task is a number."""
    if reason := refusal(strategy, kind):
        assert "\n" not in reason and len(reason) < 250
        pytest.skip(reason)
    made = simulator(strategy, kind)
    progress, report = made.run(made.init(), 2)
    parts, _ = made.run(made.run(made.init(), 1)[0], 1)
    equal(progress, parts)
    assert bool(trees.all_finite([progress.server, report.train_loss]))
    clients = made.personal(progress)
    assert np.isfinite(clients.loss).all()
    if made.rounds.strategy.global_model is not None:
        tested = made.test(progress)
        assert list(tested.metrics) == [metric.name for metric in made.model.task.metrics]
        assert all(np.isfinite(value).all() for value in (tested.loss, *jax.tree.leaves(tested.metrics)))
