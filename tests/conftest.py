"""The strict world in which every test runs: two CPU devices, no silent promotion, real data only on request."""

import gc
import itertools
import os
import re
import shutil
import tempfile
import types
from pathlib import Path
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
# Some programs here sum across the devices of one process, which needs spare threads (see `set_up_jax`).
os.environ.setdefault("NPROC", "8")

import jax
import pytest
from xdist.scheduler import LoadScopeScheduling

from fedjax_mr import plots
from fedjax_mr.engine import program
from fedjax_mr.engine.devices import LONG_TIMEOUTS, add_xla_flags, set_up_jax
from fedjax_mr.experiment import experiment
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing.federations import (
    QUICK_TO_COMPILE,
    bytes_of_a_round,
    constants,
    drop_programs,
    lower_in_few_contexts,
    make_engine,
    tree_close,
    tree_equal,
)
from fedjax_mr.testing.threefry import leave_threefry_out_of_programs

pytest.register_assert_rewrite(
    "fedjax_mr.testing.test_contract", "fedjax_mr.testing.test_links", "fedjax_mr.testing.test_tasks"
)


def use_memory_for_files(folder=Path("/dev/shm")):
    """Keep the files of the tests in memory: on some disks, deleting one takes three milliseconds."""
    fits = folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 2**30
    if fits and not os.statvfs(folder).f_flag & os.ST_NOEXEC:  # some tests write a program and run it
        os.environ.setdefault("TMPDIR", str(folder))
        tempfile.tempdir = None  # tempfile then looks at TMPDIR again


if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit the environment of the process that starts them
    add_xla_flags(QUICK_TO_COMPILE | LONG_TIMEOUTS)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # there is a worker per core
    use_memory_for_files()
set_up_jax(devices=2, cohort_size=2)
leave_threefry_out_of_programs()
lower_in_few_contexts()
os.fsync = lambda descriptor: None  # no power fails here, and many small files would wait for the disk
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)  # 20 of 5,000 programs were found there
jax.config.update("jax_traceback_in_locations_limit", 0)  # programs without lines of their source compile faster
program.MAX_KEPT = 40  # more tests than usual run the same settings
# Drawing takes a third of a run this small. Tests that look at pictures use the fixture `pictures`.
NO_PICTURES = dict.fromkeys(("partition", "curves", "personal"), lambda *_, **__: None)
experiment.plots = types.SimpleNamespace(**NO_PICTURES)


class BySharedPrograms(LoadScopeScheduling):
    """Give tests that share compiled programs to one worker: those of a file, and in the contract of a strategy."""

    def _split_scope(self, nodeid):
        path, _, test = nodeid.partition("::")
        contract = path.endswith(("test_contract.py", "test_links.py", "tests/test_tasks.py"))
        strategies = [word for word in re.findall(r"\w+", test) if word in STRATEGIES] if contract else []
        return " ".join([path, *strategies])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the pairs of methods with links or tasks that the quick suite leaves out as slow."""
    for item in items:
        is_quick = getattr(item.module, "is_quick", None)
        if is_quick is not None:
            params = item.callspec.params
            if not is_quick(params["strategy"], params.get("link", params.get("kind"))):
                item.add_marker(pytest.mark.slow)


def pytest_xdist_make_scheduler(config, log):
    return BySharedPrograms(config, log)


LOST_WORKERS = []


def pytest_testnodedown(node, error):
    """Remember a worker that died: if all die before their first test, pytest-xdist just says "no tests ran"."""
    if error:
        LOST_WORKERS.append(f"{node.gateway.id} ({error})")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    gc.freeze()  # pytest collects garbage several times now
    if LOST_WORKERS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if LOST_WORKERS:
        terminalreporter.section("workers died", red=True)
        terminalreporter.line(f"Tests may be missing from this run. Lost: {', '.join(LOST_WORKERS)}")


# What is imported stays, and programs are millions of objects: the garbage collector shall look at them less often.
gc.freeze()
gc.set_threshold(50_000, 20, 50)
TESTS = itertools.count(1)


def pytest_runtest_teardown(item):
    """Look now and then how many memory maps this worker has, and drop the programs of the tests before if need be."""
    if next(TESTS) % 20 == 0:
        drop_programs()


@pytest.fixture(scope="session")
def pictures():
    """A context in which runs draw their pictures."""
    return lambda: mock.patch.object(experiment, "plots", plots)


@pytest.fixture(scope="session")
def engine():
    return make_engine


@pytest.fixture(scope="session")
def federation():
    return constants


@pytest.fixture(scope="session")
def sent():
    return bytes_of_a_round


@pytest.fixture(scope="session")
def equal():
    """Every leaf has the same bits."""
    return tree_equal


@pytest.fixture(scope="session")
def close():
    """Every leaf agrees to float tolerance."""
    return tree_close
