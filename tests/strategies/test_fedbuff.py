"""FedBuff's server step. tests/clock compares it with a plain event loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import Cohort, fedbuff
from fedjax_mr.strategies.parts import GlobalModel


@pytest.mark.parametrize("divide_by", ["buffer", "weights"])
def test_the_step_is_the_weighted_mean_of_the_changes(federation, divide_by):
    fresh, changes = np.array([1.0, 0.5, 0.25]), np.array([[3.0, 5.0], [-1.0, 0.5], [2.0, 2.0]])
    old = np.array([1.0, -2.0])
    strategy = fedbuff.build(fedbuff.Hyper(0.7, divide_by), federation().problem)
    uploads = {"params": {"w": jnp.asarray(old + fresh[:, None] * changes, jnp.float32)}}
    cohort = Cohort(jnp.arange(3), jnp.array([4, 1, 9]), None, jnp.asarray(fresh, jnp.float32))
    start = GlobalModel({"params": {"w": jnp.asarray(old, jnp.float32)}})
    state, _ = strategy.server_update(start, {"model": uploads}, cohort, 0, None)
    divisor = 3 if divide_by == "buffer" else fresh.sum()
    expected = old + 0.7 * (fresh[:, None] * changes).sum(0) / divisor
    np.testing.assert_allclose(state.model["params"]["w"], expected, rtol=1e-6)


@pytest.mark.slow
def test_with_learning_rate_one_and_equal_sizes_it_is_fedavg(engine, close):
    options = {"network": "linear", "sizes": (6,) * 6}
    buffered, average = engine("fedbuff", **options), engine("fedavg", **options)
    close(buffered.run(buffered.init(), 2)[0].server.model, average.run(average.init(), 2)[0].server.model)


def test_by_hand_each_of_two_clients_counts_one_half_whatever_its_samples(tiny):
    """Changes 4 and 8 with weights 1 and 1/2: (4 + 4) / 2, or / 1.5; half of it from 10."""
    model, uploads = {"params": {"w": jnp.array(10.0)}}, {"params": {"w": jnp.array([14.0, 14.0])}}
    cohort = Cohort(jnp.array([2, 1]), jnp.array([1, 3]), None, jnp.array([1.0, 0.5]))
    for divide_by, expected in (("buffer", 10 + 0.5 * 8 / 2), ("weights", 10 + 0.5 * 8 / 1.5)):
        strategy = fedbuff.build(fedbuff.Hyper(0.5, divide_by), tiny.problem())
        state, _ = strategy.server_update(GlobalModel(model), {"model": uploads}, cohort, 0, None)
        assert float(state.model["params"]["w"]) == pytest.approx(expected)
    assert strategy.stale == "rebased"  # uploads are w + s(tau) D
