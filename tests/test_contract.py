"""The contract of `fedjax_mr.testing`, of all our strategies.

The quick suite has the contract of most strategies. The slow suite adds:

* the layouts, checkpoints and what servers read of most. Two devices with two lanes need three more programs of each
  strategy. The engine does all this for all strategies by the same code, so a few strategies that have all members
  between them (`OF_EACH_KIND`) suffice;
* BatchNorm's variances of methods that never extrapolate;
* strategies of a file that has several, except the first: they are variants of each other;
* the groups of `BY_EXAMPLE`, except one strategy of each: FedAvg with another training of the clients, or with
  other weights of late uploads. The facts of each of them are quick (tests/strategies);
* methods for adapters; their identities are quick (strategies/test_lora.py).
"""

import pytest

from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing import test_contract
from fedjax_mr.testing.test_contract import *  # noqa: F403

OF_EACH_KIND = (
    "fedmr",  # several models
    "scaffold",  # memory
    "indep",  # individual models
    "clusamp",  # a selection of its own, work between rounds
    "fedmerge",  # personal models from a part of the state
    "pfedhr",  # memory, personal models, work between rounds
)
BY_EXAMPLE = {"drift": "scaffold", "flatness": "fedsam", "asynchronous": "gitfl"}
FIRST_OF_EACH_FILE = {row.build.__module__: name for name, row in reversed(STRATEGIES.items())}
BY_KIND = (
    test_contract.test_the_layout_changes_nothing,
    test_contract.test_traffic_equals_the_bytes_of_what_is_sent,
    test_contract.test_the_client_part_holds_no_collective,
    test_contract.test_a_checkpoint_continues_bit_for_bit,
    test_contract.test_a_server_that_reads_label_counts_says_so,
)


def in_quick_suite(name, row, test):
    if row.adapters or BY_EXAMPLE.get(row.group, name) != name or FIRST_OF_EACH_FILE[row.build.__module__] != name:
        return False
    if test is test_contract.test_no_variance_of_batchnorm_becomes_negative:
        return row.contract.extrapolating is not None
    return name in OF_EACH_KIND or test not in BY_KIND


def pytest_generate_tests(metafunc):
    names = [
        pytest.param(name, marks=[] if in_quick_suite(name, row, metafunc.function) else pytest.mark.slow)
        for name, row in STRATEGIES.items()
    ]
    # By the module, so that all tests of one strategy follow each other and share its compiled programs.
    metafunc.parametrize("strategy", names, scope="module")
