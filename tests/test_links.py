"""The contract of the channel, of all our strategies."""

import pytest

from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.test_links import *  # noqa: F403

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)

# A link of the clients and one of the server with methods that have a memory, and a neutral link. tests/channel has the
# others with methods that suit them.
QUICK = {"top-k with error feedback": "scaffold", "median": "feddyn", "no attackers": "fedmr"}


def is_quick(strategy, link):
    """Whether the quick suite has a pair. Each pair compiles a program of its own."""
    return QUICK.get(link) == strategy
