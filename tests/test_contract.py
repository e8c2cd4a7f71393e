"""The contract of `fedjax_mr.testing`, of all our strategies."""

import pytest

from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.test_contract import *  # noqa: F403

# By the module, so that all tests of one strategy follow each other and share its compiled programs.
pytestmark = pytest.mark.parametrize("strategy", STRATEGIES, scope="module")
