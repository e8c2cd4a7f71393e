"""The contract of the channel: every link with every strategy, or a reason in one line."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.engine.round import begin, train_client
from fedjax_mr.testing.links import FEDERATION, LINKS, NEUTRAL, linked, refusal


@pytest.mark.parametrize("link", NEUTRAL)
def test_neutral_settings_change_no_bit(engine, equal, strategy, link):
    if reason := refusal(strategy, link):
        pytest.skip(reason)
    plain, with_link = engine(strategy, **FEDERATION), linked(strategy, link)
    expected, _ = plain.run(plain.init(), 2)
    progress, _ = with_link.run(with_link.init(), 2)
    equal(getattr(progress.server, "inner", progress.server), expected.server)
    equal(getattr(progress.memory, "inner", progress.memory), expected.memory)


@pytest.mark.parametrize("link", LINKS)
def test_a_link_trains_and_keeps_its_shapes(equal, strategy, link):
    if reason := refusal(strategy, link):
        assert "\n" not in reason and len(reason) < 250
        pytest.skip(reason)
    engine = linked(strategy, link)
    before = engine.shapes()
    progress, report = engine.run(engine.init(), 3)
    parts, _ = engine.run(engine.run(engine.init(), 1)[0], 2)
    equal(progress, parts)
    described = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
    assert described(before) == described(progress)
    assert bool(trees.all_finite([progress.server, report.train_loss]))
    if engine.strategy.traffic is None:
        assert_counted(engine)


def assert_counted(engine):
    """Uploads are messages of real arrays: their bytes are the traffic."""
    _, report = engine.run(engine.init(), 1)
    constants, progress = engine.constants, engine.init()

    def sent(constants, progress):
        _, rows = begin(engine.axis, constants, progress)
        return rows.payload, jax.lax.map(lambda row: train_client(constants, progress.round, row), rows)[0]

    down, up = (trees.num_bytes(tree) for tree in jax.eval_shape(sent, constants, progress))
    assert np.array_equal(report.traffic.num_bytes()[:2], (down, up))
