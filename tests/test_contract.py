"""The contract of `fedjax_mr.testing`, of all our strategies."""

import pytest

from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.test_contract import *  # noqa: F403

# By the module, so that all tests of one strategy follow each other and share its compiled programs.
SLOW = [name for name, row in STRATEGIES.items() if row.adapters]  # their identities are quick: strategies/test_lora.py
pytestmark = pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in STRATEGIES],
    scope="module",
)
