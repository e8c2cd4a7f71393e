"""The contract of the tasks, of all our strategies."""

import pytest

from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.test_tasks import *  # noqa: F403

pytestmark = pytest.mark.parametrize("strategy", STRATEGIES)

QUICK = {"regression": "fedmr", "segmentation": "scaffold", "language": "fedcross"}


def is_quick(strategy, kind):
    """Whether the quick suite has a pair. Each pair compiles programs of its own."""
    return QUICK.get(kind) == strategy
