"""The compilation cache saves time and never causes a failure; CPU cores that cannot be used cause a warning."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from fedjax_mr.engine import devices
from fedjax_mr.errors import UserError

ROOT = Path(__file__).parents[2]


def test_entries_cut_short_are_removed_and_unwritable_ones_are_no_news(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "fedjax_mr" / "xla" / devices._machine()
    folder.mkdir(parents=True)
    for name in ("whole-cache", "whole-atime", "half-cache"):
        (folder / name).touch()
    settings = ("cache_dir", "cache_max_size")
    names = [f"jax_compilation_{each}" for each in settings] + ["jax_persistent_cache_min_compile_time_secs"]
    before = {name: jax.config.values[name] for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        devices._use_compilation_cache(devices.files.cache_folder())
        assert sorted(path.name for path in folder.iterdir()) == ["whole-atime", "whole-cache"]
        warnings.warn("Error writing persistent compilation cache entry for 'f': OSError: full", stacklevel=1)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


LATE = """
import warnings, jax
jax.numpy.zeros(3)
from fedjax_mr.engine import devices
devices.usable_cores = lambda: 8
devices._use_compilation_cache = lambda root: None

def run(**options):
    devices.set_up_jax(**options)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for options in ({"devices": None, "cohort_size": 5}, {"devices": None, "cohort_size": 1}, {"devices": 5}):
        run(**{"cohort_size": 5} | options)
for warning in caught:
    print(warning.message)
"""


@pytest.mark.parametrize(("chosen", "count"), [(None, 1), pytest.param("1", 0, marks=pytest.mark.slow)])
def test_a_program_that_started_jax_before_is_warned_of_idle_cores(chosen, count):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment |= {} if chosen is None else {"JAX_NUM_CPU_DEVICES": chosen}
    ended = subprocess.run([sys.executable, "-c", LATE], env=environment, capture_output=True, text=True, check=True)
    assert len(ended.stdout.splitlines()) == count
    if count:
        assert "uses 1 of 5 cores" in ended.stdout and "JAX_NUM_CPU_DEVICES=8" in ended.stdout


def test_a_later_run_may_still_have_more_devices(monkeypatch):
    """As long as JAX has not started; the number that the first run took is not the user's choice."""
    taken = {"jax_num_cpu_devices": -1}
    monkeypatch.setattr(devices, "_cpu_devices", -1)
    monkeypatch.setattr(devices.jax.config, "update", taken.__setitem__)
    monkeypatch.setattr(type(devices.jax.config), "values", taken, raising=False)
    monkeypatch.setenv("XLA_FLAGS", "")
    for count, requested, expected in ((1, False, 1), (4, False, 4), (2, True, 2), (3, False, 2)):
        devices._use_cores(count, requested=requested)
        assert taken["jax_num_cpu_devices"] == expected


def test_without_a_home_there_is_no_cache(monkeypatch):
    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setattr(devices.files, "cache_folder", lambda: None)
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        devices._use_compilation_cache(devices.files.cache_folder())
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


FORKED = """
import os, jax
import fedjax_mr as fmr
fork = lambda then: os.waitpid(os.fork() or (then(), os._exit(0))[1], 0)

def train():
    try:
        fmr.Simulator("fedavg", "logistic", None, cohort=1)
    except fmr.UserError as error:
        print(error, flush=True)

fork(train)
jax.numpy.zeros(3)
fork(train)
"""


def test_a_process_forked_after_jax_has_started_is_refused():
    """It would hang. The child only looks."""
    jax.devices()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of the fork
        child = os.fork()
    if child == 0:
        try:
            devices.refuse_settings()
        except UserError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.slow
def test_a_forked_process_is_refused_in_one_line_only_if_jax_had_started():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], env=environment, capture_output=True, text=True, timeout=120
    )
    before, after = ended.stdout.splitlines()
    assert before.startswith("a Simulator needs the clients' data") and "forked from one in which JAX had" in after
