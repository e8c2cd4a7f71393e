"""FedBuff's server step. tests/clock compares it with a plain event loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import Cohort, fedbuff
from fedjax_mr.strategies.base import GlobalModel


@pytest.mark.parametrize("divide_by", ["buffer", "weights"])
def test_the_step_is_the_weighted_mean_of_the_changes(federation, divide_by):
    fresh, changes = np.array([1.0, 0.5, 0.25]), np.array([[3.0, 5.0], [-1.0, 0.5], [2.0, 2.0]])
    old = np.array([1.0, -2.0])
    strategy = fedbuff.build(fedbuff.Hyper(0.7, divide_by), federation().problem)
    uploads = {"params": {"w": jnp.asarray(old + fresh[:, None] * changes, jnp.float32)}}
    cohort = Cohort(jnp.arange(3), jnp.array([4, 4, 4]), None, jnp.asarray(fresh, jnp.float32))
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
