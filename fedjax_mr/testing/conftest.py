"""Pytest's configuration for the contract in an installed package: option, fixtures, strict settings of JAX."""

import contextlib
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from fedjax_mr.config import imports
from fedjax_mr.engine.devices import LONG_TIMEOUTS, add_xla_flags, set_up_jax
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.federations import QUICK_TO_COMPILE, drop_programs, make_engine, tree_close, tree_equal

CHOSEN, ERROR = pytest.StashKey[list[str]](), pytest.StashKey[str | None]()


def pytest_addoption(parser):
    """Add ``--import``, unless the plugin ``fedjax_mr_pytest`` has added it (it loads before this folder is known)."""
    with contextlib.suppress(ValueError):
        parser.addoption(
            "--import", action="append", default=[], metavar="FILE", help="file that registers strategies; repeatable"
        )


def pytest_configure(config):
    """Apply the settings of this project's own test suite, and import the files with strategies."""
    config.addinivalue_line("markers", "slow: runs for more than about ten seconds")
    config.addinivalue_line("filterwarnings", "error")
    add_xla_flags(QUICK_TO_COMPILE | LONG_TIMEOUTS)
    set_up_jax(devices=2, cohort_size=2)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    requested = config.getoption("--import", [])
    try:
        imports.load(requested)
        chosen, error = imports.strategies(requested) if requested else list(STRATEGIES), None
        if not chosen:
            raise UserError(f"--import={','.join(requested)} registers no strategy")
    except UserError as reason:
        chosen, error = [], str(reason)
    config.stash[CHOSEN], config.stash[ERROR] = chosen, error


def pytest_generate_tests(metafunc):
    """Run the contract on the strategies that the imports register, or on all."""
    if "strategy" in metafunc.fixturenames:
        metafunc.parametrize("strategy", metafunc.config.stash[CHOSEN], scope="module")


def pytest_collection_modifyitems(config, items):
    """Exit with one line if an import failed. Earlier, pytest would print a traceback of its own code."""
    if config.stash[ERROR]:
        items.clear()
        pytest.exit(f"fedjax-mr: {config.stash[ERROR]}", returncode=2)


def pytest_runtest_teardown(item):
    """Keep the number of memory maps of a long session below the limit of a process."""
    drop_programs()


@pytest.fixture(scope="session")
def engine():
    """The function `federations.make_engine`."""
    return make_engine


@pytest.fixture(scope="session")
def equal():
    """Every leaf has the same bits."""
    return tree_equal


@pytest.fixture(scope="session")
def close():
    """Every leaf agrees to float tolerance."""
    return tree_close
