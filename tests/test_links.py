"""The contract of the channel, of all our strategies."""

import pytest

from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.test_links import *  # noqa: F403

# Each pair compiles a program of its own, so the quick suite has one method; tests/channel has more for each link.
QUICK = ("fedmr",)
pytestmark = pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in STRATEGIES]
)
