"""What pytest needs to run the contract from an installed package: its option, its fixtures, a strict world."""

import contextlib
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from fedjax_mr.engine.devices import PATIENT, add_xla_flags, set_up_jax
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import imports
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.federations import QUICK_TO_COMPILE, drop_programs, make_engine, tree_close, tree_equal

CHOSEN, ERROR = pytest.StashKey[list[str]](), pytest.StashKey[str | None]()


def pytest_addoption(parser):
    """Add ``--import``, unless the plugin that finds it before this folder is known has done so (fedjax_mr_pytest)."""
    with contextlib.suppress(ValueError):
        parser.addoption("--import", action="append", default=[], metavar="FILE", help="files that register strategies")


def pytest_configure(config):
    """Register what our own settings of pytest have, and see what the imports register."""
    config.addinivalue_line("markers", "slow: runs for more than about ten seconds")
    config.addinivalue_line("filterwarnings", "error")
    add_xla_flags(QUICK_TO_COMPILE | PATIENT)
    set_up_jax(devices=2, cohort_size=2)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    given = config.getoption("--import", [])
    try:
        imports.load(given)
        chosen, error = imports.strategies(given) if given else list(STRATEGIES), None
        if not chosen:
            raise UserError(f"--import={','.join(given)} registers no strategy")
    except UserError as reason:
        chosen, error = [], str(reason)
    config.stash[CHOSEN], config.stash[ERROR] = chosen, error


def pytest_generate_tests(metafunc):
    """Run the contract over the strategies that the imports register, or over all."""
    if "strategy" in metafunc.fixturenames:
        metafunc.parametrize("strategy", metafunc.config.stash[CHOSEN], scope="module")


def pytest_collection_modifyitems(config, items):
    """Leave with one line if the imports failed; before, pytest would show where its own code was."""
    if config.stash[ERROR]:
        items.clear()
        pytest.exit(f"fedjax-mr: {config.stash[ERROR]}", returncode=2)


def pytest_runtest_teardown(item):
    """Keep a long session within the memory maps of a process."""
    drop_programs()


@pytest.fixture(scope="session")
def engine():
    """Return `federations.make_engine`."""
    return make_engine


@pytest.fixture(scope="session")
def equal():
    """Every leaf has the same bits."""
    return tree_equal


@pytest.fixture(scope="session")
def close():
    """Every leaf agrees to float tolerance."""
    return tree_close
