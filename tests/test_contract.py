"""The contract of `fedjax_mr.testing`, of all our strategies.

Two devices with two lanes need three more programs of each strategy, a third of the contract's time. The engine moves
the rows of all strategies by the same code, and treats a strategy by the members that it has. So the quick suite has
these layouts for one strategy of each kind of members (`OF_EACH_KIND`), and the slow suite for the others. Methods for
adapters are slow as a whole; their identities are quick (strategies/test_lora.py).
"""

import pytest

from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing import test_contract
from fedjax_mr.testing.test_contract import *  # noqa: F403

OF_EACH_KIND = (
    "fedmr",  # several models
    "scaffold",  # memory
    "indep",  # individual models
    "adaptivefl",  # the same and a selection of its own, clients of several sizes
    "clusamp",  # a selection of its own, work between rounds
    "centralized",  # a selection of its own
    "hypcluster",  # personal models from the whole state
    "fedmerge",  # personal models from a part of the state
    "pfedme",  # memory, personal models from the whole state, local steps of its own
    "pfedbayes",  # memory, personal models from a part of the state, local steps of its own
    "fedme",  # personal models, work between rounds
    "pfedhr",  # memory, personal models, work between rounds
)
WITH_LAYOUTS = (
    test_contract.test_the_layout_changes_nothing,
    test_contract.test_traffic_equals_the_bytes_of_what_is_sent,
    test_contract.test_the_client_part_holds_no_collective,
)


def pytest_generate_tests(metafunc):
    of_each_kind = OF_EACH_KIND if metafunc.function in WITH_LAYOUTS else STRATEGIES
    names = [
        pytest.param(name, marks=[] if name in of_each_kind and not row.adapters else pytest.mark.slow)
        for name, row in STRATEGIES.items()
    ]
    # By the module, so that all tests of one strategy follow each other and share its compiled programs.
    metafunc.parametrize("strategy", names, scope="module")
