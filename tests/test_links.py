"""The contract of the channel, of all our strategies."""

import pytest

from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.links import LINKS
from fedjax_mr.testing.test_links import *  # noqa: F403

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)


def is_quick(strategy, link):
    """Whether the quick suite has a pair. Each pair compiles a program of its own, so it has one method for each link.

    Every link meets a method with a memory: SCAFFOLD, or FedDyn where SCAFFOLD is refused. Neutral settings have FedMR;
    tests/channel has FedMR, FedAvg and FedMe with most links.
    """
    if link not in LINKS:
        return strategy == "fedmr"
    return strategy == ("feddyn" if link in ("EF21", "median") else "scaffold")
